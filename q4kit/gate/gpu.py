"""Which GPUs may serve, and how much of their memory is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

from q4kit.errors import UsageError


def listed(visible: str | None) -> tuple[str, ...]:
    """Return the GPUs that a process may use by CUDA_VISIBLE_DEVICES, numbers or UUIDs; unset means the first.

    CUDA ignores everything from the first entry that is no GPU on, -1 for example.
    """
    if visible is None:
        return ("0",)
    entries = [entry.strip() for entry in visible.split(",")]
    ends = [place for place, entry in enumerate(entries) if not entry or entry.startswith("-")]
    return tuple(entries[: ends[0]] if ends else entries)


def chosen(given: str | None) -> tuple[str, ...]:
    """Return the GPUs of `--gpus`, else those of CUDA_VISIBLE_DEVICES; none, or one twice, raises UsageError."""
    source, value = "--gpus", given
    if given is None:
        source, value = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    found = listed(value)
    if not found or len(set(found)) < len(found):
        raise UsageError(f"{source} {value!r}: expected different GPUs", remedy="for example --gpus 0,1")
    return found


def used_mib(gpu: str) -> float | None:
    """Return the used memory of a GPU, MiB; None where there is none, or no nvidia-smi that knows it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    return None
