"""The fp8 KV write on a GPU: the caller's K and V stay, overflow saturates, a unit scale launches no division.

``python tests/gpu/fp8_kv.py`` prints one JSON line a case and exits 1 if one of them does not hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch.profiler import ProfilerActivity, profile

HEADS, HEAD_DIM, TOKENS, SLOTS = 2, 256, 64, 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def make_pool() -> MHATokenToKVPool:
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.dtype, pool.store_dtype = FP8, torch.uint8
    pool.size, pool.page_size, pool.start_layer = SLOTS - 1, 1, 0
    pool.head_num, pool.head_dim, pool.v_head_dim = HEADS, HEAD_DIM, HEAD_DIM
    pool.row_dim = pool.v_row_dim = HEADS * HEAD_DIM
    pool.use_hnd = False
    pool.quant_method = memory_pool.UnquantizedKVCacheMethod.__new__(memory_pool.UnquantizedKVCacheMethod)
    pool.kv_cache_layout = "nhd"
    pool.alt_stream = None
    pool.device_module = torch.cuda
    for name in ("k_buffer", "v_buffer"):
        setattr(pool, name, [torch.zeros(SLOTS, HEADS, HEAD_DIM, dtype=torch.uint8, device="cuda")])
    pool._check_physical_write_loc = lambda *args: None
    return pool


def make_layer(scale: float | None) -> SimpleNamespace:
    tensor = None if scale is None else torch.tensor(scale, device="cuda")
    return SimpleNamespace(layer_id=0, k_scale=tensor, v_scale=tensor, k_scale_float=scale, v_scale_float=scale)


def write(pool: MHATokenToKVPool, layer: SimpleNamespace, k: torch.Tensor, v: torch.Tensor) -> None:
    pool.set_kv_buffer(layer, torch.arange(1, 1 + TOKENS, device="cuda"), k, v, layer.k_scale, layer.v_scale)


def stored(pool: MHATokenToKVPool) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(getattr(pool, name)[0][1 : 1 + TOKENS].view(FP8).float() for name in ("k_buffer", "v_buffer"))


def kernels(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def cases() -> Iterator[dict[str, Any]]:
    values = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e4, float("inf"), float("nan")], device="cuda")
    cast = values.bfloat16().to(FP8).float()
    saturates = bool(cast[:6].eq(FP8_MAX).all() and cast[6].isnan())
    yield {
        "case": "torch_cast_saturates",
        "torch": torch.__version__,
        "cast": repr(cast.tolist()),
        "ok": saturates,
    }

    k, v = (torch.randn(TOKENS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) * 8 for _ in range(2))
    for scale in (None, 1.0, 2.0, 0.37):
        pool, mine = make_pool(), (k.clone(), v.clone())
        write(pool, make_layer(scale), *mine)
        untouched = torch.equal(mine[0], k) and torch.equal(mine[1], v)
        in_place = [t.clone() if scale is None else t.clone().div_(torch.tensor(scale, device="cuda")) for t in (k, v)]
        same = all(torch.equal(got, t.to(FP8).float()) for got, t in zip(stored(pool), in_place, strict=True))
        yield {"case": "caller_untouched", "scale": scale, "bytes_as_in_place": same, "ok": untouched and same}

    big = torch.full_like(k, 1e4)
    pool = make_pool()
    write(pool, make_layer(None), big, -big)
    yield {
        "case": "pool_saturates",
        "ok": bool((stored(pool)[0] == FP8_MAX).all() and (stored(pool)[1] == -FP8_MAX).all()),
    }

    plain = kernels(lambda: write(pool, make_layer(None), k, v))
    layer = make_layer(1.0)
    unit = kernels(lambda: write(pool, layer, k, v))
    yield {
        "case": "unit_scale_launches_nothing",
        "without_scale": len(plain),
        "unit_scale": len(unit),
        "ok": len(unit) == len(plain),
    }


def main() -> int:
    results = list(cases())
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
