#!/usr/bin/env python3
"""Where launch gating spends its time in a decode step: every part by itself, then the step it adds up to.

No server. The parts use the patched SGLang's own classes: its fused n-gram hash, ``HostReadback``, row reader and
``Qwen4ExpNvmeEmbedding``; graphs of 100 to 2,000 small kernels stand in for the model's. One JSON line a part,
microseconds (p50, p95); exit 0 when all parts could be measured, 1 if one failed, 4 without a CUDA device.

On the critical path of gating, in this order: the ids on the device (``ids_gpu``), their copy (``readback_idle``), the
host's wake-up (``wake``), the read (``fill``), the launch (``launch_call``) and its way to the GPU (``launch_to_gpu``).
``ids_host`` is the host's time to queue the hash: it counts only where the host, not the GPU, is the bottleneck.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.gpu.step_chain import HEADS, ROW_BYTES, spread, write_table

CRITICAL_PATH = ("ids_gpu", "readback_idle", "wake", "fill", "launch_call", "launch_to_gpu")
GRAPH_NODES = (100, 300, 1000, 2000)
STATES = 8
"""Mamba slots of the history that the hash reads."""


def total(parts: dict[str, dict[str, Any]], names: tuple[str, ...] = CRITICAL_PATH) -> float | None:
    """Return the sum of the medians of `names`, microseconds; None where one is missing."""
    if any("p50" not in parts.get(name, {}) for name in names):
        return None
    return round(sum(parts[name]["p50"] for name in names), 1)


def sample(call: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> list[float]:
    """Return the host's time of `repeats` calls, microseconds, `prepare` not counted; the first tenth is dropped."""
    times = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times[repeats // 10 :]


class Parts:
    """The patched SGLang's objects, set up outside a server as its own unit tests do."""

    def __init__(self, folder: Path, rows: int, reader: str, device: str = "cuda") -> None:
        import torch
        from sglang.srt.layers.ple_rows import open_flat_source, open_row_reader
        from sglang.srt.models import qwen4_exp
        from sglang.srt.models.qwen4_exp_ple_nvme import HostReadback, Qwen4ExpNvmeEmbedding

        self.torch = torch
        self.rows = rows
        self.pool = SimpleNamespace(ple_window_cache=None)
        qwen4_exp.get_req_to_token_pool = lambda: self.pool
        kind = qwen4_exp.Qwen4ExpNGramEmbedding
        ple = kind.__new__(kind)
        torch.nn.Module.__init__(ple)
        ple.config = SimpleNamespace(seed=1234)
        ple.ngram_size, ple.heads_per_ngram, ple.ngram_heads, ple.ple_layer_index = 3, 8, HEADS, 0
        ple.unigram_vocab_size, ple.ngram_vocab_size_base, ple.eos_token_id = 248_320, rows // 17, 248_044
        ple._host_hash_buffers, ple.enable_ple_fusion = None, True
        sizes, offsets, _ = ple._build_head_vocab_and_offsets()
        ple.register_buffer("layer_multipliers", ple._build_layer_multipliers(3).to(device))
        ple.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes, device=device))
        ple.register_buffer("ngram_heads_offsets", torch.tensor(offsets, device=device))
        if int(sum(sizes)) > rows:
            raise ValueError(f"the heads' {sum(sizes)} rows do not fit the table's {rows}")
        self.ple = ple
        self.source = open_flat_source(str(folder))
        self.reader = open_row_reader(self.source, reader)
        nvme = Qwen4ExpNvmeEmbedding.__new__(Qwen4ExpNvmeEmbedding)
        torch.nn.Module.__init__(nvme)
        nvme.register_buffer("weight_scale", torch.ones(1, device=device))
        nvme.row_bytes, nvme.row_dtype, nvme.reader = ROW_BYTES, torch.float8_e4m3fn, self.reader
        nvme._graph_rows, nvme.failures, nvme.wait_seconds = {}, {}, 0.0
        self.nvme = nvme
        self.nvme.graph_values(1, HEADS)
        self.read_back = HostReadback()
        self.history = torch.randint(0, 248_320, (STATES, 2), device=device)
        self.mapping = torch.arange(STATES, device=device, dtype=torch.int32)
        self.request = torch.tensor([3], device=device)
        self.token = torch.tensor([77], device=device)
        self.batch_ids = torch.arange(1)

    def hash(self) -> Any:
        """Queue what replay_prepare queues for a batch of one: slots, history, window, hash."""
        torch = self.torch
        self.pool.ple_window_cache = None
        slots = self.mapping[self.request].long()
        context = torch.cat([self.history[slots], self.token.unsqueeze(1)], dim=1)
        torch.ones(1, dtype=torch.long).bool()  # the layout that replay_prepare makes on the host
        torch.arange(1)
        return self.ple._hash_contexts(context.to(torch.long), decode_sized=True).unsqueeze(0)

    def new_token(self) -> None:
        """Change the token, so that no two steps read the same rows."""
        self.token.random_(0, 248_320)
        self.torch.cuda.synchronize()

    def fill(self, ids: Any) -> None:
        self.nvme.fill_graph_rows(1, ids, self.batch_ids)


