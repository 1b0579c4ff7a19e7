"""The sizes of a Qwen4-Exp model that decide its memory, from a `config.json` (pure, but for reading the file)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit.errors import UsageError

PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "models" / "qwen3.8-flash-next.toml"
"""Sizes of the published model, with the source of each number."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Shape:
    """Layer counts and widths, in elements. `*_layers` add up to all layers."""

    name: str
    dtype: str
    vocab: int
    tied: bool
    hidden: int
    gdn_layers: int
    qsa_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    gdn_key_dim: int
    """Key heads times their dimension."""
    gdn_value_heads: int
    gdn_key_head_dim: int
    gdn_value_head_dim: int
    conv_kernel: int
    experts: int
    top_k: int
    expert_size: int
    shared_size: int
    streams: int
    """Residual streams of the hyper-connections (`hc_count`)."""
    stream_rank: int
    ple_layers: int
    ple_dim: int
    ple_conv_kernel: int
    ngram_size: int
    table_rows: int
    """Rows of all n-gram tables together."""
    table_cols: int
    table_dtype: str
    index_heads: int
    index_dim: int
    index_ratio: int

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.gdn_layers + self.qsa_layers

    @property
    def gdn_value_dim(self) -> int:
        """Value heads times their dimension."""
        return self.gdn_value_heads * self.gdn_value_head_dim

    # -- parameters ------------------------------------------------------------------------------

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert: gate, up [I, H] and down [H, I]."""
        return 3 * self.hidden * self.expert_size

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.layers * self.experts * self.expert_parameters

    @property
    def table_parameters(self) -> int:
        """Elements of all n-gram tables."""
        return self.table_rows * self.table_cols

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token needs: all but routed experts, n-gram tables and vision tower."""
        wide = self.streams * self.hidden
        mixer = wide + 2 * self.stream_rank * wide  # norm, down [r, nH], up [nH, r]
        connection = mixer + self.streams * wide  # and block_inject [n, nH]
        moe = (
            self.experts * self.hidden  # router
            + 3 * self.hidden * self.shared_size
            + self.hidden  # gate of the shared expert
        )
        conv_channels = 2 * self.gdn_key_dim + self.gdn_value_dim
        gdn = (
            conv_channels * (self.hidden + self.conv_kernel)  # in_proj_qkv, conv1d
            + 2 * self.gdn_value_dim * self.hidden  # in_proj_z, out_proj
            + 2 * self.gdn_value_heads * self.hidden  # in_proj_a, in_proj_b
            + 2 * self.gdn_value_heads  # A_log, dt_bias
            + self.gdn_value_head_dim  # norm
        )
        qsa = (
            2 * self.q_heads * self.head_dim * self.hidden  # q_proj with its output gate
            + 2 * self.kv_heads * self.head_dim * self.hidden  # k_proj, v_proj
            + self.q_heads * self.head_dim * self.hidden  # o_proj
            + 2 * self.head_dim  # q_norm, k_norm
            + (self.index_heads + 1) * self.index_dim * self.hidden  # index_qk_proj
            + 2 * self.index_dim
        )
        ple = wide * (self.ple_conv_kernel + 3 + self.ple_dim) + self.hidden * self.ple_dim
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return (
            embeddings
            + mixer
            + self.layers * (2 * connection + moe)
            + self.gdn_layers * gdn
            + self.qsa_layers * qsa
            + self.ple_layers * ple
        )

    @property
    def parameters(self) -> int:
        """All parameters of the text model."""
        return self.dense_parameters + self.routed_parameters + self.table_parameters


def from_config(config: Mapping[str, Any], name: str) -> Shape:
    """Return the shape that a decoded `config.json` describes (its `text_config` where it has one).

    Raises:
        UsageError: a size is missing, or a dtype is not known; it is named.
    """
    text = config.get("text_config") or config

    def need(key: str) -> Any:
        if text.get(key) is None:
            raise UsageError(f"{name}: {key!r} is missing", remedy="give the config.json of a Qwen4-Exp checkpoint")
        return text[key]

    try:
        layers = int(need("num_hidden_layers"))
        qsa = _qsa_layers(text, layers)
        heads = (int(need("ngram_size")) - 1) * int(need("heads_per_ngram"))
        ple_layers = len(set(text.get("ple_layer_ids") or []))
        dtype = str(text.get("dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        table_dtype = str(text.get("ple_embedding_dtype") or dtype)
        for key, value in (("dtype", dtype), ("ple_embedding_dtype", table_dtype)):
            if value not in DTYPE_BYTES:
                raise UsageError(f"{name}: {key} is {value!r}", remedy=f"expected one of {', '.join(DTYPE_BYTES)}")
        ple_dim = int(text.get("ple_embed_dim") or need("hidden_size"))
        return Shape(
            name=name,
            dtype=dtype,
            vocab=int(need("vocab_size")),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            hidden=int(need("hidden_size")),
            gdn_layers=layers - qsa,
            qsa_layers=qsa,
            q_heads=int(need("num_attention_heads")),
            kv_heads=int(need("num_key_value_heads")),
            head_dim=int(need("head_dim")),
            gdn_key_dim=int(need("linear_num_key_heads")) * int(need("linear_key_head_dim")),
            gdn_value_heads=int(need("linear_num_value_heads")),
            gdn_key_head_dim=int(need("linear_key_head_dim")),
            gdn_value_head_dim=int(need("linear_value_head_dim")),
            conv_kernel=int(need("linear_conv_kernel_dim")),
            experts=int(need("num_experts")),
            top_k=int(need("num_experts_per_tok")),
            expert_size=int(need("moe_intermediate_size")),
            shared_size=int(need("shared_expert_intermediate_size")),
            streams=int(need("hc_count")),
            stream_rank=int(need("hc_lowrank")),
            ple_layers=ple_layers,
            ple_dim=ple_dim,
            ple_conv_kernel=int(need("ple_conv_kernel_size")),
            ngram_size=int(need("ngram_size")),
            table_rows=sum(
                table_rows(
                    int(need("ngram_vocab_size_base")), heads, ple_layers,
                    int(need("make_ngram_vocab_size_divisible_by")),
                )
            ),
            table_cols=ple_dim // heads,
            table_dtype=table_dtype,
            index_heads=int(need("indexer_n_heads")),
            index_dim=int(need("indexer_head_dim")),
            index_ratio=int(need("indexer_compress_ratio")),
        )  # fmt: skip
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{name}: a size is no number ({error})") from error


def load(path: Path) -> Shape:
    """Return the shape of a checkpoint folder, a `config.json`, or a data file like `PUBLISHED`.

    Raises:
        UsageError: no such file, or it is not what it should be.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        config = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}", remedy="give a checkpoint folder, its config.json, or a file of data/models/"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} cannot be decoded: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no object")
    return from_config(config, str(config.get("name") or file.parent.name))


def table_rows(base: int, heads: int, tables: int, divisor: int) -> list[int]:
    """Return the rows of each n-gram table: one prime above `base` a hash head, all different, padded at the end."""
    rows, last = [], base
    for _ in range(tables):
        total = 0
        for _ in range(heads):
            last = _next_prime(last)
            total += last
        rows.append(-(-total // divisor) * divisor)
    return rows


def _next_prime(above: int) -> int:
    candidate = above + 1
    while candidate < 2 or any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


def _qsa_layers(text: Mapping[str, Any], layers: int) -> int:
    types = text.get("layer_types")
    if types:
        return sum(1 for kind in types if kind != "linear_attention")
    return layers // int(text.get("full_attention_interval") or 4)
