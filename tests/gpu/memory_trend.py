"""Memory of a server's processes over time, and whether it grows (pure but for `smaps`)."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy import stats

BRIEF = 0.1
"""Share of the samples that a process may be in and not belong to the server: a compiler that a new kernel starts."""
BLOCKS = 8
"""Blocks that a window is averaged into: neighbouring samples are not independent, their means nearly are."""


@dataclass(frozen=True)
class Trend:
    """Growth of a quantity over a window, with a 95 % interval, in the quantity's unit."""

    growth: float
    low: float
    high: float
    samples: int
    seconds: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def trend(times: Sequence[float], values: Sequence[float], blocks: int = BLOCKS) -> Trend:
    """Return the growth over the window by least squares on block means (t interval, blocks - 2 degrees of freedom)."""
    if len(times) != len(values) or len(times) < 2 * blocks:
        raise ValueError(f"{len(times)} times and {len(values)} values, at least {2 * blocks} of each are needed")
    cuts = [round(i * len(times) / blocks) for i in range(blocks + 1)]
    pairs = list(pairwise(cuts))
    x = [statistics.fmean(times[a:b]) for a, b in pairs]
    y = [statistics.fmean(values[a:b]) for a, b in pairs]
    seconds = times[-1] - times[0]
    if min(y) == max(y):  # a correlation, and with it scipy's error of the slope, is not defined then
        return Trend(0.0, 0.0, 0.0, len(times), seconds)
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, blocks - 2)) * line.stderr
    return Trend(
        line.slope * seconds, (line.slope - half) * seconds, (line.slope + half) * seconds, len(times), seconds
    )


def verdict(found: Trend, limit: float) -> str:
    """Return "flat" (growth above `limit` is ruled out), "grows" (growth of at most `limit` is), or "inconclusive"."""
    if found.high <= limit:
        return "flat"
    return "grows" if found.low > limit else "inconclusive"


def parse_smaps(text: str) -> dict[str, float]:
    """Return MiB of a smaps_rollup file: rss, anonymous memory, and the rest (files and shared memory)."""
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Anonymous"):
            fields[name] = int(rest.split()[0]) / 1024
    missing = {"Rss", "Anonymous"} - fields.keys()
    if missing:
        raise ValueError(f"smaps_rollup without {', '.join(sorted(missing))}")
    return {"rss": fields["Rss"], "anonymous": fields["Anonymous"], "mapped": fields["Rss"] - fields["Anonymous"]}


def group_memory(group: int) -> dict[str, dict[str, float]]:
    """Return MiB by process of a process group: "<command> <pid>" -> the figures of `parse_smaps`."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = (entry / "stat").read_text()
            if int(stat.rsplit(")", 1)[1].split()[2]) == group:
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                found[f"{name} {entry.name}"] = parse_smaps((entry / "smaps_rollup").read_text())
    return found


def total(samples: Sequence[tuple[float, dict[str, dict[str, float]]]], field: str) -> list[float]:
    """Return the sum over the processes of each sample, MiB."""
    return [sum(process[field] for process in processes.values()) for _, processes in samples]


def servers(
    samples: Sequence[tuple[float, dict[str, dict[str, float]]]],
) -> tuple[list[tuple[float, dict[str, dict[str, float]]]], list[str]]:
    """Return the samples without the processes that came and went, and the names of those.

    Such a process is in at most BRIEF of the samples and not in the last one.
    """
    seen = Counter(name for _, processes in samples for name in processes)
    brief = {name for name, times in seen.items() if times <= BRIEF * len(samples) and name not in samples[-1][1]}
    kept = [(at, {name: figures for name, figures in now.items() if name not in brief}) for at, now in samples]
    return kept, sorted(brief)


def judge(
    samples: Sequence[tuple[float, dict[str, dict[str, float]]]], warm_up_s: float, limit_mib: float, mapped_mib: float
) -> dict[str, Any]:
    """Return the verdict on samples of (seconds, memory by process) after the warm-up.

    Memory holds when the anonymous memory of all processes together is flat, their mapped memory stays below
    `mapped_mib`, and no process of the server went away or came. Growth of each process is given beside it.
    ValueError where there are too few samples.
    """
    late = [sample for sample in samples if sample[0] >= warm_up_s]
    if not late:
        raise ValueError(f"no sample after {warm_up_s:g} s of warm-up")
    kept, brief = servers(late)
    times = [seconds for seconds, _ in kept]
    anonymous = trend(times, total(kept, "anonymous"))
    names = [set(processes) for _, processes in kept]
    same = all(name == names[0] for name in names)
    largest = max(total(kept, "mapped"))
    processes = {}
    if same:
        for name in sorted(names[0]):
            found = trend(times, [sample[name]["rss"] for _, sample in kept])
            processes[name] = {"rss_mib_last": round(kept[-1][1][name]["rss"], 1), "rss_growth": found.to_json()}
    outcome = verdict(anonymous, limit_mib)
    if not same or largest > mapped_mib:
        outcome = "grows"
    return {
        "verdict": outcome,
        "anonymous_growth_mib": anonymous.to_json(),
        "limit_mib": limit_mib,
        "rss_growth_mib": trend(times, total(kept, "rss")).to_json(),
        "mapped_mib_max": round(largest, 1),
        "mapped_mib_limit": mapped_mib,
        "same_processes": same,
        "brief_processes": brief,
        "processes": processes,
    }
