"""Memory of a server's processes over time, and whether it grows (pure but for reading /proc and a folder)."""

from __future__ import annotations

import contextlib
import os
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

BRIEF = 0.1
"""Share of the samples that a process may be in and not belong to the server: a compiler that a new kernel starts."""
LOOKS_S = 65.0
"""Longer than two looks of a reader at its budget (30 s and what a look takes): pages mapped for as long are kept."""
LOOK_SAMPLES = 8
"""Samples that such a stretch has at least; one with fewer is not judged by."""
BLOCKS = 8
"""Blocks that a window is averaged into: neighbouring samples are not independent, their means nearly are."""


class Sample(NamedTuple):
    """Memory of a server: seconds and requests ended since its load began, MiB by process (see `group_memory`)."""

    seconds: float
    requests: int
    processes: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Trend:
    """Growth of a quantity over a window, with a 95 % interval, in the quantity's unit.

    `span` is the window's length in the unit of its axis, seconds or requests.
    """

    growth: float
    low: float
    high: float
    samples: int
    span: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def trend(axis: Sequence[float], values: Sequence[float], blocks: int = BLOCKS) -> Trend:
    """Return the growth over the window by least squares on block means (t interval, blocks - 2 degrees of freedom)."""
    if len(axis) != len(values) or len(axis) < 2 * blocks:
        raise ValueError(f"{len(axis)} points and {len(values)} values, at least {2 * blocks} of each are needed")
    cuts = [round(i * len(axis) / blocks) for i in range(blocks + 1)]
    pairs = list(pairwise(cuts))
    x = [statistics.fmean(axis[a:b]) for a, b in pairs]
    y = [statistics.fmean(values[a:b]) for a, b in pairs]
    span = axis[-1] - axis[0]
    if min(y) == max(y):  # a correlation, and with it scipy's error of the slope, is not defined then
        return Trend(0.0, 0.0, 0.0, len(axis), span)
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, blocks - 2)) * line.stderr
    return Trend(line.slope * span, (line.slope - half) * span, (line.slope + half) * span, len(axis), span)


def verdict(found: Trend, limit: float) -> str:
    """Return "flat" (growth above `limit` is ruled out), "grows" (growth of at most `limit` is), or "inconclusive"."""
    if found.high <= limit:
        return "flat"
    return "grows" if found.low > limit else "inconclusive"


def files_of(folder: Path) -> frozenset[str]:
    """Return the files of a folder, or what its links lead to, as smaps may name them: "<device> <inode>" and path.

    Both, since file systems that are stacked show another device there, and a path can be escaped or gone.
    """
    found: set[str] = set()
    for entry in folder.iterdir():
        if entry.is_file():
            at = entry.stat()
            found |= {f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x} {at.st_ino}", os.path.realpath(entry)}
    return frozenset(found)


