"""What a generated checkpoint looks like: presets, their overrides, and the `config.json` they lead to
(pure).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from q4kit.errors import UsageError

DType = Literal["bfloat16", "float32"]
PleDType = Literal["model", "bfloat16", "float8_e4m3fn"]
ExpertLayout = Literal["per-expert", "fused"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2; the first pads, the last ends a turn."""
VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""The last four ids of the tokenizer, in this order."""
MIN_VOCAB = 512
PLE_FP8_SCALE = 0.015625
"""Per-tensor `weight_scale` of an fp8 n-gram table: a power of two, so that bf16 holds it exactly, with
which 4.3 standard deviations (the largest value a generated tensor takes) stay below e4m3's 448.
"""

_MAY_BE_ZERO = ("seed", "eos_token_id", "mtp_layers")


@dataclass(frozen=True)
class Options:
    """Everything that decides the bytes of a generated checkpoint. Sizes are elements, tokens or rows.

    `table_rows` is `ngram_vocab_size_base`: each of the (ngram_size - 1) * heads_per_ngram hash heads of a
    PLE layer gets the next prime above it, so a table has about 16 * table_rows rows of ple_embed_dim / 16
    elements. `ple_layers` are one-indexed, as in the published config, and must be linear-attention layers.
    `mtp_layers` is 1 for a multi-token-prediction head, the drafter of speculative decoding, which changes no other
    tensor. `embedding_std` is the standard deviation of the token embedding: the larger it is, the more the next token
    follows from the last one alone, and the more drafts of that head are accepted.
    """

    preset: str
    layers: int
    experts: int
    experts_per_token: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    gdn_head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    expert_size: int
    indexer_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    hc_lowrank: int
    ple_embed_dim: int
    mrope_section: tuple[int, int, int]
    ple_layers: tuple[int, ...]
    table_rows: int
    split_parts: int
    vocab_size: int
    max_position_embeddings: int = 32768
    dtype: DType = "bfloat16"
    ple_dtype: PleDType = "model"
    mtp_layers: int = 0
    embedding_std: float = 1.0
    expert_layout: ExpertLayout = "per-expert"
    max_shard_size: int = 1_000_000_000
    eos_token_id: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for a value that SGLang or transformers would refuse only after minutes, or not
        at all.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < (0 if field.name in _MAY_BE_ZERO else 1):
                raise UsageError(f"{field.name} is {value}", remedy="give a positive number")
        if self.layers % 4:
            raise UsageError(
                f"layers is {self.layers}, which is not a multiple of 4",
                remedy="every fourth layer is a full-attention layer; give 4, 8, 12, ...",
            )
        if self.vocab_size < MIN_VOCAB:
            raise UsageError(f"vocab_size is {self.vocab_size}, the tokenizer needs {MIN_VOCAB}")
        if self.eos_token_id >= self.vocab_size:
            raise UsageError(f"eos_token_id is {self.eos_token_id}, the vocabulary has {self.vocab_size} entries")
        if self.experts_per_token > self.experts:
            raise UsageError(f"experts_per_token is {self.experts_per_token}, there are {self.experts} experts")
        bad = [i for i in self.ple_layers if not 1 <= i <= self.layers or i % 4 == 0]
        if bad:
            raise UsageError(
                f"ple_layers {bad}: no linear-attention layer of a {self.layers}-layer model",
                remedy="ids are one-indexed and not multiples of 4, which are full-attention layers",
            )
        if self.indexer_budget // self.indexer_compress_ratio not in (512, 2048):
            raise UsageError(
                f"indexer budget / ratio is {self.indexer_budget} / {self.indexer_compress_ratio}",
                remedy="SGLang's top-k takes 512 or 2048 blocks",
            )
        if self.mtp_layers > 1:
            raise UsageError(
                f"mtp_layers is {self.mtp_layers}",
                remedy="give 0 or 1: SGLang loads one layer, and drafts further tokens with it again",
            )
        if not 0 < self.embedding_std < math.inf:
            raise UsageError(f"embedding_std is {self.embedding_std}", remedy="give a positive number")
        if self.ple_dtype == "bfloat16" and self.dtype != "bfloat16":
            raise UsageError(
                f"ple_dtype bfloat16 with dtype {self.dtype}",
                remedy="use --ple-dtype model: the values are bf16-representable in every dtype",
            )

    @property
    def table_dtype(self) -> str:
        """Storage dtype of the n-gram tables."""
        return self.dtype if self.ple_dtype == "model" else self.ple_dtype

    def to_json(self) -> dict[str, Any]:
        """Return the options as written to `generation_args.json`."""
        return dataclasses.asdict(self)


_TINY: dict[str, Any] = {
    "layers": 4,
    "experts": 8,
    "experts_per_token": 2,
    "attention_heads": 4,
    "kv_heads": 2,
    "gdn_key_heads": 2,
    "gdn_value_heads": 4,
    "indexer_budget": 1024,
    "indexer_compress_ratio": 2,
    "ple_layers": (2, 3),
    "table_rows": 500,
    "split_parts": 8,
    "vocab_size": MIN_VOCAB,
}

PRESETS: dict[str, Options] = {
    # As small as it goes. Budget 1024 at ratio 2 is the smallest QSA that SGLang takes: it selects past
    # 1024 tokens.
    "mini": Options(
        preset="mini",
        **_TINY,
        hidden_size=64,
        head_dim=32,
        gdn_head_dim=32,
        expert_size=32,
        indexer_heads=4,
        indexer_head_dim=32,
        hc_lowrank=16,
        ple_embed_dim=64,
        mrope_section=(2, 1, 1),
        max_shard_size=1_000_000,
    ),
    # The smallest head and group sizes that the CUDA kernels take: GDN 128, attention 256, hidden a multiple
    # of 512.
    "gpu": Options(
        preset="gpu",
        **_TINY,
        hidden_size=512,
        head_dim=256,
        gdn_head_dim=128,
        expert_size=128,
        indexer_heads=8,
        indexer_head_dim=128,
        hc_lowrank=64,
        ple_embed_dim=512,
        mrope_section=(11, 11, 10),
        max_shard_size=16_000_000,
    ),
    # The architecture's default head, expert and stream sizes; fewer layers and experts. About 6 GB.
    "mid": Options(
        preset="mid",
        layers=12,
        experts=64,
        experts_per_token=10,
        hidden_size=2048,
        attention_heads=16,
        kv_heads=2,
        head_dim=256,
        gdn_head_dim=128,
        gdn_key_heads=16,
        gdn_value_heads=32,
        expert_size=512,
        indexer_heads=16,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        hc_lowrank=320,
        ple_embed_dim=2048,
        mrope_section=(11, 11, 10),
        ple_layers=(2,),
        table_rows=100_000,
        split_parts=64,
        vocab_size=8192,
        max_position_embeddings=262_144,
    ),
}


def text_config(o: Options) -> dict[str, Any]:
    """Return `text_config` as the published checkpoint spells it (sparse layers are called
    full_attention).
    """
    config: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "dtype": o.dtype,
        "vocab_size": o.vocab_size,
        "hidden_size": o.hidden_size,
        "num_hidden_layers": o.layers,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(o.layers)],
        "full_attention_interval": 4,
        "num_attention_heads": o.attention_heads,
        "num_key_value_heads": o.kv_heads,
        "head_dim": o.head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "output_gate_type": "silu",
        "max_position_embeddings": o.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(o.mrope_section),
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": o.gdn_head_dim,
        "linear_value_head_dim": o.gdn_head_dim,
        "linear_num_key_heads": o.gdn_key_heads,
        "linear_num_value_heads": o.gdn_value_heads,
        "num_experts": o.experts,
        "num_experts_per_tok": o.experts_per_token,
        "norm_topk_prob": True,
        "moe_intermediate_size": o.expert_size,
        "shared_expert_intermediate_size": o.expert_size,
        "hc_count": 4,
        "hc_lowrank": o.hc_lowrank,
        "ple_layer_ids": list(o.ple_layers),
        "ple_embed_dim": o.ple_embed_dim,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": o.table_rows,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": o.split_parts,
        "seed": 1234,
        "indexer_n_heads": o.indexer_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": o.indexer_head_dim,
        "indexer_budget": o.indexer_budget,
        "indexer_compress_ratio": o.indexer_compress_ratio,
        "eos_token_id": o.eos_token_id,
        "pad_token_id": 0,
        "initializer_range": 0.02,
    }
    if o.ple_dtype == "float8_e4m3fn":
        # without it SGLang refuses fp8 shards of an offloaded table
        config["ple_embedding_dtype"] = "float8_e4m3fn"
    if o.mtp_layers:
        # Qwen3.5's word for it. SGLang 0.5.23 reads none for this architecture: it loads the tensors that are there.
        config["mtp_num_hidden_layers"] = o.mtp_layers
    return config


def model_config(o: Options, tokenizer_size: int) -> dict[str, Any]:
    """Return the whole `config.json`; `tokenizer_size` places the vision tokens (its last four ids)."""
    first_vision_id = tokenizer_size - len(VISION_TOKENS)
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": o.dtype,
        "tie_word_embeddings": False,
        "image_token_id": first_vision_id,
        "video_token_id": first_vision_id + 1,
        "vision_start_token_id": first_vision_id + 2,
        "vision_end_token_id": first_vision_id + 3,
        "text_config": text_config(o),
        "vision_config": {
            "model_type": "qwen4_exp_vision",
            "depth": 1,
            "hidden_size": 64,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 64,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": o.hidden_size,
            "num_position_embeddings": 64,
            # SGLang's class defaults to three layers, and then a tower without them makes empty embeddings
            "deepstack_visual_indexes": [],
        },
    }


def processor_configs() -> dict[str, dict[str, Any]]:
    """Return the image and video processor files, by name; the stock server needs them to start a vision
    model.
    """
    shared = {
        "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},  # pixels
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **shared},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **shared},
    }
