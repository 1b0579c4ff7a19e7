"""What a gate run does: prefixes, server arguments and which of them a prefix knows, expectations. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from q4kit.bench.runner import BenchConfig
from q4kit.bench.texts import TextKind
from q4kit.errors import UsageError
from q4kit.oracle.plan import Options
from q4kit.series import Series
from q4kit.server.launch import Device

Outcome = Literal["served", "failed", "argument"]

COMMON_ARGS: tuple[str, ...] = ('--json-model-override-args={"language_model_only": true}',)
"""Valid at every prefix: text only, so that no prefix pays for the vision tower."""
CUDA_ARGS: tuple[str, ...] = (
    "--attention-backend=triton",
    "--chunked-prefill-size=2048",
    "--max-total-tokens=32768",
    "--max-running-requests=4",
    "--max-mamba-cache-size=32",
    "--cuda-graph-max-bs-decode=2",
    "--mem-fraction-static=0.9",
)
"""The settings of the GPU matrix (tests/gpu/matrix.py), small enough for 24 GiB."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Prefixes below `serves_from` must fail with a line that `pattern` matches; from there on they must serve."""

    serves_from: int
    pattern: str


@dataclass(frozen=True, slots=True)
class Plant:
    """A patch file put on top of the tree of every prefix from `at` on: a fault the gate must name."""

    file: Path
    at: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Config:
    """One gate run.

    Attributes:
        server_args: the user's, on top of (and instead of equal) defaults.
        floor_runs: restarts of the first served prefix that are recorded beside it, for the floor.
        free_gib: GPU memory that a ballast leaves free, GiB; None for no ballast.
        budget_s: stop before a wave that would probably not be done by then, seconds; None for no limit.
        jobs: servers that boot and are recorded side by side: a wave.
        gpus: the GPUs that a wave is dealt to, as CUDA_VISIBLE_DEVICES names them; empty on CPU.
    """

    model: Path
    python: str
    prefixes: tuple[int, ...]
    device: Device = "cpu"
    server_args: tuple[str, ...] = ()
    short: bool = False
    floor_runs: int = 1
    plant: Plant | None = None
    expect: Expectation | None = None
    free_gib: float | None = None
    tolerance: float | None = None
    timeout_s: float = 400.0
    budget_s: float | None = None
    jobs: int = 1
    gpus: tuple[str, ...] = ()

    @property
    def oracle(self) -> Options:
        """Return what the oracle scores; the short form keeps one prompt beyond the tiny model's sparse budget."""
        return Options(scored=60, decode_tokens=8, max_prompt_tokens=1100, top=8) if self.short else Options()

    @property
    def bench(self) -> BenchConfig:
        """Return the speed samples: a few seconds a prefix, not a benchmark."""
        if self.short:
            return BenchConfig(contexts=(101,), kinds=(TextKind.WORDS,), tokens=16, repeats=2, resend=False)
        return BenchConfig(contexts=(101, 1701), kinds=(TextKind.WORDS,), tokens=64, repeats=3, resend=False)

    def arguments(self) -> list[str]:
        """Return the server's arguments: defaults that the user did not name, then the user's."""
        named = {flag for flag, _ in parse_arguments(self.server_args)}
        defaults = COMMON_ARGS + (CUDA_ARGS if self.device == "cuda" else ())
        return [arg for arg in defaults if arg.split("=", 1)[0] not in named] + list(self.server_args)


@dataclass(frozen=True, slots=True)
class Item:
    """One server of a run: a prefix, or with `restart` from 1 on that prefix once more, for the floor."""

    prefix: int
    restart: int = 0

    @property
    def name(self) -> str:
        """Return the name of its log."""
        return f"floor-{self.restart}" if self.restart else f"prefix-{self.prefix:04d}"


def choose_prefixes(length: int, listed: str | None, first: int | None, last: int | None) -> tuple[int, ...]:
    """Return the prefixes of `--prefixes 0,7,21`, or of `--from`/`--to` (both included; default all), ascending."""
    if listed is not None:
        if first is not None or last is not None:
            raise UsageError("--prefixes and --from/--to exclude each other", remedy="use one of the two")
        words = [word.strip() for word in listed.split(",")]
        if not all(word.isdecimal() for word in words):
            raise UsageError(f"--prefixes {listed!r}: expected numbers", remedy="for example --prefixes 0,7,21")
        chosen = sorted({int(word) for word in words})
    else:
        chosen = list(range(0 if first is None else first, (length if last is None else last) + 1))
    if not chosen or chosen[0] < 0 or chosen[-1] > length:
        raise UsageError(
            f"prefixes {chosen or 'none'}: the series has {length} patches", remedy=f"name prefixes from 0 to {length}"
        )
    return tuple(chosen)


def parse_arguments(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return (flag, value) of a command line, both spellings; a word without a flag before it raises UsageError."""
    found: list[tuple[str, str | None]] = []
    for word in arguments:
        if word.startswith("--"):
            flag, given, value = word.partition("=")
            found.append((flag, value if given else None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
        else:
            raise UsageError(f"server argument {word!r} follows no flag", remedy="write --flag value or --flag=value")
    return found


def unknown_argument(series: Series, prefix: int, arguments: Sequence[str]) -> str:
    """Return which argument a prefix does not know yet and from which patch on it does; empty when it knows all.

    A patch says in `adds` (series.toml) which flags, or which values of a flag ("--flag value"), come with it.
    """
    given = parse_arguments(arguments)
    for entry in series.entries[prefix:]:
        for added in entry.adds:
            flag, _, value = added.partition(" ")
            if any(name == flag and (not value or has == value) for name, has in given):
                return f"argument `{added}` from patch {entry.number} on"
    return ""


def parse_expectation(serves_from: int | None, pattern: str | None) -> Expectation | None:
    """Return the expectation of `--serves-from K --fails-with REGEX`; one without the other raises UsageError."""
    if serves_from is None and pattern is None:
        return None
    if serves_from is None or pattern is None:
        raise UsageError(
            "--serves-from and --fails-with belong together",
            remedy="say from which prefix on it serves, and what it fails with before",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--fails-with {pattern!r}: {error}", remedy="give a regular expression") from error
    return Expectation(serves_from, pattern)
