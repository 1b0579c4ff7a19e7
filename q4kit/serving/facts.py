"""What this machine is: GPU, driver, memory, the disk under a path, systemd, a port. I/O only, no judgement."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from q4kit.gate.gpu import listed
from q4kit.ple import disk

GIB = 2**30
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)
"""Limit, use, and what the use consists of: version 2 and 1."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU that a process may use. Memory in MiB."""

    name: str
    driver: str
    total_mib: int
    free_mib: int
    count: int = 1
    """GPUs that a process may use."""


@dataclass(frozen=True)
class Disk:
    """The storage under a path. `rotational`: what the kernel says, None where it says nothing."""

    filesystem: str
    device: str
    rotational: bool | None
    free: int


@dataclass(frozen=True)
class Machine:
    """Everything the checks ask about. `gpu` is a sentence where there is none."""

    gpu: Gpu | str
    ram_total: int
    ram_available: int
    """MemAvailable, or what the container's limit leaves, whichever is less. Bytes."""
    model_disk: Disk | None
    run_disk: Disk | None
    series: str
    """State of the series in the environment; "applied" only for the whole of it."""
    systemd: str
    """"" where systemd-run can make a scope, else why not."""
    port: int
    port_free: bool
    compilers: tuple[str, ...] = ()
    """Of `COMPILERS`, those that the server would find."""


COMPILERS = ("c++", "ninja", "nvcc")
"""What builds the row readers (the first two) and SGLang's CUDA kernels at first use."""


def gather(*, model: Path | None, run_dir: Path, python: str, host: str, port: int) -> Machine:
    """Return the facts of this machine."""
    return Machine(
        gpu=find_gpu(),
        ram_total=psutil.virtual_memory().total,
        ram_available=ram_available(),
        model_disk=find_disk(model) if model is not None else None,
        run_disk=find_disk(run_dir),
        series=series_state(python),
        systemd=systemd_missing(),
        port=port,
        port_free=port_is_free(host, port),
        compilers=find_compilers(python),
    )


def find_compilers(python: str) -> tuple[str, ...]:
    """Return which of `COMPILERS` a server of this interpreter finds: in its environment, on PATH, in CUDA_HOME."""
    folders = [str(Path(python).parent), os.environ.get("PATH", "")]
    if cuda := os.environ.get("CUDA_HOME"):
        folders.append(str(Path(cuda) / "bin"))
    folders.append("/usr/local/cuda/bin")
    path = os.pathsep.join(folders)
    return tuple(name for name in COMPILERS if shutil.which(name, path=path))


def find_gpu() -> Gpu | str:
    """Return the first GPU of CUDA_VISIBLE_DEVICES, or else of nvidia-smi, or why there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = listed(visible)
    if not usable:
        return f"CUDA_VISIBLE_DEVICES={visible} hides every GPU"
    query = "name,driver_version,memory.total,memory.free"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    if visible is not None:
        command.append(f"--id={usable[0]}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer ({error})"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()
        return f"nvidia-smi exit code {done.returncode}: {said[0] if said else 'no GPU listed'}"
    try:
        name, driver, total, free = (part.strip() for part in lines[0].split(","))
        return Gpu(name, driver, int(total), int(free), len(lines) if visible is None else len(usable))
    except ValueError:
        return f"nvidia-smi answered {lines[0]!r}"


def ram_available() -> int:
    """Return the bytes that new processes can take without swapping, inside the container's limit.

    The container's use counts its page cache too, which the kernel drops before it refuses memory: after one load of a
    checkpoint, most of the limit.
    """
    available: int = psutil.virtual_memory().available
    for limit_file, used_file, stat_file in _CGROUPS:
        try:
            limit, used = (Path(f).read_text().strip() for f in (limit_file, used_file))
            if limit != "max":
                available = min(available, int(limit) - int(used) + _page_cache(Path(stat_file)))
        except (OSError, ValueError):
            continue
    return max(available, 0)


def _page_cache(stat: Path) -> int:
    """Return the bytes of files that a memory.stat counts as cached, 0 where it cannot be read."""
    try:
        counts = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        # Version 1 counts children only in the totals.
        return sum(int(counts.get(f"total_{n}", counts.get(n, 0))) for n in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0


def find_disk(path: Path) -> Disk | None:
    """Return the storage under `path` (or its nearest existing parent), None where it cannot be told."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = disk.describe(place)
        device = os.stat(place).st_dev
    except (OSError, psutil.Error):
        return None
    return Disk(
        filesystem=str(found.get("filesystem", "unknown")),
        device=str(found.get("device", "unknown")),
        rotational=_rotational(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")),
        free=int(found["free_bytes"]),
    )


def _rotational(device: Path) -> bool | None:
    # A partition has no queue of its own; its disk is the folder above.
    for place in (device, device / ".."):
        try:
            return (place / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


def series_state(python: str) -> str:
    """Return the state of the series in an environment, or why it cannot be told."""
    from q4kit import series
    from q4kit.errors import Q4Error

    try:
        found = series.status(series.installed_target(python))
        if found.state == "applied" and found.prefix < found.length:
            return f"applied, {found.prefix} of {found.length} patches"
        return str(found.state)
    except (Q4Error, OSError, ValueError, RuntimeError) as error:
        return f"unknown: {error}"


def systemd_missing() -> str:
    """Return "" where `systemd-run --scope` can be used, else why not."""
    if shutil.which("systemd-run") is None:
        return "systemd-run is not installed"
    if not Path("/run/systemd/system").is_dir():
        return "systemd does not run here"
    if os.geteuid() != 0 and not Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "systemd").is_dir():
        return "no systemd user session (XDG_RUNTIME_DIR/systemd is missing)"
    return ""


def port_is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
