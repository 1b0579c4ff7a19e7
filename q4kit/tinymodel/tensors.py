"""The tensors of a checkpoint: names and shapes from transformers' own model, and how each is filled and
split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.tinymodel import random_values
from q4kit.tinymodel.options import PLE_FP8_SCALE, Options

if TYPE_CHECKING:
    import torch

_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int64": 8}
_TABLE_SUFFIX = ".ngram_embedding.weight"


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the checkpoint, made only when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def plan_tensors(config: dict[str, Any], o: Options) -> Iterator[TensorPlan]:
    """Yield every tensor of the checkpoint in the published layout.

    The names and shapes are those of transformers' `Qwen4ExpForConditionalGeneration`, built on the meta
    device; the n-gram tables are split into `split_ngram_parts` row blocks `shard_N`, and the experts follow
    `o.expert_layout`.
    """
    model = _meta_model(config)
    for name, buffer in _hash_buffers(model).items():
        yield TensorPlan(name, tuple(buffer.shape), "int64", partial(_same, buffer))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith(_TABLE_SUFFIX):
            yield from _table_plans(name, shape, o)
        elif o.expert_layout == "per-expert" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield from _expert_plans(name, shape, o)
        else:
            yield _slice_plan(name, name, shape, 0, fan_in_shape=shape, o=o, dtype=o.dtype)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _meta_model(config: dict[str, Any]) -> Any:
    """Return transformers' model with this config, all tensors on the meta device (no memory)."""
    import torch

    try:
        from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration
    except ImportError as error:
        raise EnvironmentFault(
            f"transformers has no Qwen4-Exp: {error}",
            remedy="install transformers 5.19 or newer (scripts/setup.sh)",
        ) from error
    try:
        parsed = Qwen4ExpConfig(**config)
    except Exception as error:  # huggingface_hub's strict dataclasses raise several types
        raise UsageError(f"transformers refuses this combination of sizes: {error}") from error
    with torch.device("meta"):
        model: Any = Qwen4ExpForConditionalGeneration
        return model(parsed)


def _hash_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the hash constants that the published checkpoint carries (int64), by tensor name."""
    import torch
    from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, reference.Qwen4ExpTextNGramEmbedding):
            found[f"{name}.layer_multipliers"] = reference._build_layer_multipliers(
                module.unigram_vocab_size, module.ngram_size, module.ple_layer_index, module.seed
            )
            found[f"{name}.ngram_heads_vocab_sizes"] = torch.tensor(module.head_vocab_sizes)
            found[f"{name}.ngram_heads_offsets"] = torch.tensor(module.head_offsets)
    return found


def _table_plans(name: str, shape: tuple[int, ...], o: Options) -> Iterator[TensorPlan]:
    """Yield the row blocks of one n-gram table [rows, dim], and its scale when it is stored in fp8."""
    rows, dim = shape
    block = -(-rows // o.split_parts)
    if -(-rows // block) != o.split_parts:
        raise UsageError(
            f"a table of {rows} rows cannot be split into {o.split_parts} parts of {block} rows",
            remedy="give fewer --split-parts or more --table-rows",
        )
    prefix = name.removesuffix(".weight")
    for part in range(o.split_parts):
        part_shape = (min(block, rows - part * block), dim)
        yield _slice_plan(
            f"{prefix}.shard_{part}.weight", name, part_shape, part * block * dim, fan_in_shape=shape, o=o,
            dtype=o.table_dtype,
        )  # fmt: skip
    if o.table_dtype == "float8_e4m3fn":
        yield TensorPlan(f"{prefix}.weight_scale", (1,), "bfloat16", _ple_scale)


def _ple_scale() -> torch.Tensor:
    import torch

    return torch.tensor([PLE_FP8_SCALE], dtype=torch.bfloat16)


def _expert_plans(name: str, shape: tuple[int, ...], o: Options) -> Iterator[TensorPlan]:
    """Yield the per-expert tensors of a fused parameter: gate_up [E, 2I, H] -> gate, up [I, H]; down [E,
    H, I].
    """
    prefix, projection = name.rsplit(".", 1)
    experts, rows, cols = shape
    halves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    rows //= len(halves)
    for expert in range(experts):
        for half, published in enumerate(halves):
            offset = (expert * len(halves) + half) * rows * cols
            yield _slice_plan(
                f"{prefix}.{expert}.{published}.weight", name, (rows, cols), offset, fan_in_shape=shape, o=o,
                dtype=o.dtype,
            )  # fmt: skip


def _slice_plan(
    name: str,
    stream: str,
    shape: tuple[int, ...],
    offset: int,
    *,
    fan_in_shape: tuple[int, ...],
    o: Options,
    dtype: str,
) -> TensorPlan:
    """Return the plan of `name`: elements from `offset` on of the random tensor `stream` of shape
    `fan_in_shape`.
    """

    def make() -> torch.Tensor:
        return random_values.draw(_quantiles(stream, fan_in_shape, dtype), o.seed, stream, offset, shape)

    return TensorPlan(name, shape, dtype, make)


def _quantiles(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the distribution of a parameter. Nothing sits at its neutral value: every tensor must matter."""
    if name.endswith(".A_log"):
        return random_values.log_uniform_quantiles(0.5, 8.0, dtype)
    if len(shape) == 1:
        # Gemma-style norms multiply by 1 + weight; GDN's gated norm and the vision tower's LayerNorms by
        # weight.
        plain_norm = name.endswith("linear_attn.norm.weight") or (
            ".visual." in name and "norm" in name and name.endswith(".weight")
        )
        return random_values.normal_quantiles(1.0 if plain_norm else 0.0, 0.1, dtype)
    if "conv1d" in name:
        return random_values.normal_quantiles(0.0, 0.3, dtype)
    if name.endswith(("embed_tokens.weight", "pos_embed.weight", _TABLE_SUFFIX)):
        scale = PLE_FP8_SCALE if dtype == "float8_e4m3fn" else 1.0
        return random_values.normal_quantiles(0.0, 1.0, dtype, scale)
    fan_in = shape[-1] if len(shape) <= 3 else math.prod(shape[1:])
    return random_values.normal_quantiles(0.0, fan_in**-0.5, dtype)
