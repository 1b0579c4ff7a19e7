#!/usr/bin/env python3
"""Three ways for a decode graph to get rows that the host reads: which is fastest, and does none of them ever hang?

No server: a step in miniature (tests/gpu/step_chain.py) as one CUDA graph of --before-us of work, the rows, --after-us
of work in --nodes kernels. Modes: ``pinned`` (gathered in the graph), ``gate`` (launched after the read), ``memop`` and
``spin`` (launched first, waits on a flag in pinned memory just before the rows; served by the launching thread, by a
Python thread, or by a C++ thread that polls). The host does --host-us of work a step, as a scheduler would.

One JSON line a check, exit 1 if one does not hold, 4 without a CUDA device:

* ``capture``: how wait nodes get into a graph of torch, and how many there are; warm-up runs have none;
* ``correct``: --steps steps end on the tokens that numpy computes, for every mode and server;
* ``stall``: a reader that is late is failed by the watchdog at its deadline, its late answer releases nothing;
* ``abort``: a reader that raises releases its step at once; the next run is exact again;
* ``hazard``: which calls of the host block while a graph waits (a finding, not a verdict: before the flag is set
  such a call would deadlock);
* ``step``: microseconds a step, p50 and p95, warm (rows from the page cache) and cold (O_DIRECT).

A watchdog process releases every wait at --limit-s and then ends the script. ``--self-check`` runs the host's side
against a thread that stands in for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.gpu.step_chain import Chain, first_difference, spread, write_table
from tests.gpu.step_server import HostServer, NativeThread, ReadRows, ServingThread, build_native
from tests.gpu.step_watchdog import Flags, Watchdog

GOAL_US = 150.0
TIMEOUT_S = 5.0
STALL_TIMEOUT_S, STALL_S = 0.2, 0.6


def busy(microseconds: float) -> None:
    """Keep the interpreter busy, as a scheduler between two launches."""
    end = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < end:
        pass


def drive(
    engine: Any,
    mode: str,
    served_by: str,
    flags: Flags,
    read: ReadRows,
    steps: int,
    *,
    host_us: float = 0,
    native: Callable[[], NativeThread] | None = None,
    timeout_s: float = TIMEOUT_S,
    pause: dict[int, float] | None = None,
) -> tuple[np.ndarray, list[float], list[int]]:
    """Run `steps` steps; return tokens, microseconds between step ends, and the steps released without rows.

    As SGLang's overlap scheduler: step k is launched, then the result of step k - 1 is waited for.
    """
    flags.clear()
    engine.reset()
    server = HostServer(flags, engine.host_ids, engine.host_rows, read, timeout_s)
    thread: Any = None
    if mode not in ("pinned", "gate"):
        if served_by == "thread":
            thread = ServingThread(server, flags, steps)
        elif served_by == "native":
            assert native is not None
            thread = native()
    try:
        for step in range(steps):
            if mode == "gate":
                engine.read_back()
                read(engine.host_ids, engine.host_rows)
            if thread is not None:
                flags.arm(timeout_s) if served_by == "native" else None
            engine.launch()
            if mode not in ("pinned", "gate") and thread is None:
                server.serve(step, (pause or {}).get(step, 0.0))
            engine.wait_for_previous()
            busy(host_us)
        tokens, periods = engine.finish()
    finally:
        flags.disarm()
        if thread is not None:
            thread.join()
    return tokens, periods, server.failed


def protocol_cases(
    make: Callable[[str], Any], flags: Flags, chain: Chain, table: np.ndarray, read: ReadRows, waiting: list[str],
    native: Callable[[Any], Callable[[], NativeThread]] | None, steps: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield correctness, stall and abort cases; the same for a GPU and for the thread that stands in for it."""
    expected = chain.run(table, steps)
    for mode in ("pinned", "gate", *waiting):
        engine = make(mode)
        servers = ["-"] if mode in ("pinned", "gate") else ["inline", "thread"] + (["native"] if native else [])
        for served_by in servers:
            start = time.perf_counter()
            few = steps if served_by != "thread" else min(steps, 1000)
            tokens, _, failed = drive(
                engine, mode, served_by, flags, read, few, native=native(engine) if native else None
            )
            different = first_difference(expected[:few], tokens)
            yield {
                "case": "correct", "mode": mode, "served_by": served_by, "steps": few, "first_difference": different,
                "failed": failed, "fired": flags.get("fired"), "seconds": round(time.perf_counter() - start, 1),
                "ok": different is None and not failed and flags.get("fired") == 0,
            }  # fmt: skip
        if mode not in waiting:
            continue

        start = time.perf_counter()
        tokens, _, failed = drive(
            engine, mode, "inline", flags, read, 12, timeout_s=STALL_TIMEOUT_S, pause={7: STALL_S}
        )
        seconds, fired = time.perf_counter() - start, flags.get("fired")
        exact = first_difference(expected[:12], tokens)
        yield {
            "case": "stall", "mode": mode, "failed": failed, "fired": fired, "exact_until": exact,
            "seconds": round(seconds, 2), "ok": failed == [7] and fired == 1 and exact == 7 and seconds < 5,
        }  # fmt: skip

        def breaking(ids: np.ndarray, rows: np.ndarray, calls: list[int] = [0]) -> None:  # noqa: B006
            calls[0] += 1
            if calls[0] == 6:
                raise OSError("injected")
            read(ids, rows)

        start = time.perf_counter()
        tokens, _, failed = drive(engine, mode, "inline", flags, breaking, 12)
        seconds = time.perf_counter() - start
        exact = first_difference(expected[:12], tokens)
        again, _, _ = drive(engine, mode, "inline", flags, read, 12)
        yield {
            "case": "abort", "mode": mode, "failed": failed, "exact_until": exact, "seconds": round(seconds, 2),
            "next_run_exact": first_difference(expected[:12], again) is None,
            "ok": failed == [5] and exact == 5 and first_difference(expected[:12], again) is None and seconds < 5,
        }  # fmt: skip
        if hasattr(engine, "close"):
            engine.close()


