"""The text that tools/series.py prints. Pure: results in, lines out."""

from __future__ import annotations

from q4kit.series.export import Exported
from q4kit.series.state import SeriesStatus
from q4kit.series.worktree import Change


def change(result: Change, verb: str) -> str:
    """Return one line on an apply or revert."""
    mended = " (after mending an interrupted operation)" if result.mended else ""
    if not result.changed:
        word = "already" if verb == "apply" else "already the pin:"
        return f"{result.target}: {word} {'at prefix ' if verb == 'apply' else 'prefix '}{result.after}, nothing to do"
    return f"{result.target}: prefix {result.before} -> {result.after}{mended}"


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
