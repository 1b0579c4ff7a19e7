"""Applying the series to an installed package: exact content before and after, safe against being killed.

Order of an apply, each step durable before the next:

1. pre-images of all touched files are copied to the state folder beside the package;
2. all post-images are staged there, so a full disk is met before any file of the package changes;
3. the journal names what is about to change;
4. each staged file is renamed over its target (atomic: a file is always entirely old or entirely new);
5. the state is written, the journal removed.

Killed before 3, nothing has changed. Killed after 3, the journal is found: `status` says "interrupted", and `apply` or
`revert` finishes the job. A revert renames the saved pre-images back, so it needs no disk space.
pip's RECORD is left as it is: docs/SERIES.md, "Installed packages and pip", says what follows from that.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from q4kit.errors import EnvironmentFault, Q4Error, UsageError
from q4kit.series import analysis, journal, manifest, state
from q4kit.series.blobs import blob_id
from q4kit.series.journal import FileRecord, Journal, Record
from q4kit.series.manifest import Series
from q4kit.series.targets import InstalledTarget, drop_bytecode, read_entry
from q4kit.series.wheel import Progress, silent
from q4kit.series.worktree import Change


def apply(
    target: InstalledTarget,
    *,
    series: Series | None = None,
    to: int | None = None,
    progress: Progress = silent,
) -> Change:
    """Bring an installed package to prefix ``to`` (default: all patches), also from an interrupted apply or revert.

    Another version of the series is reverted first. Raises UsageError, before any change, for another version of the
    package or for touched files with any other content.
    """
    series = series or manifest.load()
    to = series.check_prefix(to)
    series.patches  # noqa: B018  a damaged patch file is refused before anything else
    _check_version(target, series)
    with journal.lock(target), _clear_errors(target):
        pending = journal.read_journal(target)
        known = pending.record if pending else journal.read_state(target)
        if known and known.series != journal.series_id(series):
            progress(f"another version of the series is applied ({known.prefix} patches): reverting it first")
            _revert(target, series, known.prefix, pending is not None, progress)
            pending = known = None
        before = -1 if pending else _prefix(target, series)
        if before == to and not pending:
            return Change(target.describe(), to, to)
        if to == 0:
            return _revert(target, series, before, pending is not None, progress)
        if before != 0 and known is None:
            raise UsageError(
                f"{target.describe()}: {before} patches were applied without this tool, no pre-images are saved",
                remedy=f"{_reinstall(target, series.base.version)}, then apply",
            )
        _apply(target, series, to, known, progress)
        return Change(target.describe(), max(before, 0), to, pending is not None)


def revert(target: InstalledTarget, *, series: Series | None = None, progress: Progress = silent) -> Change:
    """Bring an installed package byte-for-byte back to the pin, also from an interrupted apply or revert.

    Works from what the apply saved, so the patch files may have changed since. Raises UsageError, before any change,
    when a touched file was edited since: restoring it would lose the edit.
    """
    series = series or manifest.load()
    with journal.lock(target), _clear_errors(target):
        pending = journal.read_journal(target)
        known = pending.record if pending else journal.read_state(target)
        before = known.prefix if known else _prefix(target, series)
        return _revert(target, series, before, pending is not None, progress)


def _check_version(target: InstalledTarget, series: Series) -> None:
    if target.version != series.base.version:
        raise UsageError(
            f"{target.describe()}: version {target.version}, expected {series.base.version}",
            remedy=f"pip install {target.package}=={series.base.version}; `radar` tries the series on other versions",
        )


def _prefix(target: InstalledTarget, series: Series) -> int:
    """Return the prefix that is installed; raises UsageError when it is none."""
    found = state.status(target, series=series)
    if found.prefix < 0:
        detail = found.reason or f"already contains {', '.join(found.absorbed)} in another form"
        raise UsageError(
            f"{target.describe()}: {found.state}: {detail}",
            remedy=f"`revert` if this tool applied it, else {_reinstall(target, series.base.version)}",
        )
    return found.prefix


def _reinstall(target: InstalledTarget, version: str) -> str:
    return f"reinstall the pin: pip install --force-reinstall --no-deps {target.package}=={version}"


def _blob(path: Path) -> str | None:
    entry = read_entry(path)
    return entry.blob if entry else None


# --- apply -----------------------------------------------------------------------------------------------------


def _apply(target: InstalledTarget, series: Series, to: int, known: Record | None, progress: Progress) -> None:
    fresh = known is None
    try:
        record, staged = _prepare(target, series, to, known, progress)
        before = {f.path: _blob(target.file(f.path)) for f in record.files}
        journal.write_json(journal.journal_path(target), Journal("apply", record, before))
    except BaseException:
        # no file of the package has changed yet: leave nothing behind
        shutil.rmtree(target.state_dir if fresh else _staging(target), ignore_errors=True)
        raise
    try:
        _replace(target, record, staged, before)
        journal.write_json(journal.state_path(target), record)
    except OSError:
        if fresh:
            _restore(target, record)
        raise
    journal.journal_path(target).unlink()
    shutil.rmtree(_staging(target), ignore_errors=True)
    journal.fsync_dir(target.state_dir)


def _prepare(
    target: InstalledTarget, series: Series, to: int, known: Record | None, progress: Progress
) -> tuple[Record, dict[str, Path]]:
    """Save pre-images and stage post-images; returns the record to be and the staged file of each path."""
    pins = {p: (e.blob if e else None) for p, e in series.base.files.items()}
    wanted = series.prefixes[to]
    record = Record(
        target.package,
        target.version,
        journal.series_id(series),
        to,
        tuple(FileRecord(p, pins[p], wanted[p].blob if p in wanted else None) for p in series.touched),
        known.created_dirs if known else _missing_dirs(target, series),
    )
    _check_writable(target, record)
    (target.state_dir / "saved").mkdir(parents=True, exist_ok=True)
    progress(f"saving {sum(f.pin is not None for f in record.files)} pre-images")
    originals: dict[str, bytes] = {}
    for f in record.files:
        _check_known(target, series, f)
        if f.pin is not None:
            originals[f.path] = _save(target, f)
    journal.fsync_dir(target.state_dir / "saved")
    progress(f"applying {to} patches in a private repository")
    contents = build(series, to, originals)
    shutil.rmtree(_staging(target), ignore_errors=True)
    _staging(target).mkdir()
    staged = {
        f.path: _stage(target, series, f, contents[f.path], wanted[f.path].mode)
        for f in record.files
        if f.path in contents
    }
    journal.fsync_dir(_staging(target))
    return record, staged


def build(series: Series, to: int, originals: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the touched files at prefix ``to`` made from their pre-images, every blob id checked at every prefix."""
    with analysis.sandbox() as box:
        box.write(originals, {p: e.mode for p, e in series.base.files.items() if e})
        for entry in series.entries[:to]:
            done, _, said = box.apply(series.path(entry))
            if not done:
                raise EnvironmentFault(f"git apply {entry.file} failed: {said.decode(errors='replace').strip()}")
            for path in entry.files:
                data, expected = box.read(path), series.prefixes[entry.number].get(path)
                found = None if data is None else blob_id(data)
                if found != (expected.blob if expected else None):
                    raise EnvironmentFault(f"{entry.file}: {path}: blob {found} after it, expected {expected}")
        return {p: data for p in series.prefixes[to] if (data := box.read(p)) is not None}


