"""Tables, ratios and a plot of one bench run. Pure: takes what was measured, returns a report or PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from q4kit.errors import EnvironmentFault
from q4kit.ple.fio import FioRun
from q4kit.ple.summary import Line
from q4kit.report import Report, Table

GOALS: dict[str, tuple[str, float]] = {
    "step_cold_over_fio": ("<=", 1.2),
    "chunk_cold_over_fio": (">=", 0.9),
    "chunk_warm_over_memmap": (">=", 1.0),
    "step_warm_us": ("<=", 40.0),
}


def meets(name: str, value: float) -> bool:
    """Return whether a ratio reaches its goal."""
    sense, goal = GOALS[name]
    return value <= goal if sense == "<=" else value >= goal


def report(
    lines: Sequence[Line],
    waves: Sequence[FioRun],
    bulk: Mapping[int, Sequence[FioRun]],
    ratios: Mapping[str, float | None],
    facts: Sequence[tuple[str, Any]],
) -> Report:
    """Return the report of a run: ratios against their goals, fio, then every reader."""
    goals = Table(["figure", "value", "goal", "reached"], title="Against the disk")
    for name, (sense, goal) in GOALS.items():
        value = ratios.get(name)
        goals.add(name, value, f"{sense} {goal:g}", None if value is None else meets(name, value))
    blocks: list[Table | str] = [goals]
    if waves or bulk:
        disk = Table(["fio 4 KiB random read, O_DIRECT", "IOPS", "p50 us", "p99 us"], title="The disk (median run)")
        if waves:
            disk.add("waves of 16", *_median(waves))
        for depth, runs in sorted(bulk.items()):
            disk.add(f"queue depth {depth}", *_median(runs))
        blocks.append(disk)
    for cache in ("cold", "warm"):
        table = Table(
            ["reader", "rows", "batches", "p50 us", "p95 us", "p99 us", "rows/s", "IOPS", "CPU us", "mapped MiB"],
            title=f"{cache.capitalize()}, time of one batch",
        )
        for line in sorted((x for x in lines if x.cache == cache), key=lambda x: (x.rows, x.p50_us)):
            table.add(
                line.reader,
                line.rows,
                line.batches,
                line.p50_us,
                line.p95_us,
                line.p99_us,
                line.rows_per_s,
                line.iops,
                line.cpu_us,
                line.mapped_mib,
            )
        blocks.append(table)
    return Report("Rows from storage", facts=list(facts), blocks=blocks)


def _median(runs: Sequence[FioRun]) -> tuple[float, float, float]:
    return (
        float(np.median([r.iops for r in runs])),
        float(np.median([r.p50_us for r in runs])),
        float(np.median([r.p99_us for r in runs])),
    )


def png(lines: Sequence[Line], best_iops: float | None, title: str) -> bytes:
    """Return a PNG of rows/s over rows a batch, cold and warm, with fio's best rate as a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(
            "a plot needs matplotlib", remedy="pip install 'q4kit[plot]', or leave --plot out"
        ) from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    for place, cache in enumerate(("cold", "warm")):
        axes = figure.add_subplot(1, 2, place + 1)
        for reader in dict.fromkeys(line.reader for line in lines):
            points = sorted((x.rows, x.rows_per_s) for x in lines if x.reader == reader and x.cache == cache)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=reader)
        if cache == "cold" and best_iops:
            axes.axhline(best_iops, linestyle="--", color="black", label="fio, best 4k IOPS")
        axes.set(xscale="log", yscale="log", xlabel="rows a batch", ylabel="rows/s (median batch)", title=cache)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
