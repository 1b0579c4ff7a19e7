"""The state of a target: exactly one of clean, applied(k), absorbed(list), drifted(first bad patch)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from q4kit.errors import UsageError
from q4kit.series import analysis, git, journal, manifest
from q4kit.series.analysis import PatchVerdict
from q4kit.series.blobs import Entry, tree_id
from q4kit.series.manifest import Series
from q4kit.series.targets import InstalledTarget, Target, WorkTree, read_entries, work_tree

State = Literal["clean", "applied", "absorbed", "drifted"]

EXIT_CODES: dict[State, int] = {"clean": 10, "applied": 11, "absorbed": 12, "drifted": 13}
"""Exit code of ``tools/series.py status``; none of them is in the table that all tools share."""

NO_PREFIX = -1


@dataclass(frozen=True)
class SeriesStatus:
    """What a target contains of the series."""

    state: State
    prefix: int
    """Number of patches applied, exactly as recorded; -1 when the files are no recorded prefix."""
    length: int
    target: str
    tree: str
    """Git tree id of the touched files as found."""
    reason: str = ""
    """Why it drifted; empty otherwise."""
    patches: tuple[PatchVerdict, ...] = ()
    """One verdict a patch, filled when the files are no recorded prefix."""
    interrupted: tuple[str, ...] = ()
    """Files of an interrupted apply or revert, each with the side it is on."""
    notes: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    @property
    def absorbed(self) -> list[str]:
        """The patches that are contained without the files being a recorded prefix."""
        return analysis.contained_files(self.patches)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON types."""
        return asdict(self) | {"exit_code": self.exit_code, "absorbed": self.absorbed}

    def headline(self) -> str:
        """Return the state in one line."""
        if self.state == "clean":
            return f"clean: {self.target} is the pin, 0 of {self.length} patches"
        if self.state == "applied":
            return f"applied({self.prefix}): {self.target} has {self.prefix} of {self.length} patches"
        if self.state == "absorbed":
            return f"absorbed({len(self.absorbed)}): {self.target} contains {', '.join(self.absorbed)}"
        return f"drifted: {self.target}: {self.reason}"


def status(target: Target | Path | str, *, series: Series | None = None) -> SeriesStatus:
    """Return the state of a work tree (a path) or an installed package."""
    series = series or manifest.load()
    if isinstance(target, (Path, str)):
        target = work_tree(target, series.base.package)
    # Asked before and after: what is read while an operation runs is neither side, and it may begin or end meanwhile.
    interrupted = journal.interrupted(target)
    found = read_entries(target, series.touched)
    interrupted = interrupted or journal.interrupted(target)
    prefix = match_prefix(series, found)
    common: dict[str, Any] = {
        "length": series.length,
        "target": target.describe(),
        "tree": tree_id(found),
    }
    if interrupted is not None:
        return SeriesStatus("drifted", NO_PREFIX, reason=interrupted.reason, interrupted=interrupted.files, **common)
    other_version = isinstance(target, InstalledTarget) and target.version != series.base.version
    contradiction = _contradiction(target, series)
    if prefix is not None and not other_version and not contradiction:
        notes = _notes(target, series, prefix)
        return SeriesStatus("applied" if prefix else "clean", prefix, notes=notes, **common)
    contents = {path: target.file(path).read_bytes() for path in found}
    verdicts = tuple(analysis.analyse(series, contents))
    bad = analysis.first_bad(verdicts)
    reason = contradiction
    if not reason and bad is not None:
        reason = f"first patch that neither fits nor is contained: {bad.line()}"
    elif not reason and not analysis.contained_files(verdicts):
        reason = _difference(target, series, found)
    if reason:
        return SeriesStatus("drifted", NO_PREFIX, reason=reason, patches=verdicts, **common)
    return SeriesStatus("absorbed", NO_PREFIX, patches=verdicts, **common)


def match_prefix(series: Series, found: dict[str, Entry]) -> int | None:
    """Return the prefix whose touched files have exactly these contents, or None.

    Modes are left out: installers and file systems set them differently, and git keeps them in the recorded trees.
    """
    blobs = {path: entry.blob for path, entry in found.items()}
    for k, files in enumerate(series.prefixes):
        if blobs == {path: entry.blob for path, entry in files.items()}:
            return k
    return None


def _difference(target: Target, series: Series, found: dict[str, Entry]) -> str:
    """Say how files that every patch fits still differ from the pin."""
    if isinstance(target, InstalledTarget) and target.version != series.base.version:
        return f"version {target.version}, expected {series.base.version} (every patch fits)"
    for path, expected in series.base.files.items():
        entry = found.get(path)
        if (entry and entry.blob) != (expected and expected.blob):
            blob = entry.blob if entry else "absent"
            return f"{path}: blob {blob}, expected {expected.blob if expected else 'absent'} (every patch fits)"
    raise UsageError("no touched file differs from the pin, yet it matches no prefix")  # pragma: no cover


def _contradiction(target: Target, series: Series) -> str:
    """Say what the saved state of an installed package contradicts, or return an empty string.

    Content alone cannot tell: a patch that has left the series since may still be applied, in files that the series no
    longer touches.
    """
    record = journal.read_state(target) if isinstance(target, InstalledTarget) else None
    if record is None or not isinstance(target, InstalledTarget):
        return ""
    blobs = {f.path: journal.blob_at(target, f.path) for f in record.files}
    if all(blobs[f.path] == f.pin for f in record.files):
        return ""  # reinstalled since
    changed = [f.path for f in record.files if blobs[f.path] != f.blob]
    if changed:
        return f"changed since the series was applied: {', '.join(changed)}"
    ours = journal.series_id(series)
    if record.series != ours:
        return (
            f"{record.prefix} patches of another version of the series are applied ({record.series[:12]}, this one is "
            f"{ours[:12]}): `apply` brings it up to date"
        )
    return ""


def _notes(target: Target, series: Series, prefix: int) -> tuple[str, ...]:
    if isinstance(target, InstalledTarget):
        if prefix == 0 and target.state_dir.exists():
            return (f"{target.state_dir} is left from an earlier apply; `revert` removes it",)
        if prefix and not target.state_dir.exists():
            return ("patched without this tool: no saved pre-images, so `revert` cannot restore it",)
        return ()
    dirty = dirty_files(target, series.touched)
    return (f"not committed: {', '.join(dirty)}",) if dirty else ()


def dirty_files(target: WorkTree, paths: list[str]) -> list[str]:
    """Return those ``paths`` that differ between the index or the disk and HEAD."""
    if not paths:
        return []
    listing = git.run(
        [
            "status",
            "--porcelain",
            "-z",
            "--no-renames",
            "--untracked-files=all",
            "--ignored=no",
            "--",
            *paths,
        ],
        target.root,
    )
    return sorted(row[3:] for row in listing.stdout.decode().split("\0") if row)
