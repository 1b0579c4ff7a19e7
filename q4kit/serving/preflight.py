"""The checks before a start: facts in, findings out, all at once (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from q4kit.report import Table
from q4kit.server.launch import flag_value
from q4kit.serving import budget
from q4kit.serving.budget import FORMATS, GIB, Settings
from q4kit.serving.checkpoint import Checkpoint, method
from q4kit.serving.facts import COMPILERS, Disk, Machine
from q4kit.serving.profiles import Profile
from q4kit.serving.shape import Shape

Level = Literal["ok", "warning", "refused", "accepted"]
DRIVER = 580
"""The pinned torch is a CUDA 13 build."""
RUN_SPACE_GIB = 2
"""Log, environment.json, and the kernels that SGLang compiles on the first start."""
NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "fuse.sshfs", "glusterfs", "afs", "beegfs", "gpfs")
VIRTUAL = ("vd", "xvd")


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, found and needed, and what to do about it."""

    name: str
    level: Level
    found: str
    needed: str
    remedy: str = ""


def check(
    profile: Profile,
    machine: Machine,
    checkpoint: Checkpoint,
    shape: Shape | None,
    chosen: Settings | None,
    *,
    memory_max: int | None = None,
    accept: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[Check]:
    """Return all findings. `shape` and `chosen` are None where the checkpoint's config cannot be used.

    A refused check whose name is in `accept` becomes "accepted": the user takes the responsibility. `extra`: SGLang
    arguments of the user.
    """
    gpu = profile.device == "cuda"
    found = [_series(machine), _port(machine), _compilers(machine, gpu)]
    found += _checkpoint(checkpoint, flag_value("--chat-template", extra) is not None)
    if gpu:
        found += _gpu(machine)
        found.append(_experts(profile, checkpoint))
    if shape is not None and chosen is not None and chosen.expert_format in FORMATS:
        parts = budget.compute(shape, chosen)
        if gpu:
            found.append(_vram(machine, parts))
            found.append(_ram(machine, parts, profile))
            if memory_max is not None:
                found.append(_cap(memory_max, parts))
        if chosen.context > 0:
            found.append(_context(checkpoint, chosen))
    found.append(_model_disk(machine.model_disk, gpu))
    found.append(_space(machine.run_disk))
    if memory_max is not None:
        found.append(_systemd(machine))
    return [replace(c, level="accepted") if c.level == "refused" and c.name in accept else c for c in found]


def refused(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that forbid a start."""
    return [c for c in checks if c.level == "refused"]


def table(checks: Sequence[Check]) -> Table:
    """Return the findings as a table; a remedy stands only where there is something to remedy."""
    rows = Table(["check", "", "found", "needed", "remedy"])
    for c in checks:
        rows.add(c.name, c.level, c.found, c.needed, c.remedy if c.level != "ok" else "")
    return rows


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def _series(machine: Machine) -> Check:
    level: Level = "ok" if machine.series == "applied" else "refused"
    return Check("series", level, machine.series, "applied", "scripts/setup.sh")


def _port(machine: Machine) -> Check:
    level: Level = "ok" if machine.port_free else "refused"
    found = "free" if machine.port_free else "taken"
    return Check(
        "port", level, f"{machine.port} is {found}", "free", "--port with another number; ss -ltnp shows who has it"
    )


def _compilers(machine: Machine, gpu: bool) -> Check:
    wanted = COMPILERS if gpu else COMPILERS[:2]
    missing = [name for name in wanted if name not in machine.compilers]
    return Check(
        "compilers", "warning" if missing else "ok", ", ".join(machine.compilers) or "none", ", ".join(wanted),
        "install a C++ compiler and ninja, else rows are read by slower Python code"
        + ("; nvcc of CUDA 13 builds SGLang's own kernels" if "nvcc" in missing else ""),
    )  # fmt: skip


def _checkpoint(checkpoint: Checkpoint, own_template: bool) -> list[Check]:
    needed = "config, index, whole weight files, table parts, tokenizer"
    kind = str(checkpoint.config.get("model_type"))
    model = []
    if checkpoint.config and kind not in ("qwen4_exp", "qwen4_exp_text"):
        model = [Check("model", "refused", kind, "qwen4_exp", "this series serves Qwen4-Exp only")]
    if not checkpoint.complete:
        return model + [Check("checkpoint", "refused", what, needed, remedy) for what, remedy in checkpoint.problems]
    tables = ", ".join(str(n) for n in checkpoint.table_parts.values()) or "none in the checkpoint"
    what = f"{checkpoint.files} files, {_gib(checkpoint.nbytes)}, {checkpoint.tensors} tensors; table parts: {tables}"
    checks = [Check("checkpoint", "ok", what, needed), *model]
    if not checkpoint.has_chat_template and not own_template:
        needed = "one: the smoke test asks /v1/chat/completions"
        checks.append(Check("chat template", "refused", "none", needed, "-- --chat-template FILE"))
    return checks


def _gpu(machine: Machine) -> list[Check]:
    if isinstance(machine.gpu, str):
        return [
            Check("GPU", "refused", machine.gpu, "one NVIDIA GPU of 24 GB", "install the driver, or use --profile tiny")
        ]
    gpu = machine.gpu
    major = gpu.driver.partition(".")[0]
    new = major.isdigit() and int(major) >= DRIVER
    several = f", the first of {gpu.count}" if gpu.count > 1 else ""
    return [
        Check(
            "GPU", "warning" if several else "ok", gpu.name + several, "one NVIDIA GPU of 24 GB",
            "CUDA_VISIBLE_DEVICES with the UUID of the one that shall serve (nvidia-smi -L): CUDA may count in another "
            "order",
        ),
        Check(
            "driver", "ok" if new else "refused", gpu.driver, f">= {DRIVER} (CUDA 13)",
            "update the NVIDIA driver",
        ),
    ]  # fmt: skip


def _experts(profile: Profile, checkpoint: Checkpoint) -> Check:
    found, needed = checkpoint.expert_format, " or ".join(profile.formats) or "any"
    if not checkpoint.config:
        return Check("experts", "refused", "unknown: no config.json", needed, "download the checkpoint")
    if found == "int2" or profile.formats == ("int2",):
        return Check(
            "experts", "refused", found, needed,
            "2-bit experts are not there yet: SGLang 0.5.23 has no kernel and no loader for them (docs/WRITEUP.md, 6)",
        )  # fmt: skip
    if found not in FORMATS:
        return Check("experts", "refused", found, needed, "convert the checkpoint to NVFP4 or int4")
    if profile.formats and found not in profile.formats:
        return Check(
            "experts", "refused", found, needed, "too large for this class of machine: docs/SERVING.md, Formats"
        )
    if profile.placement == "paged" and method(checkpoint.config) in ("auto-round", "auto_round"):
        return Check(
            "experts", "warning", f"{found} by AutoRound", needed,
            "paged experts take GPTQ, AWQ, compressed-tensors and NVFP4; an AutoRound layer that becomes MoeWNA16 is "
            "refused at start",
        )  # fmt: skip
    return Check("experts", "ok", found, needed)


def _vram(machine: Machine, parts: budget.Budget) -> Check:
    need = parts.total("vram")
    if isinstance(machine.gpu, str):
        return Check("free VRAM", "refused", "no GPU", _gib(need), "as for GPU")
    free = machine.gpu.free_mib * 2**20
    return Check(
        "free VRAM", "ok" if free >= need else "refused", _gib(free), _gib(need),
        "end other users of the GPU; less --context, --max-requests or --resident-experts, or more --offload-gib "
        "(tools/budget.py shows the parts)",
    )  # fmt: skip


def _ram(machine: Machine, parts: budget.Budget, profile: Profile) -> Check:
    need = parts.total("ram")
    remedy = "end other programs; a smaller expert format"
    if profile.placement == "paged":
        remedy += ", or --profile 24gb-64ram, which keeps no second copy of the experts"
    return Check(
        "host RAM", "ok" if machine.ram_available >= need else "refused", f"{_gib(machine.ram_available)} available",
        _gib(need), remedy,
    )  # fmt: skip


def _cap(memory_max: int, parts: budget.Budget) -> Check:
    need = parts.total("ram")
    level: Level = "ok" if memory_max >= need else "refused"
    return Check("memory cap", level, _gib(memory_max), f"at least {_gib(need)}", "a larger --memory-max, or none")


def _context(checkpoint: Checkpoint, chosen: Settings) -> Check:
    text = checkpoint.config.get("text_config") or checkpoint.config
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int):
        return Check("context", "warning", "the config names no longest context", f">= {chosen.context}")
    level: Level = "ok" if chosen.context <= longest else "refused"
    return Check("context", level, f"the model takes {longest}", f">= {chosen.context}", "a smaller --context")


def _model_disk(disk: Disk | None, gpu: bool) -> Check:
    needed = "a local SSD, best NVMe: the table is read from it at every token"
    bad: Level = "refused" if gpu else "warning"
    if disk is None:
        return Check("model disk", "warning", "unknown", needed, "tools/ple_bench.py measures it")
    what = f"{disk.device} ({disk.filesystem})"
    if disk.filesystem.startswith(NETWORK):
        return Check("model disk", bad, f"{what}, network", needed, "copy the checkpoint to a local NVMe disk")
    if disk.filesystem in ("tmpfs", "ramfs"):
        return Check("model disk", bad, f"{what}, RAM", needed, "the table would take the RAM that the experts need")
    if disk.filesystem == "overlay":
        return Check(
            "model disk", "warning", f"{what}, a container's layer", needed,
            "mount the checkpoint into the container as a volume; tools/ple_bench.py measures it",
        )  # fmt: skip
    if disk.rotational and not disk.device.startswith(VIRTUAL):
        return Check("model disk", bad, f"{what}, rotational", needed, "copy the checkpoint to a local NVMe disk")
    if disk.rotational or disk.rotational is None:
        return Check(
            "model disk", "warning", f"{what}, kind unknown (virtual or mapped)", needed,
            "tools/ple_bench.py measures it",
        )  # fmt: skip
    return Check("model disk", "ok", f"{what}, solid state", needed)


def _space(disk: Disk | None) -> Check:
    needed = f"{RUN_SPACE_GIB} GiB for the log and compiled kernels"
    if disk is None:
        return Check("free space", "warning", "unknown", needed, "--run-dir on another disk")
    level: Level = "ok" if disk.free >= RUN_SPACE_GIB * GIB else "refused"
    return Check("free space", level, _gib(disk.free), needed, "free some space, or --run-dir on another disk")


def _systemd(machine: Machine) -> Check:
    return Check(
        "systemd scope", "refused" if machine.systemd else "ok", machine.systemd or "available",
        "systemd-run for --memory-max", "leave --memory-max out",
    )  # fmt: skip
