"""What storage a path lies on, for the provenance of a measurement."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def describe(path: Path, sys_block: Path = Path("/sys/block")) -> dict[str, str | int]:
    """Return filesystem, device name and model, block queue settings; what cannot be found out is left out."""
    partition = max(
        (p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
        default=None,
    )
    found: dict[str, str | int] = {"free_bytes": psutil.disk_usage(str(path)).free}
    if partition is None:
        return found
    found |= {"filesystem": partition.fstype, "device": os.path.basename(partition.device)}
    # A partition's queue belongs to its disk: the longest disk name that begins the partition's.
    names = [p.name for p in sys_block.iterdir()] if sys_block.is_dir() else []
    disk = max((n for n in names if str(found["device"]).startswith(n)), key=len, default="")
    for name in (
        "queue/scheduler",
        "queue/nr_requests",
        "queue/logical_block_size",
        "queue/rotational",
        "device/model",
    ):
        try:
            found[name.split("/")[1]] = (sys_block / disk / name).read_text().strip()
        except OSError:
            continue
    return found
