"""Flat tables: write one from any row source, describe it, compare two, check the stored checksums.

The format is documented in docs/PLE_TABLE.md. A source is the patched SGLang's `RowSource`; only its public fields
are used here, so tests can stand a small record in its place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.report import write_atomic

BLOCK_BYTES = 64 << 20
ALGORITHM = "blake2b-256"
DESCRIPTION = "ple.json"
DATA = "ple_table.bin"
_READ_BYTES = 8 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Extent(Protocol):
    """Rows that lie together in a file."""

    @property
    def row_begin(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...


class Source(Protocol):
    """What is needed of a row source."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def weight_scale(self) -> float: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def files(self) -> Any: ...
    @property
    def extents(self) -> Any: ...


def silent(done: int, total: int) -> None:
    """Report nothing."""


def chunks(source: Source) -> Iterator[bytes]:
    """Yield the table's bytes in row order; EnvironmentFault when a file ends early or cannot be read."""
    for extent in source.extents:
        path = source.files[extent.file].path
        left, at = extent.rows * source.row_bytes, extent.offset
        try:
            with open(path, "rb", buffering=0) as stream:
                os.posix_fadvise(stream.fileno(), at, left, os.POSIX_FADV_SEQUENTIAL)
                while left:
                    chunk = os.pread(stream.fileno(), min(left, _READ_BYTES), at)
                    if not chunk:
                        raise EnvironmentFault(
                            f"{path}: ends at byte {at}, {left} bytes short",
                            remedy="the file was cut while it was read; restore it and start again",
                        )
                    yield chunk
                    # A pass over the table must not push everything else out of the page cache.
                    os.posix_fadvise(stream.fileno(), at, len(chunk), os.POSIX_FADV_DONTNEED)
                    at += len(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise EnvironmentFault(
                f"{path}: byte {at}: {error.strerror} (errno {error.errno})", remedy="check the disk"
            ) from error


class _BlockHash:
    """BLAKE2b-256 of every `BLOCK_BYTES` of a stream."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._hash = hashlib.blake2b(digest_size=32)
        self._filled = 0

    def update(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            take = min(len(view), BLOCK_BYTES - self._filled)
            self._hash.update(view[:take])
            self._filled += take
            view = view[take:]
            if self._filled == BLOCK_BYTES:
                self._finish()

    def _finish(self) -> None:
        self.digests.append(self._hash.hexdigest())
        self._hash = hashlib.blake2b(digest_size=32)
        self._filled = 0

    def close(self) -> list[str]:
        """Return the digests, the last one of a short block."""
        if self._filled:
            self._finish()
        return self.digests


def block_digests(source: Source, progress: Progress = silent) -> list[str]:
    """Return the table's BLAKE2b-256 digests, one for every 64 MiB."""
    blocks, done = _BlockHash(), 0
    for chunk in chunks(source):
        blocks.update(chunk)
        done += len(chunk)
        progress(done, source.nbytes)
    return blocks.close()


def export(source: Source, folder: Path, *, force: bool = False, progress: Progress = silent) -> Path:
    """Write `source` as a flat table into `folder` and return its ple.json.

    The description is written last, so a folder that has one holds a whole table. A failed export leaves nothing new.
    """
    description = folder / DESCRIPTION
    if description.exists() and not force:
        raise UsageError(f"{description} exists", remedy="choose another folder, or replace it with --force")
    if any(Path(f.path).resolve().parent == folder.resolve() for f in source.files):
        raise UsageError(f"{folder} holds the table itself", remedy="choose another folder for the copy")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".export.", suffix=".tmp")
    except OSError as error:
        raise EnvironmentFault(f"{folder}: {error.strerror}", remedy="choose a folder that can be written") from error
    temporary = Path(name)
    try:
        digests = _copy(source, handle, progress)
        description.unlink(missing_ok=True)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / DATA)
    except OSError as error:
        # Only writes arrive here: `chunks` turns its own failures into EnvironmentFault.
        hint = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
        raise EnvironmentFault(
            f"{folder}: writing {source.nbytes} bytes failed: {error.strerror} (errno {error.errno})", remedy=hint
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    write_atomic(description, (json.dumps(describe(source, digests), indent=1) + "\n").encode())
    return description


def _copy(source: Source, handle: int, progress: Progress) -> list[str]:
    blocks, done = _BlockHash(), 0
    with os.fdopen(handle, "wb", buffering=0) as out:
        # Reserving the space first turns a full disk into an error after no work rather than after an hour of it.
        os.posix_fallocate(out.fileno(), 0, source.nbytes)
        for chunk in chunks(source):
            blocks.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[out.write(view) :]
            done += len(chunk)
            progress(done, source.nbytes)
        os.fsync(out.fileno())
    return blocks.close()


def describe(source: Source, digests: list[str]) -> dict[str, Any]:
    """Return the content of ple.json for a table exported from `source`."""
    return {
        "format": "ple-flat",
        "version": 1,
        "file": DATA,
        "rows": source.rows,
        "dim": source.dim,
        "dtype": source.dtype,
        "weight_scale": source.weight_scale,
        "checksum": {"algorithm": ALGORITHM, "block_bytes": BLOCK_BYTES, "blocks": digests},
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two tables, or a table and its checksums, are equal; and where they are not."""

    equal: bool
    evidence: str


def compare(left: Source, right: Source, progress: Progress = silent) -> Comparison:
    """Compare geometry, scale and every byte of two tables."""
    for name in ("rows", "dim", "dtype", "weight_scale"):
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            return Comparison(False, f"{name} differs: {a} in {left.name}, {b} in {right.name}")
    done = 0
    a_rest, b_rest = b"", b""
    a_chunks, b_chunks = chunks(left), chunks(right)
    while done < left.nbytes:
        a_rest = a_rest or next(a_chunks)
        b_rest = b_rest or next(b_chunks)
        size = min(len(a_rest), len(b_rest))
        if a_rest[:size] != b_rest[:size]:
            at = done + next(i for i in range(size) if a_rest[i] != b_rest[i])
            return Comparison(
                False, f"first difference at row {at // left.row_bytes}, byte {at % left.row_bytes} of it"
            )
        a_rest, b_rest = a_rest[size:], b_rest[size:]
        done += size
        progress(done, left.nbytes)
    return Comparison(True, f"{left.nbytes} bytes of {left.rows} rows and the scale are equal")


def check_stored(source: Source, progress: Progress = silent) -> Comparison:
    """Compare a flat table with the checksums in its ple.json."""
    path = Path(source.files[0].path).parent / DESCRIPTION
    stored = json.loads(path.read_text()).get("checksum")
    if (
        not isinstance(stored, dict)
        or stored.get("algorithm") != ALGORITHM
        or stored.get("block_bytes") != BLOCK_BYTES
        or not isinstance(stored.get("blocks"), list)
    ):
        raise UsageError(
            f"{path}: no {ALGORITHM} checksums in blocks of {BLOCK_BYTES} bytes",
            remedy="compare it with the checkpoint instead: verify FLAT CHECKPOINT",
        )
    found = block_digests(source, progress)
    if len(found) != len(stored["blocks"]):
        return Comparison(False, f"{len(stored['blocks'])} checksums stored, the table has {len(found)} blocks")
    for block, (a, b) in enumerate(zip(stored["blocks"], found, strict=True)):
        if a != b:
            first = block * BLOCK_BYTES // source.row_bytes
            return Comparison(False, f"block {block} (from row {first} on): stored {str(a)[:16]}, found {b[:16]}")
    return Comparison(True, f"{len(found)} blocks match their checksums")
