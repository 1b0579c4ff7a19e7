"""Memory of a server's processes over time, and whether it grows (pure but for `smaps`)."""

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
LOOKS_S = 60.0
"""Two looks of a reader at its budget: pages that stay mapped for as long are kept, not about to be given back."""
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


def table_pages(smaps: str, folder: str) -> float:
    """Return MiB resident of the mappings of files in `folder`, by the text of a process's smaps."""
    mib, here = 0.0, False
    for line in smaps.splitlines():
        if line[:1] in "0123456789abcdef":  # a mapping's first line; field names begin with a capital
            here = f" {folder}/" in line
        elif here and line.startswith("Rss:"):
            mib += int(line.split()[1]) / 1024
    return mib


def group_memory(group: int, table: Path | None = None) -> dict[str, dict[str, float]]:
    """Return MiB by process of a process group: "<command> <pid>" -> the figures of `parse_smaps`.

    With the folder of a `table` also "table", the pages of its files that are mapped.
    """
    folder = os.path.realpath(table) if table else ""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            stat = (entry / "stat").read_text()
            if int(stat.rsplit(")", 1)[1].split()[2]) == group:
                name = stat[stat.index("(") + 1 : stat.rindex(")")]
                figures = parse_smaps((entry / "smaps_rollup").read_text())
                if table:
                    maps = folder in (entry / "maps").read_text()  # cheap: smaps walks every page once more
                    figures["table"] = table_pages((entry / "smaps").read_text(), folder) if maps else 0.0
                found[f"{name} {entry.name}"] = figures
    return found


def total(samples: Sequence[Sample], field: str) -> list[float]:
    """Return the sum over the processes of each sample, MiB."""
    return [sum(process[field] for process in sample.processes.values()) for sample in samples]


def kept(axis: Sequence[float], values: Sequence[float], seconds: float = LOOKS_S) -> float:
    """Return the largest of what a quantity never fell below for `seconds`; of a shorter axis, for all of it."""
    starts = [i for i, start in enumerate(axis) if start + seconds <= axis[-1]] or [0]
    return max(min(values[i : bisect_right(axis, axis[i] + seconds)]) for i in starts)


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
    or came. Without "table" in the samples all that is mapped counts as the table's. Growth of each process is given
    beside it. With the samples of a `control`, a server under the same requests, flat means: grew no more than it did.
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
    known = all("table" in process for sample in those for process in sample.processes.values())
    table = total(those, "table") if known else mapped
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
