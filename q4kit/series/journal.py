"""What an apply or revert writes down so that it can be killed at any moment: records, journal, lock."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from q4kit.errors import EnvironmentFault
from q4kit.series import git
from q4kit.series.manifest import Series
from q4kit.series.targets import InstalledTarget, Target, WorkTree, read_entry

SCHEMA = 1
_MARKER = "q4head-series.json"
_LOCK_TIMEOUT_S = 120.0
APPLYING = "rebase-apply"
"""Folder in the git folder of a work tree in which `git am` keeps what it has not done yet."""


@dataclass(frozen=True)
class FileRecord:
    """One touched file of an installed package: ``pin`` and ``blob`` are None where the file does not exist."""

    path: str
    pin: str | None
    blob: str | None

    @property
    def saved_name(self) -> str:
        """Name of the saved pre-image in the state folder."""
        return hashlib.sha256(self.path.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Record:
    """What is, or is about to be, applied to an installed package; all that a later revert needs."""

    package: str
    version: str
    series: str
    prefix: int
    files: tuple[FileRecord, ...]
    created_dirs: tuple[str, ...]
    """Folders the series adds, as paths of the series, outermost first."""


@dataclass(frozen=True)
class Journal:
    """An operation in progress: written before its first change, removed after its last."""

    op: str
    record: Record
    """For an apply the record to be, for a revert the one being undone."""
    before: Mapping[str, str | None]
    """Blob id of each file when the operation began."""


@dataclass(frozen=True)
class Interrupted:
    reason: str
    files: tuple[str, ...]


def series_id(series: Series) -> str:
    """Return the id of the series' content: a hash over the hashes of its patches and the pre-images."""
    text = [e.sha256 for e in series.entries] + [f"{p} {e.blob if e else '-'}" for p, e in series.base.files.items()]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


# --- installed package -----------------------------------------------------------------------------------------


def blob_at(target: InstalledTarget, path: str) -> str | None:
    """Return the blob id of a file as it is now, None when it does not exist."""
    entry = read_entry(target.file(path))
    return entry.blob if entry else None


def state_path(target: InstalledTarget) -> Path:
    return target.state_dir / "state.json"


def journal_path(target: InstalledTarget) -> Path:
    return target.state_dir / "journal.json"


def read_state(target: InstalledTarget) -> Record | None:
    """Return the record of a finished apply, or None."""
    data = _read_json(state_path(target))
    return None if data is None else _record(data, state_path(target))


def read_journal(target: InstalledTarget) -> Journal | None:
    """Return the journal of an operation that did not finish, or None."""
    path = journal_path(target)
    data = _read_json(path)
    if data is None:
        return None
    try:
        return Journal(data["op"], _record(data["record"], path), data["before"])
    except (KeyError, TypeError) as exc:
        raise _unreadable(path, exc) from None


def write_json(path: Path, value: Record | Journal | Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader, or a machine that lost power, sees the old or the new one entirely."""
    plain = value if isinstance(value, Mapping) else asdict(value)
    tmp = path.with_suffix(".tmp")
    with tmp.open("w", encoding="utf-8") as f:
        json.dump({"schema": SCHEMA, **plain}, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Make renames and removals inside a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _record(data: Mapping[str, Any], path: Path) -> Record:
    try:
        return Record(
            data["package"],
            data["version"],
            data["series"],
            data["prefix"],
            tuple(FileRecord(f["path"], f["pin"], f["blob"]) for f in data["files"]),
            tuple(data["created_dirs"]),
        )
    except (KeyError, TypeError) as exc:
        raise _unreadable(path, exc) from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as exc:
        raise _unreadable(path, exc) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _unreadable(path, ValueError(f"schema is not {SCHEMA}"))
    return data


def _unreadable(path: Path, exc: Exception) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path}: unreadable: {exc!r}",
        remedy="reinstall the package (`pip install --force-reinstall --no-deps`), then remove that folder",
    )


# --- work tree -------------------------------------------------------------------------------------------------


def git_dir(target: WorkTree) -> Path:
    """Return the git folder of this very work tree (not the one shared with others)."""
    return Path(git.out(["rev-parse", "--absolute-git-dir"], target.root))


def unfinished(folder: Path) -> list[str]:
    """Return what a git folder holds of an am, rebase or merge that waits for its user, ours included."""
    return [name for name in (APPLYING, "rebase-merge", "MERGE_HEAD") if (folder / name).exists()]


def marker_path(target: WorkTree) -> Path:
    return git_dir(target) / _MARKER


def read_marker(target: WorkTree) -> dict[str, Any] | None:
    """Return what an interrupted apply or revert of a work tree left behind: ``op`` and ``head``, or None."""
    return _read_json(marker_path(target))


# --- both ------------------------------------------------------------------------------------------------------


def interrupted(target: Target) -> Interrupted | None:
    """Return why the files cannot be judged by content alone, or None: an operation did not finish, or still runs."""
    if isinstance(target, InstalledTarget):
        journal = read_journal(target)
        if journal is None:
            return None
        sides = []
        for f in journal.record.files:
            blob = blob_at(target, f.path)
            new = f.blob if journal.op == "apply" else f.pin
            old = journal.before.get(f.path)
            if new != old:
                sides.append(f"{f.path}: {'written' if blob == new else 'not yet written' if blob == old else 'other'}")
        op = journal.op
        files = tuple(sides)
    else:
        marker = read_marker(target)
        if marker is None:
            busy = unfinished(git_dir(target))
            if not busy:
                return None
            return Interrupted(f"git is in the middle of something else ({busy[0]}): finish or abort it first", ())
        op = marker["op"]
        files = tuple(p for p in marker.get("files", []))
    if _busy(target):
        return Interrupted(f"{op} is running now in another process", files)
    return Interrupted(f"interrupted {op}: `apply` or `revert` mends it ({', '.join(files)})", files)


def _lock_folder(target: Target) -> Path:
    # a folder that exists already can be locked without writing anything
    return target.site / target.package if isinstance(target, InstalledTarget) else git_dir(target)


def _busy(target: Target) -> bool:
    fd = os.open(_lock_folder(target), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def lock(target: Target, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[int]:
    """Hold the target's lock; yields its descriptor, which children may inherit so that they hold it too.

    Waits for another apply; raises EnvironmentFault after ``timeout_s`` seconds.
    """
    fd = os.open(_lock_folder(target), os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise EnvironmentFault(
                        f"{target.describe()}: another apply or revert holds it for over {timeout_s:.0f} s",
                        remedy="wait for it or stop it; then run this again",
                    ) from None
                time.sleep(0.05)
        yield fd
    finally:
        os.close(fd)
