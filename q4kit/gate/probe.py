"""What the gate measures on one healthy server: oracle recording, speed, memory."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from q4kit import provenance
from q4kit.bench import runner as bench
from q4kit.bench import summary
from q4kit.errors import EnvironmentFault, ServerError
from q4kit.gate.plan import Config
from q4kit.gate.store import Store, planted_hash
from q4kit.oracle import measure
from q4kit.oracle.recording import Recording
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess

_END_S = 5.0
"""A server whose request failed is given so long to end: the answer breaks off before its process is gone."""


def record(client: Client, config: Config, like: Recording | None) -> Recording:
    """Return a recording over the ids of another one; without one, over the prompt set's, which are the same ids."""
    if like is None:
        recording = measure.new_recording(client, options=config.oracle, source="ids", tool="gate")
    else:
        recording = measure.like(client, like, tool="gate")
    measure.run(client, recording)
    return recording


def check_served(recording: Recording, config: Config, prefix: int) -> None:
    """Raise EnvironmentFault when another SGLang answered than the tree of this prefix."""
    found = recording.provenance.get("series")
    if planted_hash(config, prefix):
        return  # the planted file is no state of the series
    if not isinstance(found, dict) or found.get("prefix") != prefix:
        raise EnvironmentFault(
            f"the server's code is series {found!r}, expected prefix {prefix}",
            remedy="something else is in front on PYTHONPATH, or the tree was changed while serving",
        )


def speed(client: Client, config: Config, store: Store, prefix: int) -> tuple[dict[str, Any], ...]:
    """Return the rates of the short bench, a dict a context; the raw samples are kept in the folder."""
    result = bench.run_contexts(client, config.bench, bench.RunResult())
    store.write_samples(
        prefix,
        {
            "provenance": provenance.collect(client, tool="gate"),
            "points": [
                {"context": p.context, "kind": p.kind.value, "repeats": [r.to_json() for r in p.repeats]}
                for p in result.points
            ],
        },
    )
    if result.ended is bench.Ended.INTERRUPTED:
        raise KeyboardInterrupt
    if result.ended is bench.Ended.FAULT:
        raise ServerError(result.fault, remedy=result.remedy)
    return tuple(_rates(summary.summarise(point)) for point in result.points)


def _rates(point: summary.PointSummary) -> dict[str, Any]:
    return {
        "context": point.context,
        "tokens": point.tg_name,
        "n": point.valid,
        "prefill_tok_s": point.prefill.mean if point.prefill else None,
        "decode_tok_s": point.decode.mean if point.decode else None,
        "decode_cv": point.decode.cv if point.decode and point.decode.n > 1 else None,
        "refusals": point.refusals,
    }


def memory(server: ServerProcess) -> tuple[float, float]:
    """Return resident memory of the server's processes and the sum of their peaks, GiB."""
    resident = peak = 0
    with suppress(psutil.Error):
        main = psutil.Process(server.pid)
        for process in [main, *main.children(recursive=True)]:
            with suppress(psutil.Error, OSError):
                resident += process.memory_info().rss
                peak += peak_rss(Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
    return resident / 2**30, peak / 2**30


def peak_rss(status: str) -> int:
    """Return VmHWM of a /proc/PID/status text, bytes; 0 when it has none (a kernel thread, a zombie)."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def exit_status(server: ServerProcess) -> int | None:
    """Return the exit status of a server whose request failed, None when it goes on running."""
    deadline = time.monotonic() + _END_S
    while server.returncode is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.returncode