def hazards(engine: Any, flags: Flags, wait_s: float = 0.4) -> Iterator[dict[str, Any]]:
    """Yield which host calls return only after the flag is set, while a graph waits for it.

    Nothing here serves: the watchdog process ends each wait after `wait_s`.
    """
    import torch

    side = torch.cuda.Stream()
    kept: list[Any] = []

    def on_side(call: Callable[[], Any]) -> None:
        with torch.cuda.stream(side):
            kept.append(call())

    small = torch.ones(64, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "host work only": lambda: None,
        "event record and query": lambda: on_side(lambda: torch.cuda.Event().record()),
        "kernel on another stream, waited for": lambda: (on_side(lambda: small + 1), side.synchronize()),
        "first launch of a kernel": lambda: on_side(lambda: torch.erfinv(small / 2)),
        "copy from pageable memory on another stream": lambda: on_side(lambda: torch.ones(1 << 20).to("cuda")),
        "cudaMalloc": lambda: on_side(lambda: torch.empty(192 << 20, dtype=torch.uint8, device="cuda")),
        "cudaHostAlloc": lambda: kept.append(torch.empty(24 << 20, dtype=torch.uint8, pin_memory=True)),
        "cudaFree": lambda: (kept.clear(), torch.cuda.empty_cache()),
    }
    for name, call in calls.items():
        flags.clear()
        engine.reset()
        flags.arm(wait_s)
        engine.launch()
        while not flags.get("ids_ready"):
            time.sleep(0)
        flags.set("ids_ready", 0)
        start = time.perf_counter()
        try:
            call()
            error = None
        except RuntimeError as failed:
            error = str(failed).splitlines()[0]
        seconds = time.perf_counter() - start
        blocked = flags.get("fired") > 0
        torch.cuda.synchronize()
        yield {
            "case": "hazard", "call": name, "blocked": blocked, "ms": round(seconds * 1e3, 2), "error": error,
            "ok": error is None and (name != "host work only" or not blocked),
        }  # fmt: skip


