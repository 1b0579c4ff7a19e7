"""The profiles of scripts/serve.sh: which flags a machine of a given size gets (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from q4kit.errors import UsageError
from q4kit.server.launch import Device
from q4kit.serving import budget
from q4kit.serving.budget import GIB, Settings
from q4kit.serving.shape import Shape

Placement = Literal["paged", "offload", "resident"]
KV_FLAG: Mapping[str, str] = {"bf16": "auto", "fp8_e4m3": "fp8_e4m3"}


@dataclass(frozen=True)
class Profile:
    """One machine class. Memory sizes are the class, not what must be free; that is computed."""

    name: str
    what: str
    device: Device
    placement: Placement
    context: int
    max_requests: int
    state_slots: int
    chunk: int
    formats: tuple[str, ...] = ()
    """Expert formats that the class is meant for, smallest demand first; empty: any."""
    resident_experts: int = 0
    vram_gib: int = 0
    """What is taken to be free on a 24 GB card: the driver and its context take the rest."""


PROFILES: Mapping[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            "24gb-32ram", "24 GB GPU, 32 GB RAM: 2-bit experts, offloaded without a second copy; not possible yet",
            "cuda", "offload", 16384, 1, 8, 2048, ("int2",), vram_gib=23,
        ),
        Profile(
            "24gb-64ram", "24 GB GPU, 64 GB RAM: 4-bit experts, each either on the GPU or in RAM",
            "cuda", "offload", 16384, 1, 8, 2048, ("int4", "nvfp4"), vram_gib=23,
        ),
        Profile(
            "24gb-128ram", "24 GB GPU, 128 GB RAM: 4-bit experts, paged: all in RAM, the most recent on the GPU",
            "cuda", "paged", 32768, 2, 16, 2048, ("int4", "nvfp4"), resident_experts=64, vram_gib=23,
        ),
        Profile(
            "tiny", "no GPU: a tiny random model on the CPU platform, to try the way without the hardware",
            "cpu", "resident", 8192, 4, 32, 512,
        ),
    )
}  # fmt: skip


RESERVED: Mapping[str, str] = {
    "--model-path": "use --model of serve.sh, before --",
    "--model": "use --model of serve.sh, before --",
    "--host": "use --host of serve.sh, before --",
    "--port": "use --port of serve.sh, before --",
    "--admin-api-key": "leave it out: --api-key alone opens the routes that serve.sh needs",
    "--ssl-certfile": "leave it out, and put a TLS proxy in front: serve.sh itself asks by http",
    "--ssl-keyfile": "leave it out, and put a TLS proxy in front: serve.sh itself asks by http",
}
"""SGLang arguments that serve.sh cannot follow, and what to do instead."""


def check_extra(extra: Sequence[str]) -> None:
    """Raise UsageError for an argument after -- with which serve.sh would look for its server in vain."""
    for word in extra:
        flag = word.partition("=")[0]
        if flag in RESERVED:
            raise UsageError(f"{flag} after --", remedy=RESERVED[flag])


@dataclass(frozen=True)
class Options:
    """What the user chose; None takes the profile's value."""

    context: int | None = None
    max_requests: int | None = None
    resident_experts: int | None = None
    offload_gib: int | None = None
    kv_dtype: str = "bf16"
    table_dir: Path | None = None
    reader: str = "auto"
    experts_in_place: bool = False
    extra: Sequence[str] = ()


def settings(profile: Profile, options: Options, shape: Shape, expert_format: str) -> Settings:
    """Return the budget's settings for a profile; the offload is what the GPU cannot hold, unless chosen.

    Raises:
        UsageError: an option does not belong to the profile's way of placing experts.
    """
    if options.resident_experts is not None and profile.placement != "paged":
        raise UsageError(f"--resident-experts: {profile.name} does not page experts", remedy="use 24gb-128ram")
    if profile.placement != "offload":
        for value, flag in ((options.offload_gib, "--offload-gib"), (options.experts_in_place or None, "--in-place")):
            if value is not None:
                raise UsageError(f"{flag}: {profile.name} does not offload experts", remedy="use 24gb-64ram")
    requests = profile.max_requests if options.max_requests is None else options.max_requests
    base = Settings(
        context=profile.context if options.context is None else options.context,
        max_requests=requests,
        expert_format=expert_format,
        kv_dtype=options.kv_dtype,
        table="nvme",
        state_slots=max(profile.state_slots, budget.SLOTS_PER_REQUEST * requests),
        chunk=profile.chunk,
    )
    if profile.placement == "paged":
        resident = profile.resident_experts if options.resident_experts is None else options.resident_experts
        return replace(base, resident_experts=resident)
    if profile.placement == "offload":
        wanted = options.offload_gib
        return replace(base, offload_gib=least_offload(shape, base, profile.vram_gib) if wanted is None else wanted)
    return base


def least_offload(shape: Shape, base: Settings, vram_gib: int) -> int:
    """Return the smallest whole GiB of experts that must leave the GPU for the rest to fit into `vram_gib`.

    Where nothing is enough, all of them.
    """
    most = -(-budget.routed_bytes(shape, base.expert_format) // GIB)
    for gib in range(most):
        if budget.compute(shape, replace(base, offload_gib=gib)).total("vram") <= vram_gib * GIB:
            return gib
    return most


def flags(profile: Profile, options: Options, chosen: Settings) -> list[str]:
    """Return the SGLang arguments of a profile, the user's own last."""
    arguments = [
        "--language-model-only",
        "--ple-offload-embedding",
        "--ple-offload-backend=nvme",
        f"--ple-offload-reader={options.reader}",
    ]
    if options.table_dir is not None:
        arguments.append(f"--ple-offload-dir={options.table_dir}")
    arguments += [
        f"--context-length={chosen.context}",
        f"--max-running-requests={chosen.max_requests}",
        f"--max-total-tokens={chosen.pool_tokens}",
        f"--max-mamba-cache-size={chosen.slots}",
        f"--chunked-prefill-size={chosen.chunk}",
        f"--kv-cache-dtype={KV_FLAG[chosen.kv_dtype]}",
    ]
    if profile.device == "cuda":
        arguments += ["--cuda-graph-backend-decode=full", "--cuda-graph-backend-prefill=breakable"]
    if profile.placement == "paged":
        arguments += ["--enable-paged-experts", f"--paged-experts-num-resident={chosen.resident_experts}"]
    if profile.placement == "offload":
        arguments.append(f"--cpu-offload-gb={chosen.offload_gib}")
        if options.experts_in_place:
            arguments.append("--cpu-offload-experts-in-place")
    return [*arguments, *options.extra]
