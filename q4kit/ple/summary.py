"""From samples to percentiles and to the ratios that are quoted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from q4kit.ple.fio import FioRun

STEP_ROWS = 16
CHUNK_ROWS = 32_768


@dataclass(slots=True)
class Samples:
    """All batches of one reader, row count and cache state. Times in seconds, wall clock of one batch."""

    reader: str
    rows: int
    cache: str
    """"cold" or "warm"."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """CPU time of the process over all batches, threads included."""
    requests: int | None = None
    """Reads handed to the kernel; None where the reader does not count them."""
    resident: list[float] = field(default_factory=list)
    """Share of the table in the page cache before each round, where it can be read."""
    mapped_bytes: int = 0
    """Resident bytes of the table's mappings after the last round."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table of results."""

    reader: str
    rows: int
    cache: str
    batches: int
    p50_us: float
    p95_us: float
    p99_us: float
    mean_us: float
    rows_per_s: float
    iops: float | None
    cpu_us: float
    mapped_mib: float


def summarise(samples: Samples) -> Line:
    """Return percentiles (microseconds a batch) and rates (from the median batch)."""
    us = np.asarray(samples.seconds) * 1e6
    p50, p95, p99 = (float(v) for v in np.percentile(us, [50, 95, 99]))
    total = float(us.sum()) / 1e6
    return Line(
        reader=samples.reader,
        rows=samples.rows,
        cache=samples.cache,
        batches=len(us),
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        mean_us=float(us.mean()),
        rows_per_s=samples.rows / p50 * 1e6,
        iops=None if samples.requests is None else samples.requests / total,
        cpu_us=samples.cpu_seconds / len(us) * 1e6,
        mapped_mib=samples.mapped_bytes / 2**20,
    )


def ratios(
    lines: Sequence[Line], waves: Sequence[FioRun], bulk: Mapping[int, Sequence[FioRun]], reader: str = "auto"
) -> dict[str, float | None]:
    """Return the figures that are quoted; None for one whose parts were not measured.

    step_cold_over_fio: time of 16 cold rows over one fio wave of 16, both medians (lower is better).
    chunk_cold_over_fio: rows/s of 32,768 cold rows over the best depth's median fio rate (higher is better).
    chunk_warm_over_memmap: speed of 32,768 warm rows over numpy's memmap (higher is better).
    """
    by = {(line.reader, line.rows, line.cache): line for line in lines}
    step, chunk = by.get((reader, STEP_ROWS, "cold")), by.get((reader, CHUNK_ROWS, "cold"))
    warm, memmap = by.get((reader, CHUNK_ROWS, "warm")), by.get(("memmap", CHUNK_ROWS, "warm"))
    warm_step = by.get((reader, STEP_ROWS, "warm"))
    wave_us = float(np.median([w.p50_us for w in waves])) if waves else None
    wave_mean_us = float(np.mean([w.mean_us for w in waves])) if waves else None
    best = max((float(np.median([r.iops for r in runs])) for runs in bulk.values() if runs), default=None)
    return {
        "step_cold_over_fio": step.p50_us / wave_us if step and wave_us else None,
        "step_cold_mean_over_fio_mean": step.mean_us / wave_mean_us if step and wave_mean_us else None,
        "chunk_cold_over_fio": chunk.rows_per_s / best if chunk and best else None,
        "chunk_warm_over_memmap": memmap.p50_us / warm.p50_us if memmap and warm else None,
        "step_warm_us": warm_step.p50_us if warm_step else None,
        "fio_wave_us": wave_us,
        "fio_best_iops": best,
    }
