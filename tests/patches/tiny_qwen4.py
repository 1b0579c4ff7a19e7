"""The smallest Qwen4-Exp with every part: 3 GDN layers, a QSA layer, PLE on two of them, 8 experts, a vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def config(**text_overrides: Any) -> Qwen4ExpConfig:
    """Return the tiny configuration; `text_overrides` replace fields of its text part."""
    text = dict(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=len(LAYER_TYPES),
        layer_types=LAYER_TYPES,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attn_output_gate=True,
        output_gate_type="silu",
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_count=4,
        hc_lowrank=16,
        ple_layer_ids=[2, 3],
        ple_embed_dim=64,
        ple_conv_kernel_size=4,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=500,
        make_ngram_vocab_size_divisible_by=128,
        split_ngram_parts=8,
        seed=1234,
        indexer_n_heads=4,
        indexer_head_dim=32,
        indexer_kv_heads=1,
        indexer_budget=1024,
        indexer_compress_ratio=2,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.02,
        dtype="bfloat16",
    )
    text.update(text_overrides)
    vision = dict(
        depth=1,
        hidden_size=64,
        intermediate_size=64,
        num_heads=2,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=text["hidden_size"],
        num_position_embeddings=64,
    )
    return Qwen4ExpConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=508,
        video_token_id=509,
        vision_start_token_id=510,
        vision_end_token_id=511,
        architectures=["Qwen4ExpForConditionalGeneration"],
        dtype="bfloat16",
    )


def write_config(directory: Path, **text_overrides: Any) -> Path:
    """Write config.json alone (enough for argument resolution and for building modules); return the directory."""
    config(**text_overrides).save_pretrained(directory)
    return directory


def write_checkpoint(directory: Path, **text_overrides: Any) -> Path:
    """Write random bf16 weights in the published on-disk layout; return the directory."""
    torch.manual_seed(0)
    Qwen4ExpForConditionalGeneration(config(**text_overrides)).to(torch.bfloat16).save_pretrained(directory)
    return directory
