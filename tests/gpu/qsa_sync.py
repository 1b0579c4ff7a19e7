"""The QSA indexer's projection and RoPE on a GPU: no host synchronisation, and right past the original cache length.

``python tests/gpu/qsa_sync.py`` prints one JSON line a case and exits 1 if one of them does not hold.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding

HEADS, HEAD_DIM, ROTARY_DIM, HIDDEN = 4, 128, 64, 2560
ORIGINAL_LENGTH, CONTEXT_LENGTH = 4096, 262_144
BASE = 10_000_000
TOKENS, LAYERS = 256, 12


def make_indexer() -> QSAIndexer:
    layer = QSAIndexer.__new__(QSAIndexer)
    torch.nn.Module.__init__(layer)
    layer.layer_id, layer.index_n_heads, layer.index_kv_heads, layer.index_head_dim = 0, HEADS, 1, HEAD_DIM
    layer._rope_axis_map_cache = None
    layer.rotary_emb = MRotaryEmbedding(
        HEAD_DIM, ROTARY_DIM, ORIGINAL_LENGTH, BASE, True, torch.float32, mrope_section=[12, 10, 10]
    ).cuda()
    layer.rotary_emb.cos_sin_cache = layer.rotary_emb.cos_sin_cache.cuda().float()
    layer.rotary_emb._ensure_cos_sin_cache_length(CONTEXT_LENGTH - 1)  # ModelRunner's reservation
    weight = torch.randn((HEADS + 1) * HEAD_DIM, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    layer.index_qk_proj = lambda hidden: (hidden @ weight.T, None)
    norm = SimpleNamespace(weight=torch.zeros(HEAD_DIM, device="cuda", dtype=torch.bfloat16), variance_epsilon=1e-6)
    layer.__dict__["q_layernorm"] = norm
    return layer


def make_pool() -> SimpleNamespace:
    state = torch.zeros(TOKENS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return SimpleNamespace(
        qsa_compressed_dtype=torch.bfloat16,
        qsa_rope_position_buffer=torch.zeros(TOKENS, 3, device="cuda", dtype=torch.int64),
        get_qsa_key_state_buffer=lambda layer_id: state,
    )


def rotated(positions: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    half = ROTARY_DIM // 2
    frequencies = BASE ** (-torch.arange(half, dtype=torch.float64, device="cuda") / half)
    angles = positions[:, None].double() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = tensor[..., :half].double(), tensor[..., half:ROTARY_DIM].double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, tensor[..., ROTARY_DIM:].double()], -1)


def without_sync(name: str, call: Any) -> dict[str, Any]:
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = time.perf_counter()
        for _ in range(LAYERS):
            call()
        host_ms = (time.perf_counter() - start) * 1e3
        return {"case": name, "host_ms_12_layers": round(host_ms, 3), "ok": True}
    except RuntimeError as error:
        return {"case": name, "error": str(error).splitlines()[0], "ok": False}
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> int:
    indexer, pool = make_indexer(), make_pool()
    positions = torch.linspace(0, CONTEXT_LENGTH - 1, TOKENS, device="cuda").long()
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    tensor = torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda")
    slots = torch.arange(TOKENS, device="cuda")
    results = [
        without_sync("apply_rope", lambda: indexer.apply_rope(positions, tensor)),
        without_sync("project_qk_fused", lambda: indexer.project_qk(hidden, positions, pool=pool, cache_loc=slots)),
    ]
    error = (indexer.apply_rope(positions, tensor).double() - rotated(positions, tensor)).abs().max().item()
    # float32 angles near 262144 carry about 0.016 rad of rounding.
    results.append({"case": "long_positions", "max_error": error, "ok": error < 0.1})
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