def gpu_us(torch: Any, call: Callable[[], object], repeats: int, cycles: int) -> list[float]:
    """Return the GPU's time of `call`, its launches queued behind other work so that they do not count."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[repeats // 10 :]


def make_graph(torch: Any, nodes: int, flag: Any, source: Any, kernel_cycles: int) -> Any:
    """Return a graph of `nodes` kernels that begins by copying `source` (device) to `flag` (pinned)."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        flag.copy_(source, non_blocking=True)
        for _ in range(nodes - 1):
            torch.cuda._sleep(kernel_cycles)
    return graph


def launches(torch: Any, nodes: int, repeats: int, cycles: float) -> tuple[list[float], list[float]]:
    """Return (time of the launch call, time from its return until the graph's first node was seen), microseconds."""
    flag = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    view, source = flag.numpy(), torch.ones(1, dtype=torch.int64, device="cuda")
    graph = make_graph(torch, nodes, flag, source, int(2 * cycles))
    calls, arrivals = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        view[0] = 0
        start = time.perf_counter()
        graph.replay()
        called = time.perf_counter()
        limit = called + 1
        while not view[0] and time.perf_counter() < limit:
            pass
        seen = time.perf_counter()
        calls.append((called - start) * 1e6)
        arrivals.append((seen - called) * 1e6)
    torch.cuda.synchronize()
    return calls[repeats // 10 :], arrivals[repeats // 10 :]


def wake_us(torch: Any, repeats: int, cycles: int) -> list[float]:
    """Return how much later `Event.synchronize` returns than the last work of the GPU is seen in pinned memory."""
    flag = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    view, source = flag.numpy(), torch.ones(1, dtype=torch.int64, device="cuda")
    polled, synchronized = [], []
    event = torch.cuda.Event()
    for times, poll in ((polled, True), (synchronized, False)):
        for _ in range(repeats):
            torch.cuda.synchronize()
            view[0] = 0
            torch.cuda._sleep(cycles)
            start = time.perf_counter()
            torch.cuda._sleep(cycles)
            flag.copy_(source, non_blocking=True)
            event.record()
            if poll:
                while not view[0]:
                    pass
            else:
                event.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
    middle = sorted(polled)[len(polled) // 2]
    return [max(0.0, t - middle) for t in synchronized[repeats // 10 :]]


def measure(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (part, figures)."""
    import torch

    from tests.gpu.step_engine import cycles_per_us

    torch.zeros(1, device="cuda")
    write_table(folder, args.rows)
    cycles = cycles_per_us()
    parts = Parts(folder, args.rows, "auto")
    n, sleep = args.repeats, int(400 * cycles)
    ids = parts.hash()
    torch.cuda.synchronize()
    yield "ids_host", spread(sample(parts.hash, n, parts.new_token)) | {"what": "host time to queue the hash"}
    yield "ids_gpu", spread(gpu_us(torch, parts.hash, n, sleep)) | {"what": "the hash's kernels on the GPU"}
    yield "readback_idle", spread(sample(lambda: parts.read_back(ids), n)) | {"what": "HostReadback of an idle GPU"}
    yield "wake", spread(wake_us(torch, n, sleep)) | {"what": "Event.synchronize behind 400 us of work, over polling"}
    yield "sync_stream", spread(sample(torch.cuda.current_stream().synchronize, n)) | {"what": "an idle stream"}

    out = parts.nvme._graph_rows[1]
    rng = np.random.default_rng(0)

    def fresh() -> None:
        nonlocal host_ids
        host_ids = torch.from_numpy(rng.integers(0, args.rows, (1, HEADS)))

    host_ids = ids[0].cpu()
    # The table was written just now: its rows are in the page cache.
    what = {"what": "fill_graph_rows of 16 rows in the page cache"}
    yield "fill", spread(sample(lambda: parts.fill(host_ids), n, fresh)) | what
    flat = out.view(-1, ROW_BYTES)
    for name in ("auto", "io_uring", "pread", "mmap"):
        from sglang.srt.layers.ple_rows import open_row_reader

        try:
            with open_row_reader(parts.source, name) as reader:
                figures = spread(sample(lambda r=reader: r.read_rows(host_ids.view(-1), flat), n, fresh))
                yield f"read_{name}", figures | {"what": f"read_rows alone, {reader.name}"}
        except RuntimeError as error:
            yield f"read_{name}", {"left_out": str(error).splitlines()[0]}
    contexts = torch.randint(0, 248_320, (1, 3))
    host_hash = sample(lambda: parts.ple.hash_contexts_on_host(contexts), n)
    yield "hash_on_host", spread(host_hash) | {"what": "torch ops on the CPU, one token"}
    yield (
        "upload",
        spread(gpu_us(torch, lambda: parts.nvme.graph_values(1, HEADS), n, sleep))
        | {"what": "H2D and conversion in the graph, on the GPU"},
    )
    for nodes in GRAPH_NODES:
        calls, arrivals = launches(torch, nodes, max(20, n // 4), cycles)
        suffix = "" if nodes == args.nodes else f"_{nodes}"
        yield f"launch_call{suffix}", spread(calls) | {"what": f"graph.replay() of {nodes} kernels"}
        yield f"launch_to_gpu{suffix}", spread(arrivals) | {"what": "from there to the graph's first node"}
    yield "steps", steps(torch, parts, args, cycles)


def steps(torch: Any, parts: Parts, args: argparse.Namespace, cycles: float) -> dict[str, Any]:
    """Return p50 of a step that runs ahead and of a gated one, for the same graph and host work."""
    flag, source = torch.zeros(1, dtype=torch.int64, pin_memory=True), torch.ones(1, dtype=torch.int64, device="cuda")
    graph = make_graph(torch, args.nodes, flag, source, int(args.step_us * cycles / args.nodes))
    result: dict[str, Any] = {"what": f"graph of {args.step_us:g} us, {args.nodes} kernels"}
    for host_us in args.host_us:
        medians = {}
        for name in ("ahead", "gated"):
            ends: list[Any] = []
            for _ in range(args.repeats):
                if name == "gated":
                    parts.fill(parts.read_back(parts.hash())[0])
                graph.replay()
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                ends.append(end)
                if len(ends) > 1:
                    ends[-2].synchronize()
                busy_until = time.perf_counter() + host_us / 1e6
                while time.perf_counter() < busy_until:
                    pass
            torch.cuda.synchronize()
            periods = [a.elapsed_time(b) * 1e3 for a, b in pairwise(ends)]
            medians[name] = spread(periods[len(periods) // 10 :])["p50"]
        result[f"host_{host_us:g}_us"] = medians | {"added": round(medians["gated"] - medians["ahead"], 1)}
    return result


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every part was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the parts there too")
    parser.add_argument("--rows", type=int, default=1_700_000, help="rows of the table, 160 bytes each")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--nodes", type=int, choices=GRAPH_NODES, default=300, help="kernels of the step's graph")
    parser.add_argument("--step-us", type=float, default=2000, help="GPU work of a step")
    parser.add_argument("--host-us", type=float, nargs="*", default=[0, 1000, 2500], help="host work of a step")
    parser.add_argument("--folder", type=Path, help="where the table is written (default: a temporary folder)")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("error: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
        print("remedy: run it on one; tests/gpu/ple_memop.py has a --self-check for CPUs", file=sys.stderr)
        return 4
    parts: dict[str, dict[str, Any]] = {}
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        try:
            for name, figures in measure(args, Path(folder)):
                parts[name] = figures
                print(json.dumps({"case": name, **figures, "ok": True}), flush=True)
        except Exception as error:  # what was measured so far is kept
            failed = True
            print(json.dumps({"case": "failed", "error": repr(error), "ok": False}), flush=True)
    summary = {"case": "critical path", "us": total(parts), "parts": CRITICAL_PATH, "ok": not failed}
    print(json.dumps(summary), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"parts": parts, "summary": summary}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