def timings(
    make: Callable[..., Any], flags: Flags, readers: dict[str, ReadRows], waiting: list[str],
    native: Callable[[Any], Callable[[], NativeThread]] | None, steps: int, host_us: list[float],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the step time of every mode, and what it adds to the pinned table under the same host work."""
    base: dict[float, float] = {}
    for mode in ("pinned", "gate", *waiting):
        engine = make(mode)
        servers = ["-"] if mode in ("pinned", "gate") else ["inline", "thread"] + (["native"] if native else [])
        for served_by in servers:
            for state, read in readers.items():
                if (mode == "pinned" or served_by == "native") and state != "warm":
                    continue
                for host in host_us:
                    _, periods, failed = drive(
                        engine, mode, served_by, flags, read, steps, host_us=host,
                        native=native(engine) if native else None,
                    )  # fmt: skip
                    figures = spread(periods[len(periods) // 10 :])
                    if mode == "pinned":
                        base[host] = figures["p50"]
                    added = round(figures["p50"] - base[host], 1)
                    yield {
                        "case": "step", "mode": mode, "served_by": served_by, "rows": state, "host_us": host,
                        "step_us": figures, "added_us": added, "within_goal": added <= GOAL_US,
                        "ok": not failed,
                    }  # fmt: skip


def kill_case() -> dict[str, Any]:
    """Kill a process whose graph waits, and use the GPU again."""
    import torch

    child = subprocess.Popen([sys.executable, __file__, "--hang", "--limit-s", "60"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL)
    start = time.perf_counter()
    child.wait(timeout=60)
    gone = time.perf_counter() - start
    value = (torch.ones(1, device="cuda") + 1).item()
    return {
        "case": "killed while waiting", "said": line.strip(), "process_gone_s": round(gone, 2),
        "gpu_usable_s": round(time.perf_counter() - start, 2), "ok": line.strip() == "waiting" and value == 2.0,
    }  # fmt: skip


def gpu_cases(args: argparse.Namespace, flags: Flags, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every case on a GPU."""
    import torch
    from sglang.srt.layers.ple_rows import open_flat_source, open_row_reader

    from tests.gpu.step_engine import GpuEngine, MemOps, cycles_per_us

    chain, memops = Chain.make(), MemOps()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    address, supported = memops.register(flags), memops.supported()
    table = write_table(folder, args.rows)
    pinned = torch.empty(table.shape, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = table
    source = open_flat_source(str(folder))
    readers = {"warm": open_row_reader(source, "auto").read_rows}
    try:
        readers["cold"] = open_row_reader(source, "io_uring").read_rows
    except RuntimeError as error:
        yield {"case": "cold reader", "left_out": str(error).splitlines()[0], "ok": True}
    cycles = cycles_per_us()

    def make(mode: str, **changes: Any) -> GpuEngine:
        return GpuEngine(
            mode, chain, table, flags, memops, address, pinned_table=pinned,
            steps=max(args.steps, args.time_steps), cycles=cycles, **changes,
        )  # fmt: skip

    waiting = ["spin"]
    way = memops.probe(flags, address) if supported else None
    record: dict[str, Any] = {"case": "capture", "attribute_64_bit_memops": supported, "way": way}
    if way is None:
        record |= {"reason": memops.reason, "ok": True}
    else:
        waiting.insert(0, "memop")
        counts = memops.node_counts(make("memop", before_us=50, after_us=50, nodes=4).graph)
        gated = memops.node_counts(make("gate", before_us=50, after_us=50, nodes=4).graph)
        ops = counts.get("batch_mem_op", 0)
        record |= {"nodes": counts, "nodes_gate": gated, "ok": ops >= 1 and "batch_mem_op" not in gated}
    yield record | {"cycles_per_us": round(cycles, 1), "torch": torch.__version__}

    library = build_native(folder)
    native = None
    if library is None:
        yield {"case": "native thread", "left_out": "no g++ on PATH", "ok": True}
    else:

        def native(engine: Any) -> Callable[[], NativeThread]:
            return lambda: NativeThread(library, flags, engine.host_ids, engine.host_rows, table)

    yield from protocol_cases(
        lambda mode: make(mode, before_us=20, after_us=20, nodes=4), flags, chain, table, readers["warm"], waiting,
        native, args.steps,
    )  # fmt: skip
    yield from hazards(make(waiting[0], before_us=20, after_us=20, nodes=4), flags)
    shape = {"before_us": args.before_us, "after_us": args.after_us, "nodes": args.nodes}
    yield from timings(lambda mode: make(mode, **shape), flags, readers, waiting, native, args.time_steps, args.host_us)
    if args.kill:
        yield kill_case()


def self_check_cases(args: argparse.Namespace, flags: Flags, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the protocol cases with a thread in the GPU's place."""
    from tests.gpu.step_engine import CpuEngine

    chain = Chain.make()
    table = write_table(folder, args.rows)
    library = build_native(folder)
    native = None
    if library is not None:

        def native(engine: Any) -> Callable[[], NativeThread]:
            return lambda: NativeThread(library, flags, engine.host_ids, engine.host_rows, table)

    def read(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[:] = table[ids]

    yield from protocol_cases(
        lambda mode: CpuEngine(mode, chain, table, flags), flags, chain, table, read, ["memop"], native, args.steps
    )


def hang(flags: Flags, folder: Path) -> int:
    """Launch a graph that waits, say so, and never answer (for `--kill`)."""
    import torch

    from tests.gpu.step_engine import GpuEngine, MemOps

    torch.zeros(1, device="cuda")
    memops = MemOps()
    address = memops.register(flags)
    mode = "memop" if memops.supported() and memops.probe(flags, address) else "spin"
    engine = GpuEngine(mode, Chain.make(), write_table(folder, 1000), flags, memops, address, steps=10)
    engine.launch()
    while not flags.get("ids_ready"):
        time.sleep(0.001)
    print("waiting", flush=True)
    time.sleep(600)
    return 1


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every case holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cases there too")
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows of the table, 160 bytes each")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of a correctness run")
    parser.add_argument("--time-steps", type=int, default=400, help="steps of a timing")
    parser.add_argument("--before-us", type=float, default=300, help="GPU work of a step before its rows")
    parser.add_argument("--after-us", type=float, default=1500, help="GPU work of a step after its rows")
    parser.add_argument("--nodes", type=int, default=600, help="kernels of the work after the rows")
    parser.add_argument("--host-us", type=float, nargs="*", default=[0, 1200], help="host work a step")
    parser.add_argument("--limit-s", type=float, default=420, help="the watchdog process ends the script then")
    parser.add_argument("--folder", type=Path, help="where the table is written (default: a temporary folder)")
    parser.add_argument("--kill", action="store_true", help="also kill a process whose graph waits")
    parser.add_argument("--self-check", action="store_true", help="a thread in the GPU's place; needs no GPU")
    parser.add_argument("--hang", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 12:
        parser.error("--steps: at least 12")
    flags = Flags()
    # Before anything starts CUDA or a thread, or the fork would not be safe.
    with Watchdog(flags, args.limit_s), tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if not args.self_check:
            import torch

            if not torch.cuda.is_available():
                print("error: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
                print("remedy: run it on one, or check the host's side with --self-check", file=sys.stderr)
                return 4
        if args.hang:
            return hang(flags, Path(folder))
        results = []
        for result in (self_check_cases if args.self_check else gpu_cases)(args, flags, Path(folder)):
            print(json.dumps(result), flush=True)
            results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