def _check_known(target: InstalledTarget, series: Series, f: FileRecord) -> None:
    """Raise when a file on disk is no version of it that the series knows: somebody edited it."""
    blob = _blob(target.file(f.path))
    known = {files[f.path].blob if f.path in files else None for files in series.prefixes}
    if blob not in known:
        raise _edited(target, f, blob)


def _edited(target: InstalledTarget, f: FileRecord, blob: str | None) -> UsageError:
    return UsageError(
        f"{target.file(f.path)}: blob {blob or 'absent'}, expected {f.pin or 'absent'} (pin) or "
        f"{f.blob or 'absent'} (patched): it was edited and would be lost",
        remedy="copy the file away and put one of these two back, or reinstall the pin",
    )


def _save(target: InstalledTarget, f: FileRecord) -> bytes:
    """Copy a pre-image to the state folder unless it is there; returns its bytes."""
    saved = target.state_dir / "saved" / f.saved_name
    if saved.exists() and _blob(saved) == f.pin:
        return saved.read_bytes()
    source = target.file(f.path)
    data = source.read_bytes()
    if blob_id(data) != f.pin:
        raise _edited(target, f, blob_id(data))
    info = source.stat()
    _write(saved, data)
    _own(saved, source)
    saved.chmod(stat.S_IMODE(info.st_mode))
    os.utime(saved, ns=(info.st_atime_ns, info.st_mtime_ns))
    return data


