"""Putting a work tree back after an apply or revert that did not finish, without losing what somebody did since."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import git, git_locks, journal
from q4kit.series.blobs import blob_id
from q4kit.series.manifest import Series
from q4kit.series.targets import WorkTree, drop_bytecode
from q4kit.series.wheel import Progress

SAVED = "q4head-saved"
"""Folder in the git folder of a work tree for contents that are not the series'."""


def restore(
    target: WorkTree, series: Series, marker: Mapping[str, Any], fd: int, progress: Progress
) -> tuple[str, ...]:
    """Bring HEAD, index and the touched files back to the commit in ``marker``; return where other contents were put.

    What is refused is refused before anything is removed: commits, a `git am` or merge that are not the series', a file
    in a folder's place or the reverse (UsageError), and a git that works there now (EnvironmentFault). ``fd`` is the
    lock, which every git child that writes inherits.
    """
    root, folder, path = target.root, journal.git_dir(target), journal.marker_path(target)
    head, touched = marker["head"], marker["files"]
    applying = _our_am(root, folder, series)
    _check_head(target, series, marker)
    _check_places(target, touched)
    git_locks.remove_stale(root, folder, path.stat().st_mtime)
    saved = _save_others(target, series, head, touched, folder / SAVED)
    for place in saved:
        progress(f"contents that are not the series' (edited, or half written) are kept in {place}")
    if applying is not None and git.run(["am", "--quit"], root, check=False, pass_fds=[fd]).returncode != 0:
        shutil.rmtree(applying)
    git.run(["update-ref", "-m", "q4head series: restore", "HEAD", head], root, pass_fds=[fd])
    git.run(["reset", "-q", head, "--", *touched], root, pass_fds=[fd])
    kept = set(git.entries(root, head, list(touched)))
    for name in touched:
        _drop(target.file(name), kept=name in kept)
    if kept:
        git.run(["checkout-index", "-q", "-f", "--", *sorted(kept)], root, pass_fds=[fd])
    path.unlink()
    return saved


def patch_at(target: WorkTree, series: Series, commit: str) -> int | None:
    """Return which patch ``commit`` is, on one parent: its files, with the recorded contents. None: no patch."""
    parents = git.out(["rev-list", "--no-walk", "--parents", commit], target.root).split()[1:]
    if len(parents) != 1:
        return None
    changed = _changed(target.root, parents[0], commit)
    blobs = {p: oid for p, (_, oid) in git.entries(target.root, commit, series.touched).items()}
    for entry, patch in zip(series.entries, series.patches, strict=True):
        recorded = {p: e.blob for p, e in series.prefixes[entry.number].items()}
        if blobs == recorded and changed == {f.path for f in patch.files}:
            return entry.number
    return None


def _our_am(root: Path, folder: Path, series: Series) -> Path | None:
    """Return the folder of a `git am` of ours that was killed, or None; anything of somebody else's raises UsageError.

    ``folder`` is the git folder of this very work tree.
    """
    applying = folder / journal.APPLYING
    for name in journal.unfinished(folder):
        if name != applying.name:
            raise _in_the_middle(root, name, "finish or abort it first, then run this again")
    if not applying.exists():
        return None
    ours = [series.patch_bytes(entry) for entry in series.entries]
    mails = [file.read_bytes() for file in applying.iterdir() if file.name.isdecimal()]
    if (applying / "rebasing").exists() or not all(any(p.startswith(mail) for p in ours) for mail in mails):
        abort = f"finish or abort it first (`{_command(root, 'am', '--abort')}`), then run this again"
        raise _in_the_middle(root, applying.name, abort)
    return applying


def _in_the_middle(root: Path, name: str, remedy: str) -> UsageError:
    said = f"{root}: git is in the middle of something else ({name}), after an apply or revert that was interrupted"
    return UsageError(said, remedy=remedy)


