"""The tensors of a checkpoint: names and shapes from transformers' own model, and how each is filled and
split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.tinymodel import random_values
from q4kit.tinymodel.options import PLE_FP8_SCALE, Options

if TYPE_CHECKING:
    import torch

_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int64": 8}
_TABLE_SUFFIX = ".ngram_embedding.weight"
_TEXT_PREFIX = "model.language_model."
_MTP_PREFIX = "mtp."
_MTP_GAIN = 8.0
"""Size of the newest token in a drafter's input, in units of the hidden state's: most of what it predicts from."""


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
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in shapes.items():
        yield from _parameter_plans(name, shape, o)
    if o.mtp_layers:
        yield from _mtp_plans(config, shapes, o)


def _parameter_plans(name: str, shape: tuple[int, ...], o: Options) -> Iterator[TensorPlan]:
    """Yield the tensors that hold the parameter `name` in the published layout."""
    if name.endswith(_TABLE_SUFFIX):
        yield from _table_plans(name, shape, o)
    elif o.expert_layout == "per-expert" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield from _expert_plans(name, shape, o)
    else:
        yield _slice_plan(name, name, shape, 0, fan_in_shape=shape, o=o, dtype=o.dtype)


def _mtp_plans(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], o: Options) -> Iterator[TensorPlan]:
    """Yield the multi-token-prediction head, by the names that SGLang's `qwen4_exp_mtp.py` loads (transformers skips
    it): one full-attention layer, the mixer of its streams, and the fusion of the newest token's embedding with the
    model's hidden state. Token embedding and output head are the model's own.

    Its mixer is the model's and its input is mostly the newest token, so that it drafts what the model says after that
    token where the tokens before do not matter: some drafts are right and some are wrong.
    """
    attention = config["text_config"]["layer_types"].index("full_attention")
    layer, mixer = f"{_TEXT_PREFIX}layers.{attention}.", f"{_TEXT_PREFIX}hyper_connection_mixer."
    for name, shape in shapes.items():
        if name.startswith(layer):
            yield from _parameter_plans(f"{_MTP_PREFIX}layers.0.{name.removeprefix(layer)}", shape, o)
        elif name.startswith(mixer):
            copied = f"{_MTP_PREFIX}{name.removeprefix(_TEXT_PREFIX)}"
            yield _slice_plan(copied, name, shape, 0, fan_in_shape=shape, o=o, dtype=o.dtype)
    size, streams = o.hidden_size, config["text_config"]["hc_count"]
    yield from _parameter_plans(f"{_MTP_PREFIX}pre_fc_norm_embedding.weight", (size,), o)
    yield from _parameter_plans(f"{_MTP_PREFIX}pre_fc_norm_hidden.weight", (streams * size,), o)
    yield from _parameter_plans(f"{_MTP_PREFIX}fc_hidden.weight", (size, size), o)
    (mixing,) = _parameter_plans(f"{_MTP_PREFIX}fc_embedding.weight", (size, size), o)
    yield replace(mixing, make=lambda: _near_identity(mixing.make()))


def _near_identity(noise: torch.Tensor) -> torch.Tensor:
    """Return the square matrix `noise` with the drafter's gain added along its diagonal, in its dtype."""
    import torch

    near = noise.float() + _MTP_GAIN * torch.eye(len(noise))
    return near.to(torch.bfloat16).to(noise.dtype)  # bf16-representable in every dtype, like all values


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
        return random_values.draw(_quantiles(stream, fan_in_shape, dtype, o), o.seed, stream, offset, shape)

    return TensorPlan(name, shape, dtype, make)


def _quantiles(name: str, shape: tuple[int, ...], dtype: str, o: Options) -> torch.Tensor:
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
    if name.endswith("embed_tokens.weight"):
        return random_values.normal_quantiles(0.0, o.embedding_std, dtype)
    if name.endswith(("pos_embed.weight", _TABLE_SUFFIX)):
        scale = PLE_FP8_SCALE if dtype == "float8_e4m3fn" else 1.0
        return random_values.normal_quantiles(0.0, 1.0, dtype, scale)
    fan_in = shape[-1] if len(shape) <= 3 else math.prod(shape[1:])
    return random_values.normal_quantiles(0.0, fan_in**-0.5, dtype)
