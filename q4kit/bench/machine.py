"""What the machine did around a measurement: GPU clocks and link, disk reads, page-cache residency.

Everything here is best effort and says so: a field that cannot be read is None, never a guess. It describes the
machine this tool runs on, which is the server's machine only when the server is local.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from q4kit.errors import EnvironmentFault

_GPU_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
    "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "pcie.link.width.max", "memory.used", "memory.total", "clocks_throttle_reasons.active",
)  # fmt: skip

COLD_BELOW = 0.05
WARM_ABOVE = 0.95


class PageCache(StrEnum):
    """State of a disk-backed table in the page cache before a request."""

    COLD = "cold"
    MIXED = "mixed"
    WARM = "warm"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Snapshot:
    """One look at the machine. `disk_read_bytes` and `major_faults` are host-wide counters: use differences."""

    gpus: list[dict[str, str]]
    disk_read_bytes: int | None
    major_faults: int | None
    load_1min: float | None
    table_resident: float | None

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def is_local(base_url: str) -> bool:
    """Return whether the server's address is this machine's loopback."""
    return (urlsplit(base_url).hostname or "") in ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def snapshot(table_files: Iterable[Path] = ()) -> Snapshot:
    files = list(table_files)
    return Snapshot(
        gpus=gpu_state(),
        disk_read_bytes=_disk_read_bytes(),
        major_faults=_vmstat("pgmajfault"),
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        table_resident=residency(files) if files else None,
    )


def gpu_state() -> list[dict[str, str]]:
    """Return one dict a GPU from nvidia-smi, or an empty list where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_gpu_rows(done.stdout)


_LOAD_FIELDS = (
    "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
_WATCH_MS = 500


class GpuWatch:
    """Watch the GPUs while a request runs: between requests they idle, and so do clocks and PCIe link.

    One `nvidia-smi -lms` process writes a line twice a second; nothing runs where there is none.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.rows: list[dict[str, str]] = []

    def __enter__(self) -> GpuWatch:
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            command = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
            command.append(f"-lms={_WATCH_MS}")
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        # Its own process group, so that a wrapper script around nvidia-smi ends with it.
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            try:
                output, _error = self._process.communicate(timeout=5)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            return
        self.rows = _parse_gpu_rows(output)

    def summary(self) -> dict[str, Any]:
        """Return per field the least and greatest value seen over all GPUs, and every throttle reason met."""
        found: dict[str, Any] = {}
        for name in _LOAD_FIELDS:
            values = [v for v in (_as_float(row[name]) for row in self.rows) if v is not None]
            if values:
                found[name] = [min(values), max(values)]
        reasons = sorted({row["clocks_throttle_reasons.active"] for row in self.rows})
        if reasons:
            found["throttle_reasons"] = reasons
        return found


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_gpu_rows(output: str) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in output.strip().splitlines()]
    # The line that was being written when the process was stopped may be short.
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def page_cache_state(resident: float | None) -> PageCache:
    if resident is None:
        return PageCache.UNKNOWN
    if resident <= COLD_BELOW:
        return PageCache.COLD
    return PageCache.WARM if resident >= WARM_ABOVE else PageCache.MIXED


def table_files(path: Path) -> list[Path]:
    """Return the files of a table: the file itself, or every regular file of a folder."""
    if path.is_file():
        return [path]
    files = sorted(p for p in path.glob("*") if p.is_file()) if path.is_dir() else []
    if not files:
        raise EnvironmentFault(
            f"--table {path}: no file there", remedy="name the table file, or the folder that holds its files"
        )
    return files


def residency(files: Iterable[Path]) -> float | None:
    """Return the share of the files' pages that is in the page cache (mincore), or None where it cannot be read.

    Linux answers for files that the caller may write or owns; for others it reports every page as resident,
    so those give None.
    """
    pages = present = 0
    for path in files:
        if not os.access(path, os.W_OK):
            return None
        counted = _mincore(path)
        if counted is None:
            return None
        pages += counted[0]
        present += counted[1]
    return present / pages if pages else None


def evict(files: Iterable[Path]) -> float | None:
    """Ask the kernel to drop the files' pages and return what is still resident.

    Pages that a process has mapped stay: the return value says whether eviction worked, the caller must look.
    """
    files = list(files)
    for path in files:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return residency(files)


def warm(files: Iterable[Path]) -> float | None:
    """Read the files once, so that they are in the page cache if they fit, and return what is resident."""
    files = list(files)
    buffer = bytearray(16 << 20)
    for path in files:
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass
    return residency(files)


def _mincore(path: Path) -> tuple[int, int] | None:
    """Return (pages, resident pages) of one file."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as handle:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        try:
            vector = ctypes.create_string_buffer(pages)
            if libc.mincore(address, size, vector) != 0:
                return None
            # Only the lowest bit of each byte is defined.
            return pages, int((np.frombuffer(vector.raw, dtype=np.uint8, count=pages) & 1).sum())
        finally:
            libc.munmap(address, size)


def _disk_read_bytes() -> int | None:
    """Return bytes read from whole physical disks since boot (sectors of 512 bytes, /proc/diskstats)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        total = 0
        for line in Path("/proc/diskstats").read_text().splitlines():
            fields = line.split()
            # A whole disk has a folder in /sys/block; partitions would be counted twice.
            if (Path("/sys/block") / fields[2]).exists() and not fields[2].startswith(("loop", "ram", "dm-", "md")):
                total += int(fields[5]) * 512
        return total
    return None


def _vmstat(key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return None
