"""Memory of the GPU that serves: the first one of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress


def listed(visible: str | None) -> list[str]:
    """Return the GPUs that a process may use by CUDA_VISIBLE_DEVICES, numbers or UUIDs; unset means the first.

    CUDA ignores everything from the first entry that is no GPU on, -1 for example.
    """
    if visible is None:
        return ["0"]
    entries = [entry.strip() for entry in visible.split(",")]
    ends = [place for place, entry in enumerate(entries) if not entry or entry.startswith("-")]
    return entries[: ends[0]] if ends else entries


def several(visible: str | None) -> str:
    """Return a warning when more than one GPU is listed, empty otherwise."""
    found = listed(visible)
    if len(found) < 2:
        return ""
    return f"CUDA_VISIBLE_DEVICES={visible} lists {len(found)} GPUs; memory is read from the first, {found[0]}"


def used_mib() -> float | None:
    """Return the used memory of the serving GPU, MiB; None where there is none, or no nvidia-smi that knows it."""
    tool, found = shutil.which("nvidia-smi"), listed(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if tool is None or not found:
        return None
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={found[0]}"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    return None
