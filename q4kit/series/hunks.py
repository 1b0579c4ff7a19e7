"""Why a hunk does not fit a file, and the lines nearest to what it expects. Pure."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from q4kit.series.patchfile import FileDiff, Hunk


@dataclass(frozen=True)
class Misfit:
    """The first hunk of a patch that does not fit.

    ``line`` is the 1-based line of the file as found that is nearest to what the hunk expects; 0 when the file is
    missing or unwanted. ``nearest`` is a diff from the expected lines (``-``) to the found ones (``+``).
    """

    path: str
    hunk: int
    hunks: int
    line: int
    what: str
    nearest: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.path}: hunk {self.hunk} of {self.hunks}: {self.what}"


def positions(lines: Sequence[str], block: Sequence[str]) -> list[int]:
    """Return the 0-based starts of every exact occurrence of ``block``; none for an empty block."""
    if not block:
        return []
    size = len(block)
    return [
        i
        for i, line in enumerate(lines[: len(lines) - size + 1])
        if line == block[0] and list(lines[i : i + size]) == list(block)
    ]


def nearest(lines: Sequence[str], block: Sequence[str], around: int) -> int:
    """Return the 0-based start of the window most like ``block``; ties go to the one closest to ``around``."""
    size = min(len(block), len(lines))
    if size == 0:
        return 0
    wanted = Counter(line for line in block if line.strip())
    window = Counter(line for line in lines[:size] if line in wanted)
    scored: list[tuple[int, int, int]] = []
    for start in range(len(lines) - size + 1):
        if start:
            if (gone := lines[start - 1]) in wanted:
                window[gone] -= 1
            if (came := lines[start + size - 1]) in wanted:
                window[came] += 1
        shared = sum(min(count, wanted[line]) for line, count in window.items() if count > 0)
        scored.append((-shared, abs(start - around), start))
    # counting lines is cheap but blind to their order: let difflib judge the best few
    best = sorted(scored)[:8]
    if best[0][0] == 0:  # no line in common: compare letters near the recorded place
        best = sorted(scored, key=lambda row: row[1])[:64]
        text = "\n".join(block)
        ratio = {s: difflib.SequenceMatcher(None, text, "\n".join(lines[s : s + size])).ratio() for *_, s in best}
    else:
        ratio = {s: difflib.SequenceMatcher(None, list(block), list(lines[s : s + size])).ratio() for *_, s in best}
    return max(best, key=lambda row: (ratio[row[2]], -row[1]))[2]


def misfit(diff: FileDiff, text: str | None, number: int) -> Misfit:
    """Return the description of hunk ``number`` (1-based) of ``diff`` that does not fit ``text`` (None: no file)."""
    total = max(len(diff.hunks), 1)
    if diff.old_mode is None:
        return Misfit(diff.path, 1, total, 0, "the file exists already, the patch adds it")
    if text is None:
        return Misfit(diff.path, number, total, 0, "the file does not exist")
    lines = text.split("\n")
    hunk = diff.hunks[number - 1]
    where = _centred(lines, hunk)
    found = lines[where : where + len(hunk.before)]
    what = f"expected lines at {hunk.old_start} not found, nearest at line {where + 1}"
    if positions(lines, hunk.before):
        what = f"expected lines are at line {positions(lines, hunk.before)[0] + 1}, out of order with the other hunks"
    elif positions(lines, hunk.after):
        what = f"already there at line {positions(lines, hunk.after)[0] + 1}, but not the whole patch"
    shown = [line for line in difflib.ndiff(hunk.before, found) if not line.startswith("?")]
    return Misfit(diff.path, number, total, where + 1, what, [line.rstrip() for line in shown])


def _centred(lines: Sequence[str], hunk: Hunk) -> int:
    return nearest(lines, hunk.before, hunk.old_start - 1)


def first_unfit(diff: FileDiff, text: str | None) -> int:
    """Return the 1-based number of the first hunk whose expected lines occur nowhere, 1 when all occur."""
    lines = (text or "").split("\n")
    for number, hunk in enumerate(diff.hunks, start=1):
        if not positions(lines, hunk.before):
            return number
    return 1