def _check_head(target: WorkTree, series: Series, marker: Mapping[str, Any]) -> None:
    """Raise UsageError unless HEAD can go to the marker's and only commits of the series, or none, lie between."""
    root, head, op = target.root, marker["head"], marker["op"]
    now = git.out(["rev-parse", "HEAD"], root)
    # Below: an interrupted revert, of whatever version of the series. Other files would stay as they are at `now`.
    if _is_ancestor(root, now, head) and _changed(root, now, head) <= set(marker["files"]):
        return
    if not _is_ancestor(root, head, now):
        raise UsageError(
            f"{root}: HEAD moved to {now[:12]} after an interrupted {op} that began at {head[:12]}",
            remedy="check out the branch that it began on, then run this again; or, to keep what is checked out now, "
            f"remove {journal.marker_path(target)}",
        )
    last = head
    for commit in git.out(["rev-list", "--reverse", f"{head}..{now}"], root).split():
        if patch_at(target, series, commit) is None:
            subject = git.out(["log", "-1", "--format=%h %s", commit], root)
            keep, back = _command(root, "branch", "my-work"), _command(root, "reset", "--keep", last)
            raise UsageError(
                f"{root}: commit `{subject}` came on top of an interrupted {op} and would be lost",
                remedy=f"`{keep} && {back}` keeps it on a branch of its own; then run this again",
            )
        last = commit


def _check_places(target: WorkTree, touched: Sequence[str]) -> None:
    """Raise UsageError where a folder took the place of a touched file, or something else that of a folder above it."""
    for name in touched:
        file = target.file(name)
        above = [target.file(str(folder)) for folder in PurePosixPath(name).parents]
        wrong = [folder for folder in above if os.path.lexists(folder) and not folder.is_dir()]
        if file.is_dir() and not file.is_symlink():
            wrong.append(file)
        if wrong:
            expected = "a file" if wrong[0] == file else "a folder"
            raise UsageError(
                f"{wrong[0]}: the series has {expected} there, and mending would remove what is there now",
                remedy="move it out of the way, then run this again",
            )


def _changed(root: Path, first: str, second: str) -> set[str]:
    listing = git.run(["diff-tree", "-r", "-z", "--name-only", first, second], root).stdout
    return set(filter(None, listing.decode(errors="surrogateescape").split("\0")))


def _is_ancestor(root: Path, first: str, second: str) -> bool:
    return git.run(["merge-base", "--is-ancestor", first, second], root, check=False).returncode == 0


def _save_others(target: WorkTree, series: Series, head: str, touched: Sequence[str], where: Path) -> tuple[str, ...]:
    """Copy what lies on disk or in the index of the touched files and is no recorded content; return the copies."""
    known = {entry.blob for files in series.prefixes for entry in files.values()}
    known |= {oid for rev in (head, "HEAD") for _, oid in git.entries(target.root, rev, touched).values()}
    others: dict[str, bytes] = {}
    on_disk: dict[str, str] = {}
    for name in touched:
        file = target.file(name)
        if not os.path.lexists(file):
            continue
        data = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
        if blob_id(data) in known:
            continue
        # As git would store it: filters and line ends of this repository are no edit.
        cleaned = git.run(["hash-object", "--path", name, "--stdin"], target.root, stdin=data)
        on_disk[name] = cleaned.stdout.decode().strip()
        if on_disk[name] not in known:
            others[name] = data
    for row in filter(None, git.run(["ls-files", "-s", "-z", "--", *touched], target.root).stdout.split(b"\0")):
        meta, _, name = row.decode().partition("\t")
        _, oid, stage = meta.split()
        if oid not in known and oid != on_disk.get(name):
            others[f"{name}.staged{stage}"] = git.run(["cat-file", "blob", oid], target.root).stdout
    # To the nanosecond: one process may come here twice in a second, before its move and after it.
    folder = where / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{time.time_ns() % 10**9:09d}"
    try:
        for name, data in others.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    except OSError as error:
        raise EnvironmentFault(
            f"{target.root}: {', '.join(others)} cannot be kept in {where}: {error}; nothing was changed",
            remedy="make room there (or copy these files yourself and restore them), then run this again",
        ) from None
    return tuple(str(folder / name) for name in others)


def _drop(file: Path, *, kept: bool) -> None:
    """Remove a file's compiled forms, and where the file does not stay, the file and folders that only it filled."""
    drop_bytecode(file)
    if kept:
        return
    file.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or of other files too
        (file.parent / "__pycache__").rmdir()
    with suppress(OSError):  # not empty, or already gone
        os.removedirs(file.parent)


def _command(root: Path, *args: str) -> str:
    return shlex.join(["git", "-C", str(root), *args])
