"""Applying the series to a git work tree with ``git am``: all or nothing, and the same commit ids for everybody."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import git, journal, manifest, mend, state
from q4kit.series.base import wrong_base
from q4kit.series.manifest import Series
from q4kit.series.state import SeriesStatus
from q4kit.series.targets import WorkTree, drop_bytecode, read_entries, work_tree
from q4kit.series.wheel import Progress, silent


@dataclass(frozen=True)
class Change:
    """The outcome of an apply or revert: patches before and after, and whether anything had to be mended first."""

    target: str
    before: int
    after: int
    mended: bool = False
    saved: tuple[str, ...] = ()
    """Copies of contents that the mending found in touched files and that are not the series'."""

    @property
    def changed(self) -> bool:
        return self.before != self.after or self.mended


def apply(
    path: Path | str, *, series: Series | None = None, to: int | None = None, progress: Progress = silent
) -> Change:
    """Bring a work tree to prefix ``to`` (default: all). Raises before any change when it is on another base or dirty.

    A failure, or being killed, leaves either what was there before or a state that `status` names and the next
    apply or revert mends.
    """
    series = series or manifest.load()
    to = series.check_prefix(to)
    return _move(work_tree(path, series.base.package), series, to, "apply", progress)


def revert(path: Path | str, *, series: Series | None = None, progress: Progress = silent) -> Change:
    """Take the series' commits off a work tree again; raises when other commits or edits would be lost."""
    series = series or manifest.load()
    return _move(work_tree(path, series.base.package), series, 0, "revert", progress)


def _move(target: WorkTree, series: Series, to: int, op: str, progress: Progress) -> Change:
    series.patches  # noqa: B018  a damaged patch file is refused before anything else
    with journal.lock(target) as fd:
        mended, saved = _mend(target, series, fd, progress)
        found = state.status(target, series=series)
        if found.state not in ("clean", "applied"):
            raise _refusal(target, series, found)
        if found.prefix == to:
            return Change(target.describe(), to, to, mended, saved)
        if state.dirty_files(target, series.touched):
            raise _refusal(target, series, found)
        if git.run(["diff", "--cached", "--quiet"], target.root, check=False).returncode != 0:
            raise UsageError(f"{target.root}: the index holds staged changes", remedy="commit or `git reset` them")
        if to < found.prefix:
            rev = _below(target, series, found.prefix, to)
        _refuse_locked_index(target)
        head = git.out(["rev-parse", "HEAD"], target.root)
        note = {"op": op, "head": head, "files": series.touched}
        journal.write_json(journal.marker_path(target), note)
        try:
            if to < found.prefix:
                # `reset --keep` takes a file that was only touched, or copied, for one that was changed
                git.run(["update-index", "-q", "--refresh"], target.root, check=False, pass_fds=[fd])
                git.run(["reset", "-q", "--keep", rev], target.root, pass_fds=[fd])
            else:
                _am(target, series, found.prefix, to, fd, progress)
        except BaseException as error:
            others = mend.restore(target, series, note, fd, progress)
            if others and isinstance(error, EnvironmentFault):
                told = f"{error}; what was edited meanwhile is kept: {', '.join(others)}"
                raise EnvironmentFault(told, remedy=error.remedy) from error
            raise
        for path in series.touched:
            drop_bytecode(target.file(path))
        journal.marker_path(target).unlink()
        return Change(target.describe(), found.prefix, to, mended, saved)


def _refuse_locked_index(target: WorkTree) -> None:
    """Raise EnvironmentFault while another git, such as a commit whose message is being written, holds the index."""
    lock = journal.git_dir(target) / "index.lock"
    if lock.exists():
        raise EnvironmentFault(
            f"{target.root}: the index is locked ({lock})",
            remedy="let the other git end; if there is none, remove that file",
        )


def _am(target: WorkTree, series: Series, start: int, to: int, fd: int, progress: Progress) -> None:
    options = ["--quiet", "--committer-date-is-author-date", "--no-3way", "--no-gpg-sign", "--no-scissors"]
    for entry in series.entries[start:to]:
        progress(f"git am {entry.file}")
        done = git.run(
            ["am", *options, "--whitespace=nowarn", series.path(entry)],
            target.root,
            check=False,
            pass_fds=[fd],
        )
        if done.returncode != 0:
            said = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise EnvironmentFault(f"{target.root}: git am {entry.file} failed, the tree is as it was: {said}")
        now = {p: e.blob for p, e in read_entries(target, series.touched).items()}
        expected = {p: e.blob for p, e in series.prefixes[entry.number].items()}
        if now != expected:
            wrong = sorted(p for p in now.keys() | expected.keys() if now.get(p) != expected.get(p))
            raise EnvironmentFault(
                f"{entry.file} left other contents than recorded in {', '.join(wrong)}; the tree is as it was",
                remedy="a filter or line-end conversion of this repository may be active: check .gitattributes",
            )


def _below(target: WorkTree, series: Series, prefix: int, to: int) -> str:
    """Return the commit id of prefix ``to`` below HEAD after checking that only the series' commits lie between."""
    for k in range(prefix, to, -1):
        commit, entry = f"HEAD~{prefix - k}", series.entries[k - 1]
        if mend.patch_at(target, series, commit) != k:
            subject = git.out(["log", "-1", "--format=%h %s", commit], target.root)
            raise UsageError(
                f"{target.root}: commit `{subject}` is not patch {entry.file} and would be lost",
                remedy="move your own commits to a branch of their own, or fetch a fresh tree",
            )
    return git.out(["rev-parse", f"HEAD~{prefix - to}"], target.root)


def _mend(target: WorkTree, series: Series, fd: int, progress: Progress) -> tuple[bool, tuple[str, ...]]:
    """Put an interrupted apply or revert right; return whether there was one, and where other contents were put."""
    marker = journal.read_marker(target)
    if marker is None:
        return False, ()
    progress(f"mending an interrupted {marker['op']}: back to {marker['head'][:12]}")
    return True, mend.restore(target, series, marker, fd, progress)


def _stash(target: WorkTree, paths: Sequence[str]) -> str:
    """Return the command that puts aside local changes in ``paths``, untracked files included, and nothing else."""
    return shlex.join(["git", "-C", str(target.root), "stash", "push", "--include-untracked", "--", *paths])


def _refusal(target: WorkTree, series: Series, found: SeriesStatus) -> UsageError:
    # First, because an edit on top of applied patches looks like another base that contains them.
    dirty = [] if found.interrupted else state.dirty_files(target, series.touched)
    if dirty:
        return UsageError(
            f"{target.root}: local changes in files of the series: {', '.join(dirty)}",
            remedy=f"put them aside with `{_stash(target, dirty)}`; a commit of them is refused too",
        )
    if found.state == "absorbed":
        return UsageError(
            f"{target.root}: another base that contains {', '.join(found.absorbed)}",
            remedy=f"use a tree at {series.base.tag} (tools/series.py fetch)",
        )
    here = {p: (e.mode, e.blob) for p, e in read_entries(target, series.touched).items()}
    mismatch = "" if found.interrupted or not found.patches else wrong_base(series.base, here)
    return UsageError(
        f"{target.root}: {mismatch or found.reason}",
        remedy=f"use a tree at {series.base.tag} (tools/series.py fetch); `status` says more",
    )
