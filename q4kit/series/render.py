"""The text that tools/series.py prints. Pure: results in, lines out."""

from __future__ import annotations

from q4kit.series.export import Exported
from q4kit.series.journal import series_id
from q4kit.series.manifest import Series
from q4kit.series.prefix_tests import Outcome
from q4kit.series.radar import Radar
from q4kit.series.state import SeriesStatus
from q4kit.series.verify import Check, PrefixReport, Report
from q4kit.series.worktree import Change


def change(result: Change, verb: str) -> str:
    """Return one line on an apply or revert."""
    mended = " (after mending an interrupted operation)" if result.mended else ""
    if not result.changed:
        word = "already" if verb == "apply" else "already the pin:"
        return f"{result.target}: {word} {'at prefix ' if verb == 'apply' else 'prefix '}{result.after}, nothing to do"
    kept = [f"  kept, since it is not the series': {place}" for place in result.saved]
    return "\n".join([f"{result.target}: prefix {result.before} -> {result.after}{mended}", *kept])


def state(found: SeriesStatus) -> str:
    """Return the state: a headline, then what supports it."""
    lines = [found.headline()]
    lines += [f"  {p.line()}" for p in found.patches]
    bad = next((p.misfit for p in found.patches if p.misfit), None)
    if bad and bad.nearest:
        lines.append(f"  nearest lines in {bad.path} at {bad.line} (- expected, + found):")
        lines += [f"    {line}" for line in bad.nearest]
    lines += [f"  {line}" for line in found.interrupted]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines)


def exported(result: Exported) -> str:
    """Return what an export wrote, with the range-diff of a refresh."""
    lines = [f"patches: {len(result.before)} before, {len(result.after)} after"]
    lines += [f"  written {name}" for name in result.written]
    lines += [f"  removed {name}" for name in result.removed]
    if not result.written and not result.removed:
        lines.append("  no patch file changed")
    lines += [f"  warning: {w}" for w in result.warnings]
    if result.range_diff:
        lines += ["range-diff, recorded series against the work tree:", result.range_diff]
    return "\n".join(lines)


def check(result: Check) -> str:
    """Return one line for a check that holds, and one more for each problem."""
    head = f"{'ok ' if result.ok else 'RED'} {result.name}: {result.looked_at}"
    return "\n".join([head, *(f"      {p}" for p in result.problems)])


def prefix(result: PrefixReport, length: int) -> str:
    """Return one block for a prefix: green or red in its first line."""
    ran = [t for t in result.tests if t.outcome in ("passed", "failed")]
    red = sum(t.expected == "red" and not t.problem for t in ran)
    passed = sum(t.expected == "pass" and not t.problem for t in ran)
    head = (
        f"prefix {result.prefix} of {length}: {'green' if result.ok else 'RED'} ({result.seconds:.0f} s; commit "
        f"{result.commit[:12]}; {passed} tests pass, {red} red as declared)"
    )
    lines = [head, *(f"  {check(c)}" for c in result.checks)]
    lines += [f"  RED {outcome(t)}" for t in result.tests if t.problem]
    return "\n".join(lines)


def outcome(result: Outcome) -> str:
    """Return one test in one or two lines."""
    word = result.problem or f"{result.outcome}, as declared"
    return f"{result.nodeid}: {word}" + (f"\n        {result.detail}" if result.detail else "")


def verified(result: Report) -> str:
    """Return the closing lines of a verify; the prefixes were printed as they came."""
    lines = [check(c) for c in result.series]
    good = sum(p.ok for p in result.prefixes)
    if result.prefixes:
        lines.append(f"{good} of {len(result.prefixes)} prefixes green")
    lines.append(f"series of {result.length} patches: {'HOLDS' if result.ok else 'DOES NOT HOLD'}")
    return "\n".join(lines)


def radar(results: list[Radar]) -> str:
    """Return one line a patch and version."""
    lines: list[str] = []
    for r in results:
        lines.append(f"{r.version} ({r.same_files} of {r.files} touched files as in the pin)")
        for verdict, follows in zip(r.patches, r.follows, strict=True):
            after = f" (may follow from {', '.join(follows)})" if follows else ""
            lines.append(f"  {verdict.line()}{after}")
    return "\n".join(lines)


def radar_document(results: list[Radar], series: Series, when: str, command: str) -> str:
    """Return docs/RADAR.md: how the series fits other releases, a row a patch and a column a version."""
    lines = [
        "# Radar: the series on other releases",
        "",
        f"Made on {when} by `{command} > docs/RADAR.md`; do not edit.",
        f"Pin: {series.base.package} {series.base.version}. Series: {series.length} patches, "
        f"{len(series.touched)} touched files, id `{series_id(series)[:12]}`.",
        "",
        "| Version | Touched files as in the pin | Wheel | sha256 |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {r.version} | {r.same_files} of {r.files} | `{r.wheel}` | `{r.sha256}` |" for r in results]
    lines += [
        "",
        "clean: fits where it was made. offset n: fits n lines away at most. absorbed: contained already, it can be",
        "taken back. conflict: the first hunk that does not fit; later patches are then tried without it, and those",
        "that share a file with it may conflict only because of that.",
        "",
        "| Patch | " + " | ".join(r.version for r in results) + " |",
        "| --- |" + " --- |" * len(results),
    ]
    for i, verdict in enumerate(results[0].patches):
        lines.append(f"| `{verdict.file}` | " + " | ".join(_cell(r, i) for r in results) + " |")
    return "\n".join(lines)


def _cell(result: Radar, i: int) -> str:
    verdict, follows = result.patches[i], result.follows[i]
    misfit = verdict.misfit
    if misfit is None:
        return verdict.line().split(": ", 1)[1]
    after = f" (may follow from {', '.join(follows)})" if follows else ""
    return f"conflict `{misfit.path}` hunk {misfit.hunk} of {misfit.hunks}{after}"
