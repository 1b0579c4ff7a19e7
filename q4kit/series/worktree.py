"""Applying the series to a git work tree with ``git am``: all or nothing, and the same commit ids for everybody."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import git, git_locks, journal, manifest, state
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
        mended = _mend(target, fd, progress)
        found = state.status(target, series=series)
        if found.state not in ("clean", "applied"):
            raise _refusal(target, series, found)
        if found.prefix == to:
            return Change(target.describe(), to, to, mended)
        if state.dirty_files(target, series.touched):
            raise _refusal(target, series, found)
        if git.run(["diff", "--cached", "--quiet"], target.root, check=False).returncode != 0:
            raise UsageError(f"{target.root}: the index holds staged changes", remedy="commit or `git reset` them")
        if to < found.prefix:
            rev = _below(target, series, found.prefix, to)
        head = git.out(["rev-parse", "HEAD"], target.root)
        note = {"op": op, "head": head, "files": series.touched}
        journal.write_json(journal.marker_path(target), note)
        try:
            if to < found.prefix:
                git.run(["reset", "-q", "--keep", rev], target.root, pass_fds=[fd])
            else:
                _am(target, series, found.prefix, to, fd, progress)
        except BaseException:
            _restore(target, head, series.touched, fd)
            raise
        for path in series.touched:
            drop_bytecode(target.file(path))
        journal.marker_path(target).unlink()
        return Change(target.describe(), found.prefix, to, mended)


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
            raise EnvironmentFault(f"{target.root}: git am {entry.file} failed, nothing was changed: {said}")
        now = {p: e.blob for p, e in read_entries(target, series.touched).items()}
        expected = {p: e.blob for p, e in series.prefixes[entry.number].items()}
        if now != expected:
            wrong = sorted(p for p in now.keys() | expected.keys() if now.get(p) != expected.get(p))
            raise EnvironmentFault(
                f"{entry.file} left other contents than recorded in {', '.join(wrong)}; nothing was changed",
                remedy="a filter or line-end conversion of this repository may be active: check .gitattributes",
            )


def _below(target: WorkTree, series: Series, prefix: int, to: int) -> str:
    """Return the commit id of prefix ``to`` below HEAD after checking that only the series' commits lie between."""
    for k in range(prefix, to, -1):
        commit = f"HEAD~{prefix - k}"
        entry, patch = series.entries[k - 1], series.patches[k - 1]
        parents = git.out(["rev-list", "--no-walk", "--parents", commit], target.root).split()[1:]
        changed = _changed_files(target, commit) if len(parents) == 1 else []
        blobs = {p: oid for p, (_, oid) in git.entries(target.root, commit, series.touched).items()}
        expected = {p: e.blob for p, e in series.prefixes[k].items()}
        if sorted(changed) != sorted(f.path for f in patch.files) or blobs != expected:
            subject = git.out(["log", "-1", "--format=%h %s", commit], target.root)
            raise UsageError(
                f"{target.root}: commit `{subject}` is not patch {entry.file} and would be lost",
                remedy="move your own commits to a branch of their own, or fetch a fresh tree",
            )
    return git.out(["rev-parse", f"HEAD~{prefix - to}"], target.root)


def _changed_files(target: WorkTree, commit: str) -> list[str]:
    listing = git.run(["diff-tree", "-r", "-z", "--no-commit-id", "--name-only", commit], target.root)
    return [p for p in listing.stdout.decode().split("\0") if p]


def _mend(target: WorkTree, fd: int, progress: Progress) -> bool:
    marker = journal.read_marker(target)
    if marker is None:
        return False
    progress(f"mending an interrupted {marker['op']}: back to {marker['head'][:12]}")
    _restore(target, marker["head"], marker["files"], fd)
    return True


def _restore(target: WorkTree, head: str, touched: Sequence[str], fd: int) -> None:
    """Bring HEAD, index and the touched files back to ``head``. They were clean there, so nothing is lost."""
    root, folder, marker = target.root, journal.git_dir(target), journal.marker_path(target)
    # We hold the lock ``fd`` that every git child which writes inherits: lock files here have no living owner.
    git_locks.remove_stale(root, folder, marker.stat().st_mtime)
    applying = folder / "rebase-apply"
    if applying.exists() and git.run(["am", "--quit"], root, check=False, pass_fds=[fd]).returncode != 0:
        shutil.rmtree(applying)
    now = git.out(["rev-parse", "HEAD"], root)
    related = any(
        git.run(["merge-base", "--is-ancestor", a, b], root, check=False).returncode == 0
        for a, b in ((head, now), (now, head))
    )
    if not related:
        raise UsageError(
            f"{root}: HEAD moved to {now[:12]} after an interrupted apply that began at {head[:12]}",
            remedy=f"check out what you want to keep, then remove {marker}",
        )
    git.run(["update-ref", "-m", "q4head series: restore", "HEAD", head], root, pass_fds=[fd])
    git.run(["reset", "-q", head, "--", *touched], root, pass_fds=[fd])
    kept = set(git.entries(root, head, list(touched)))
    for path in touched:
        file = target.file(path)
        drop_bytecode(file)
        if path not in kept:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or already gone
                os.removedirs(file.parent)
    if kept:
        git.run(["checkout-index", "-q", "-f", "--", *sorted(kept)], root, pass_fds=[fd])
    marker.unlink()


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
