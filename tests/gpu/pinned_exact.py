"""Pinned host tables on a real GPU: RSS against the table's size, and the three ways the device reads them.

``python tests/gpu/pinned_exact.py [--gib 5]`` prints one JSON line a case and exits 1 if one of them does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from sglang.srt.layers.moe.paged_experts.store import HostExpertStore
from sglang.srt.models.qwen4_exp import _gather_ple_embedding_from_pinned_kernel
from sglang.srt.models.qwen4_exp_ple_table import allocate_ple_host_table

ROW_BYTES = 160
GIB = 1 << 30
RSS_TOLERANCE = 0.01


def rss_bytes() -> int:
    """Resident memory of this process, bytes; pinned and shared mappings included."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024


def measured(allocate: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Allocate and say what it cost in RSS and time. A pin may take pages that RSS does not count: MemAvailable too."""
    gc.collect()
    before, available, start = rss_bytes(), mem_available_bytes(), time.perf_counter()
    held = allocate()
    seconds = time.perf_counter() - start
    return held, {
        "rss_bytes": rss_bytes() - before,
        "mem_available_drop_bytes": available - mem_available_bytes(),
        "seconds": round(seconds, 3),
    }


def mem_available_bytes() -> int:
    meminfo = Path("/proc/meminfo").read_text()
    return int(next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:")).split()[1]) * 1024


def within(rss: int, nbytes: int) -> bool:
    return abs(rss - nbytes) <= RSS_TOLERANCE * nbytes


def ple_table(gib: float) -> Iterator[dict[str, Any]]:
    rows = int(gib * GIB) // ROW_BYTES
    table, cost = measured(lambda: allocate_ple_host_table((rows, ROW_BYTES), torch.float8_e4m3fn))
    nbytes = rows * ROW_BYTES
    yield {"case": "ple_table_rss", "table_bytes": nbytes, **cost, "ok": within(cost["rss_bytes"], nbytes)}
    yield {"case": "ple_table_is_pinned", "ok": table.is_pinned()}

    ids = torch.tensor([0, 1, rows // 2, rows - 1])
    for i in ids:
        table[i].copy_(torch.randint(-8, 8, (ROW_BYTES,)).to(torch.float8_e4m3fn))
    out = torch.empty(len(ids), ROW_BYTES, dtype=torch.bfloat16, device="cuda")
    _gather_ple_embedding_from_pinned_kernel[(len(ids),)](
        table.data_ptr(), ids.cuda(), out, embedding_dim=ROW_BYTES, tp_vocab_start=0, tp_vocab_end=rows,
        is_fp8=True, BLOCK_D=triton.next_power_of_2(ROW_BYTES),
    )  # fmt: skip
    yield {"case": "gather_by_host_address", "ok": torch.equal(out.cpu(), table[ids].to(torch.bfloat16))}
    del table
    gc.collect()
    left = rss_bytes()
    again, cost = measured(lambda: allocate_ple_host_table((rows, ROW_BYTES), torch.float8_e4m3fn))
    yield {"case": "freed_with_its_last_view", "rss_after_free_bytes": left, "ok": within(cost["rss_bytes"], nbytes)}
    del again


def expert_store() -> Iterator[dict[str, Any]]:
    """80 experts of 13 MB: 1.02 GiB, which torch rounds to 2 GiB."""
    experts, slots = 80, 8
    layer = SimpleNamespace(w13=torch.zeros(slots, 1280, 2560, dtype=torch.float32, device="cuda"))
    store, cost = measured(lambda: HostExpertStore(layer, ["w13"], num_experts=experts))
    host = store.host["w13"]
    nbytes = host.numel() * host.element_size()
    yield {"case": "expert_store_rss", "table_bytes": nbytes, **cost, "ok": within(cost["rss_bytes"], nbytes)}
    host[79].normal_()
    host[3].normal_()
    store.page_in(layer, [(79, 0), (3, 7)])
    torch.cuda.synchronize()
    yield {
        "case": "page_in",
        "ok": torch.equal(layer.w13[0].cpu(), host[79]) and torch.equal(layer.w13[7].cpu(), host[3]),
    }
    layer.w13.zero_()
    store.bind_device_gather(layer)
    src, dst = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([3, 79], [1, 2]))
    count = torch.tensor([2], dtype=torch.int32, device="cuda")
    store.gather(src, dst, count)
    yield {
        "case": "gather_by_device_pointer",
        "ok": torch.equal(layer.w13[1].cpu(), host[3]) and torch.equal(layer.w13[2].cpu(), host[79]),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=5.0, help="size of the PLE table (default: 5)")
    args = parser.parse_args(argv)
    torch.zeros(1, device="cuda")  # the context's own memory is not the table's
    results = [*ple_table(args.gib), *expert_store()]
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
