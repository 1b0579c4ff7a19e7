"""CPU offload on a real GPU: weights in graph breaks, and pinned memory read in place.

``python tests/gpu/offload.py`` prints one JSON line a case and exits 1 if one of them does not hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    eager_on_graph,
)
from sglang.srt.utils import offloader

MIB = 1 << 20
GIB = 1 << 30


class Block(torch.nn.Module):
    """Two projections, the second inside an eager break, as PLE and the QSA indexer are in a prefill graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device="cuda")
        self.broken = torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _run_broken(self, self.inside(x), out)
        return out + 1


@eager_on_graph
def _run_broken(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(block.broken(x))


def breaks(layers: int = 4, width: int = 512) -> Iterator[dict[str, Any]]:
    """A graph over offloaded layers with a break each gives the resident answer, and follows a reload in place."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    inputs = [torch.randn(8, width, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    expected = [run(x) for x in inputs]
    offloader.OffloaderV1(GIB).wrap_modules(iter(blocks))
    moved = all(p.device.type == "cpu" and p.is_pinned() for block in blocks for p in block.parameters())
    x = inputs[0].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(x)
    torch.cuda.synchronize()
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, pool=torch.cuda.graph_pool_handle(), stream=stream):
        out = run(x)
    results = []
    for value in inputs:
        x.copy_(value)
        graph.replay()
        results.append(out.clone())
    torch.cuda.synchronize()
    equal = [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]
    yield {"case": "breaks: replay equals resident", "ok": moved and all(equal), "moved": moved, "equal": equal}

    for block in blocks:  # an update that writes into the host weights, as a reload does
        for p in block.parameters():
            p.data.mul_(0.5)
    x.copy_(inputs[0])
    updated = run(x).clone()
    graph.replay()
    torch.cuda.synchronize()
    changed = not torch.equal(updated, expected[0])
    yield {
        "case": "breaks: replay follows an update in place",
        "ok": changed and torch.equal(out, updated),
        "changed": changed,
    }


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of `run` on the GPU."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def views(experts: int = 64, rows: int = 1024, columns: int = 1024) -> Iterator[dict[str, Any]]:
    """A view of pinned experts costs no GPU memory, has their values, and reading some of them moves only those."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8):
        host = torch.randint(0, 100, (experts, rows, columns), dtype=torch.uint8).to(dtype).pin_memory()
        before = torch.cuda.memory_allocated()
        view = offloader._device_view(host, torch.device("cuda:0"))
        cost = torch.cuda.memory_allocated() - before
        same = torch.equal(
            view.view(torch.uint8).sum(dtype=torch.int64).cpu(), host.view(torch.uint8).sum(dtype=torch.int64)
        )
        host[3] = host[5]
        torch.cuda.synchronize()
        live = torch.equal(view[3].cpu().view(torch.uint8), host[5].view(torch.uint8))
        yield {
            "case": f"view of {dtype}",
            "ok": cost <= MIB and same and live and view.stride() == host.stride(),
            "gpu_bytes": cost,
            "same": same,
            "live": live,
        }
    host = torch.zeros(experts, rows, columns, dtype=torch.bfloat16).pin_memory()
    view = offloader._device_view(host, torch.device("cuda:0"))
    routed = torch.tensor([3, 17], device="cuda")
    in_place, copy = seconds(lambda: view.index_select(0, routed)), seconds(lambda: host.to("cuda", non_blocking=True))
    yield {
        "case": f"2 of {experts} experts in place against a copy of all",
        "ok": in_place < copy,
        "in_place_s": in_place,
        "copy_s": copy,
        "in_place_gb_s": 2 * host[0].nbytes / in_place / 1e9,
        "copy_gb_s": host.nbytes / copy / 1e9,
    }


def main() -> int:
    """Return 0 when every case holds."""
    failed = False
    with torch.inference_mode():
        for cases in (breaks(), views()):
            for case in cases:
                print(json.dumps(case), flush=True)
                failed |= not case["ok"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