def _stage(target: InstalledTarget, series: Series, f: FileRecord, data: bytes, mode: str) -> Path:
    """Write one post-image with the permissions and owner its target should have; returns where it lies."""
    staged = _staging(target) / f.saved_name
    pin = series.base.files[f.path]
    saved = target.state_dir / "saved" / f.saved_name
    perms = stat.S_IMODE(saved.stat().st_mode) if pin else 0o644
    if mode != (pin.mode if pin else "100644"):  # the installer's other bits stay
        perms = perms | 0o111 if mode == "100755" else perms & ~0o111
    _write(staged, data)
    _own(staged, saved if pin else target.site / target.package)
    staged.chmod(perms)
    return staged


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it survives a loss of power."""
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _own(path: Path, like: Path) -> None:
    """Give a file the owner of another; only root needs to, others own both."""
    if os.geteuid() == 0:
        info = like.stat()
        os.chown(path, info.st_uid, info.st_gid)


def _replace(
    target: InstalledTarget, record: Record, staged: Mapping[str, Path], before: Mapping[str, str | None]
) -> None:
    for folder in record.created_dirs:
        target.file(folder).mkdir(exist_ok=True)
    for f in record.files:
        path = target.file(f.path)
        if f.blob is None:
            path.unlink(missing_ok=True)
        elif before[f.path] != f.blob:
            os.replace(staged[f.path], path)
        if before[f.path] != f.blob:
            drop_bytecode(path)
    _sync_folders(target, record)
    for f in record.files:
        if (blob := _blob(target.file(f.path))) != f.blob:
            raise OSError(errno.EIO, f"blob {blob} after writing, expected {f.blob}", str(target.file(f.path)))


# --- revert ----------------------------------------------------------------------------------------------------


def _revert(target: InstalledTarget, series: Series, before: int, mended: bool, progress: Progress) -> Change:
    pending = journal.read_journal(target)
    record = pending.record if pending else journal.read_state(target)
    if record is None:
        if before != 0:
            raise UsageError(
                f"{target.describe()}: {before} patches were applied without this tool, no pre-images are saved",
                remedy=_reinstall(target, series.base.version),
            )
        leftover = target.state_dir.exists()
        shutil.rmtree(target.state_dir, ignore_errors=True)
        return Change(target.describe(), 0, 0, leftover)
    blobs = {f.path: _blob(target.file(f.path)) for f in record.files}
    allowed = _allowed(record, pending, series)
    for f in record.files:
        if blobs[f.path] not in allowed[f.path]:
            raise _edited(target, f, blobs[f.path])
        saved = target.state_dir / "saved" / f.saved_name
        if f.pin is not None and blobs[f.path] != f.pin and (not saved.exists() or _blob(saved) != f.pin):
            raise EnvironmentFault(
                f"{saved}: the saved pre-image of {f.path} is missing or damaged",
                remedy=f"{_reinstall(target, record.version)}, then revert",
            )
    _check_writable(target, record)
    progress(f"restoring {sum(blobs[f.path] != f.pin for f in record.files)} files")
    journal.write_json(journal.journal_path(target), Journal("revert", record, blobs))
    _restore(target, record)
    return Change(target.describe(), max(before, 0), 0, mended)


def _allowed(record: Record, pending: Journal | None, series: Series) -> dict[str, set[str | None]]:
    """Return, for each file, the contents that may be overwritten: those an apply or revert of this tool made."""
    allowed: dict[str, set[str | None]] = {f.path: {f.pin, f.blob} for f in record.files}
    if pending:
        for path, blob in pending.before.items():
            # an apply checked this content before it wrote the journal; a revert did so too
            allowed[path].add(blob)
    return allowed


def _restore(target: InstalledTarget, record: Record) -> None:
    """Put every pre-image back and remove every trace; may be repeated after an interruption."""
    for f in record.files:
        path = target.file(f.path)
        if f.pin is None:
            path.unlink(missing_ok=True)
        elif _blob(path) != f.pin:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(target.state_dir / "saved" / f.saved_name, path)
        drop_bytecode(path)
    _sync_folders(target, record)
    for folder in reversed(record.created_dirs):
        for place in (target.file(folder) / "__pycache__", target.file(folder)):
            try:
                place.rmdir()
            except OSError:  # missing, or somebody put a file of their own there: leave that alone
                continue
    journal.state_path(target).unlink(missing_ok=True)
    shutil.rmtree(target.state_dir / "saved", ignore_errors=True)
    shutil.rmtree(_staging(target), ignore_errors=True)
    journal.journal_path(target).unlink(missing_ok=True)
    shutil.rmtree(target.state_dir)
    journal.fsync_dir(target.site)


# --- shared ----------------------------------------------------------------------------------------------------


def _staging(target: InstalledTarget) -> Path:
    return target.state_dir / "staged"


def _sync_folders(target: InstalledTarget, record: Record) -> None:
    """Make the renames durable before what says that they are done."""
    for folder in sorted({target.file(f.path).parent for f in record.files}):
        if folder.is_dir():
            journal.fsync_dir(folder)


def _missing_dirs(target: InstalledTarget, series: Series) -> tuple[str, ...]:
    """Return the folders that the series adds, outermost first."""
    found: set[str] = set()
    for path, entry in series.base.files.items():
        folder = Path(path).parent
        while entry is None and not target.file(folder.as_posix()).exists():
            found.add(folder.as_posix())
            folder = folder.parent
    return tuple(sorted(found))


def _check_writable(target: InstalledTarget, record: Record) -> None:
    """Raise before any change when one of the folders cannot be written."""
    folders = {target.site} | {target.file(f.path).parent for f in record.files}
    for folder in sorted(folders):
        if not folder.exists():
            continue
        if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise EnvironmentFault(
                f"{folder}: not writable, nothing was changed",
                remedy="run as the owner of the environment, or use a virtual environment of your own",
            )


class _clear_errors:  # noqa: N801  used like a function
    """Context manager that turns operating system errors into EnvironmentFault naming the file and the remedy."""

    def __init__(self, target: InstalledTarget) -> None:
        self.target = target

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        if not isinstance(exc, OSError) or isinstance(exc, Q4Error):
            return
        after = "nothing was changed"
        if journal.journal_path(self.target).exists():
            after = "it was interrupted: run `revert` or `apply` again once there is space and permission"
        raise EnvironmentFault(
            f"{exc.filename or self.target.site}: {exc.strerror or exc}; {after}",
            remedy="free some disk space" if exc.errno == errno.ENOSPC else "check permissions and the disk",
        ) from exc
