"""What the disk itself can do, by fio: one wave of 16 reads, and the best 4 KiB random read rate."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from q4kit.errors import EnvironmentFault

WAVE = 16


@dataclass(frozen=True, slots=True)
class FioRun:
    """One fio run. Times in microseconds, of one read from submission to the moment it is seen complete."""

    depth: int
    iops: float
    p50_us: float
    p99_us: float
    mean_us: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def available() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def parse(text: str, depth: int) -> FioRun:
    """Return the read side of one job of fio's JSON output."""
    read = json.loads(text[text.index("{") :])["jobs"][0]["read"]
    lat = read["lat_ns"]
    return FioRun(
        depth=depth,
        iops=float(read["iops"]),
        p50_us=lat["percentile"]["50.000000"] / 1e3,
        p99_us=lat["percentile"]["99.000000"] / 1e3,
        mean_us=lat["mean"] / 1e3,
    )


def random_reads(path: Path, depth: int, seconds: float, *, wave: bool = False) -> FioRun:
    """Read 4 KiB blocks of `path` at random with O_DIRECT through io_uring (libaio where that is forbidden).

    With `wave`, `depth` reads are submitted at once and the next ones only when all have completed: the time of one
    read is then the time of the wave.
    """
    waves = [f"--iodepth_batch_{what}={depth}" for what in ("submit", "complete_min", "complete_max")]
    errors = ""
    for engine in ("io_uring", "libaio"):
        command = [
            "fio",
            "--name=limit",
            f"--filename={path}",
            "--rw=randread",
            "--bs=4k",
            "--direct=1",
            "--readonly",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            *(waves if wave else []),
            "--time_based",
            f"--runtime={max(1, round(seconds * 1000))}ms",
            "--randrepeat=0",
            "--norandommap",
            "--lat_percentiles=1",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return parse(done.stdout, depth)
        errors = done.stderr.strip()[-300:]
    raise EnvironmentFault(
        f"fio failed on {path.name}: {errors}", remedy="run without it: --no-fio (no ratios to the disk then)"
    )