def parse_smaps(text: str, table: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return MiB of a process by its smaps: rss, anonymous memory, the rest (files and shared memory), the table's.

    Every mapping counts by itself: a page that is mapped twice is in "mapped" and "table" twice.
    """
    mib = dict.fromkeys(("rss", "anonymous", "table"), 0.0)
    ours, mappings = False, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            mib["rss"] += int(rest.split()[0]) / 1024
            mib["table"] += int(rest.split()[0]) / 1024 if ours else 0
        elif name == "Anonymous":
            mib["anonymous"] += int(rest.split()[0]) / 1024
        elif line[:1] in "0123456789abcdef" and line:  # first line of a mapping; names of fields begin with a capital
            _, _, _, device, inode, *path = line.split(maxsplit=5)
            ours, mappings = bool(table & {f"{device} {inode}", *path}), mappings + 1
    if not mappings:
        raise ValueError("smaps without a mapping")
    return mib | {"mapped": mib["rss"] - mib["anonymous"]}


def group_memory(group: int, table: frozenset[str] = frozenset()) -> dict[str, dict[str, float]]:
    """Return MiB by process of a process group: "<command> <pid>" -> the figures of `parse_smaps`."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it ended meanwhile
            stat = (entry / "stat").read_text(errors="replace")
            if int(stat.rsplit(")", 1)[1].split()[2]) == group:
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                found[f"{name} {entry.name}"] = parse_smaps((entry / "smaps").read_text(errors="replace"), table)
    return found


def total(samples: Sequence[Sample], field: str) -> list[float]:
    """Return the sum over the processes of each sample, MiB."""
    return [sum(process[field] for process in sample.processes.values()) for sample in samples]


def kept(axis: Sequence[float], values: Sequence[float], seconds: float = LOOKS_S) -> float:
    """Return the largest of what a quantity never fell below for `seconds`; of a shorter axis, for all of it.

    What is gained in the last `seconds` alone is not kept yet.
    """
    ends = [bisect_right(axis, start + seconds) for start in axis]
    whole = [(i, end) for i, end in enumerate(ends) if axis[i] + seconds <= axis[-1] and end - i >= LOOK_SAMPLES]
    return max(min(values[i:end]) for i, end in whole or [(0, len(values))])


def servers(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Return the samples without the processes that came and went, and the names of those.

    Such a process is in at most BRIEF of the samples and not in the last one.
    """
    seen = Counter(name for sample in samples for name in sample.processes)
    last = samples[-1].processes
    brief = {name for name, times in seen.items() if times <= BRIEF * len(samples) and name not in last}
    those = [
        sample._replace(processes={name: mib for name, mib in sample.processes.items() if name not in brief})
        for sample in samples
    ]
    return those, sorted(brief)


def by_request(samples: Sequence[Sample], numbers: Sequence[int]) -> list[float]:
    """Return the anonymous memory of all processes as it was when each request had ended, MiB."""
    those, _ = servers(samples)
    ended, mib = [sample.requests for sample in those], total(those, "anonymous")
    return [mib[max(0, bisect_right(ended, number) - 1)] for number in numbers]


def against(samples: Sequence[Sample], control: Sequence[Sample], first: int) -> tuple[Trend, Trend]:
    """Return the control's own growth, and how much more the other server gained over the same requests, MiB.

    From request `first` to the last that both ended. What every server of this load keeps, such as a compiled kernel
    for each new shape, both keep at the same request: it falls out of the difference, also where it came in steps.
    ValueError where they share too few requests.
    """
    common = range(first, min(samples[-1].requests, control[-1].requests) + 1)
    ours, theirs = by_request(samples, common), by_request(control, common)
    return trend(common, theirs), trend(common, [a - b for a, b in zip(ours, theirs, strict=True)])


def judge(
    samples: Sequence[Sample],
    warm_up_s: float,
    limit_mib: float,
    mapped_mib: float,
    control: Sequence[Sample] | None = None,
) -> dict[str, Any]:
    """Return the verdict on the samples after the warm-up.

    Memory holds when the anonymous memory of all processes together is flat, the pages of the table that they keep
    mapped (see `kept`) and whatever else they map stay below `mapped_mib` each, and no process of the server went away
    or came. Growth of each process is given beside it. With the samples of a `control`, a server under the same
    requests, flat means: grew no more than it did.
    ValueError where there are too few samples.
    """
    late = [sample for sample in samples if sample.seconds >= warm_up_s]
    if not late:
        raise ValueError(f"no sample after {warm_up_s:g} s of warm-up")
    those, brief = servers(late)
    times = [sample.seconds for sample in those]
    anonymous = trend(times, total(those, "anonymous"))
    names = [set(sample.processes) for sample in those]
    same = all(name == names[0] for name in names)
    mapped = total(those, "mapped")
    table = total(those, "table")
    table_kept = kept(times, table)
    other = max(all_of - part for all_of, part in zip(mapped, table, strict=True))
    processes = {}
    if same:
        for name in sorted(names[0]):
            found = trend(times, [sample.processes[name]["rss"] for sample in those])
            last = round(those[-1].processes[name]["rss"], 1)
            processes[name] = {"rss_mib_last": last, "rss_growth": found.to_json()}
    judged, compared = anonymous, {}
    if control is not None:
        theirs, judged = against(samples, control, late[0].requests)
        compared = {"excess_growth_mib": judged.to_json(), "control_growth_mib": theirs.to_json()}
    outcome = verdict(judged, limit_mib)
    if not same or max(table_kept, other) > mapped_mib:
        outcome = "grows"
    return {
        "verdict": outcome,
        "anonymous_growth_mib": anonymous.to_json(),
        **compared,
        "limit_mib": limit_mib,
        "rss_growth_mib": trend(times, total(those, "rss")).to_json(),
        "mapped_mib_max": round(max(mapped), 1),
        "table_mib_kept": round(table_kept, 1),
        "other_mapped_mib_max": round(other, 1),
        "mapped_mib_limit": mapped_mib,
        "same_processes": same,
        "brief_processes": brief,
        "processes": processes,
    }
