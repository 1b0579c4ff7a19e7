"""Measure readers beside fio in interleaved rounds, cold and warm."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from q4kit.bench import machine
from q4kit.errors import EnvironmentFault
from q4kit.ple import fio
from q4kit.ple.contenders import Contender, Rows
from q4kit.ple.summary import Samples

MAX_RESIDENT_COLD = 0.01
"""Cold means at most this share of the table in the page cache (mincore)."""

MIN_RESIDENT_WARM = 0.999
"""Warm means at least this share of the table in the page cache before each series."""

WARM_BATCHES = 5
"""At least this many warm batches a round: they are short, and a busy machine disturbs single ones."""

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `batches`: row count to batches of one round."""

    batches: Mapping[int, int]
    rounds: int
    fio_seconds: float
    fio_depths: Sequence[int]
    once: frozenset[tuple[str, str]] = frozenset()
    """(contender, cache state) whose largest batch is measured in the first round only: slow, and known to be."""


QUICK = Plan(
    {16: 60, 32_768: 1},
    5,
    0.5,
    (64, 128),
    frozenset({("memmap", "cold"), ("threads-16", "cold"), ("threads-16", "warm")}),
)
FULL = Plan(
    {16: 200, 256: 20, 2_048: 5, 32_768: 1}, 7, 1.0, (16, 32, 64, 128, 256), frozenset({("threads-16", "warm")})
)


@dataclass(slots=True)
class Measurement:
    """Everything that was measured, nothing summarised."""

    samples: dict[tuple[str, int, str], Samples] = field(default_factory=dict)
    waves: list[fio.FioRun] = field(default_factory=list)
    bulk: dict[int, list[fio.FioRun]] = field(default_factory=dict)
    partial: bool = False
    no_warm: str = ""
    """Why the warm rounds ended before their time, empty when they did not; cold figures are complete then."""

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": [s.to_json() for s in self.samples.values()],
            "fio_waves": [w.to_json() for w in self.waves],
            "fio_bulk": {str(d): [r.to_json() for r in runs] for d, runs in self.bulk.items()},
            "partial": self.partial,
            "no_warm": self.no_warm,
        }


def run(
    contenders: Mapping[str, Contender],
    files: Sequence[Path],
    row_bytes: int,
    rows: int,
    plan: Plan,
    *,
    with_fio: bool,
    seed: int | None = None,
    log: Log = lambda line: None,
) -> Measurement:
    """Return cold rounds, then warm rounds; an interrupt keeps what was measured and marks it partial.

    A table that does not stay in the page cache ends the warm rounds only: `no_warm` says why.
    """
    result = Measurement()
    rng = np.random.default_rng(seed)
    out = np.empty((max(plan.batches), row_bytes), dtype=np.uint8)
    try:
        for number in range(plan.rounds):
            log(f"cold round {number + 1} of {plan.rounds}")
            if with_fio:
                _fio_round(result, files[0], plan)
            for name, contender in contenders.items():
                _cold(result, name, contender, contenders, files, rows, plan, number, rng, out)
        log("reading the table into the page cache")
        for contender in contenders.values():
            contender.release()
        try:
            _warm_rounds(result, contenders, files, rows, plan, rng, out, log)
        except EnvironmentFault as fault:
            result.no_warm = str(fault)
            log(f"no more warm rounds: {fault}")
    except KeyboardInterrupt:
        result.partial = True
    return result


def _warm_rounds(
    result: Measurement,
    contenders: Mapping[str, Contender],
    files: Sequence[Path],
    rows: int,
    plan: Plan,
    rng: np.random.Generator,
    out: Rows,
    log: Log,
) -> None:
    for number in range(plan.rounds):
        log(f"warm round {number + 1} of {plan.rounds}")
        for count, batches in plan.batches.items():
            for name, contender in contenders.items():
                slow = count == max(plan.batches) and (name, "warm") in plan.once
                if slow and number:
                    continue
                share = _warm(files)
                many = 1 if slow else max(batches, WARM_BATCHES)
                samples = _batches(result, name, contender, count, "warm", many, rows, rng, out)
                if share is not None:
                    samples.resident.append(share)


def _warm(files: Sequence[Path]) -> float | None:
    """Return the share of the table in the page cache, read again where pages have left it.

    A machine that reclaims memory proactively (DAMON) takes pages that were read seconds ago, and a series measured
    then reads from the disk and is called warm.
    """
    share = machine.residency(files)
    if share is None or share < MIN_RESIDENT_WARM:
        share = machine.warm(files)
    if share is not None and share < MIN_RESIDENT_WARM:
        raise EnvironmentFault(
            f"only {share:.1%} of the table stays in the page cache; warm is {MIN_RESIDENT_WARM:.1%} at least",
            remedy="take a smaller table: --size-mib",
        )
    return share


def _fio_round(result: Measurement, path: Path, plan: Plan) -> None:
    result.waves.append(fio.random_reads(path, fio.WAVE, plan.fio_seconds, wave=True))
    for depth in plan.fio_depths:
        result.bulk.setdefault(depth, []).append(fio.random_reads(path, depth, plan.fio_seconds))


def _cold(
    result: Measurement,
    name: str,
    contender: Contender,
    everyone: Mapping[str, Contender],
    files: Sequence[Path],
    rows: int,
    plan: Plan,
    number: int,
    rng: np.random.Generator,
    out: Rows,
) -> None:
    largest = max(plan.batches)
    for count, batches in plan.batches.items():
        if number and count == largest and (name, "cold") in plan.once:
            continue
        # Pages that any contender has mapped cannot be evicted.
        for other in everyone.values():
            other.release()
        share = machine.evict(files)
        if share is not None and share > MAX_RESIDENT_COLD:
            raise EnvironmentFault(
                f"{share:.1%} of the table is still in the page cache after eviction; "
                f"cold is {MAX_RESIDENT_COLD:.0%} at most",
                remedy="end other processes that map the table, or take another one",
            )
        samples = _batches(result, name, contender, count, "cold", batches, rows, rng, out)
        if share is not None:
            samples.resident.append(share)


def _batches(
    result: Measurement,
    name: str,
    contender: Contender,
    count: int,
    cache: str,
    batches: int,
    rows: int,
    rng: np.random.Generator,
    out: Rows,
) -> Samples:
    samples = result.samples.setdefault((name, count, cache), Samples(name, count, cache))
    before = contender.requests()
    for _ in range(batches):
        ids = rng.integers(0, rows, count)
        cpu, begin = time.process_time(), time.perf_counter()
        contender.read(ids, out[:count])
        end = time.perf_counter()
        samples.cpu_seconds += time.process_time() - cpu
        samples.seconds.append(end - begin)
    after = contender.requests()
    if before is not None and after is not None:
        samples.requests = (samples.requests or 0) + after - before
    samples.mapped_bytes = mapped_rss()
    return samples


def mapped_rss(pattern: str = r"ple_table\.bin$", smaps: Path = Path("/proc/self/smaps")) -> int:
    """Return the resident bytes of this process's mappings whose path matches `pattern`."""
    total, inside = 0, False
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = re.search(pattern, line) is not None
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
