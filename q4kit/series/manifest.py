"""series.toml: the pin, the order of the patches and what is claimed about each of them."""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from q4kit.errors import UsageError
from q4kit.series import chain
from q4kit.series.blobs import Entry
from q4kit.series.patchfile import Patch, parse_patch

REPO_ROOT = Path(__file__).resolve().parents[2]
MANIFEST = "series.toml"
SCHEMA = 1

STATUS = re.compile(r"^(Submitted|Pending|Backport|Denied|Inactive-Upstream|Inappropriate) \[[^\[\]]*\S[^\[\]]*\]$")
"""OpenEmbedded's vocabulary of ``Upstream-Status``; unlike there, the bracketed reason is always required."""

_FILE = re.compile(r"^\d{4}-[A-Za-z0-9._-]+\.patch$")
_HEX = {40: re.compile(r"^[0-9a-f]{40}$"), 64: re.compile(r"^[0-9a-f]{64}$")}


def series_dir() -> Path:
    """Return the folder of the series: ``$Q4_SERIES``, else ``upstream/series-q4head`` of this repository."""
    return Path(os.environ.get("Q4_SERIES") or REPO_ROOT / "upstream" / "series-q4head").resolve()


@dataclass(frozen=True)
class Base:
    """The pin: an SGLang release and the pre-image of every file the series touches."""

    url: str
    tag: str
    package: str
    version: str
    wheels: Mapping[str, str]
    """Python tag (``cp311``) -> sha256 of the wheel."""
    commit: str
    tree: str
    files: Mapping[str, Entry | None]
    """Touched file -> pre-image; None for a file the series adds."""


@dataclass(frozen=True)
class PatchEntry:
    """One ``[[patch]]`` table."""

    file: str
    sha256: str
    subject: str
    finding: str
    status: str
    adds: tuple[str, ...]
    depends: tuple[str, ...]
    tests: tuple[str, ...]
    files: tuple[str, ...]
    insertions: int
    deletions: int
    tree_after: str

    @property
    def number(self) -> int:
        return int(self.file[:4])


@dataclass(frozen=True)
class Regression:
    """One ``[[regression]]`` table: a finding fixed upstream, whose tests pass on the stock pin."""

    finding: str
    title: str
    tests: tuple[str, ...]
    stock: str


@dataclass(frozen=True)
class Series:
    """The whole series as recorded."""

    folder: Path
    base: Base
    entries: tuple[PatchEntry, ...]
    regressions: tuple[Regression, ...]

    @property
    def length(self) -> int:
        return len(self.entries)

    @property
    def root(self) -> Path:
        """The repository that holds the series, whose tests the entries name."""
        return self.folder.parents[1]

    @property
    def touched(self) -> list[str]:
        """Every file that some patch touches, sorted."""
        return sorted(self.base.files)

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """The parsed patch files, each checked against its recorded sha256."""
        return tuple(parse_patch(e.file, self.patch_bytes(e)) for e in self.entries)

    @cached_property
    def prefixes(self) -> list[dict[str, Entry]]:
        """The touched files at every prefix 0..n, from the patch files alone."""
        return chain.prefixes(self.base.files, self.patches)

    def path(self, entry: PatchEntry) -> Path:
        return self.folder / entry.file

    def patch_bytes(self, entry: PatchEntry) -> bytes:
        """Return the bytes of a patch file; raises UsageError when they are not the recorded ones."""
        path = self.path(entry)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"{path}: listed in {MANIFEST} but missing", remedy=_RESTORE) from None
        found = hashlib.sha256(data).hexdigest()
        if found != entry.sha256:
            parse_patch(entry.file, data)  # a damaged file is named by line before its hash is
            raise UsageError(
                f"{path}: sha256 {found}, expected {entry.sha256}: the file was changed by hand",
                remedy=_RESTORE,
            )
        return data

    def check_prefix(self, to: int | None) -> int:
        """Return ``to`` (default: all patches); raises UsageError when the series has no such prefix."""
        if to is None:
            return self.length
        if not 0 <= to <= self.length:
            raise UsageError(f"prefix {to} does not exist", remedy=f"choose 0 (the pin) to {self.length} (all patches)")
        return to


_RESTORE = "`git checkout -- <file>`, or write the folder again with `tools/series.py export WORKTREE`"


def load(folder: Path | None = None) -> Series:
    """Return the recorded series; raises UsageError naming the field, the value found and the one expected."""
    folder = (folder or series_dir()).resolve()
    path = folder / MANIFEST
    try:
        doc = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", remedy="run from a checkout, or point $Q4_SERIES at it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: not valid TOML: {exc}") from None
    read = _Reader(path)
    if doc.get("schema") != SCHEMA:
        raise read.wrong("schema", doc.get("schema"), str(SCHEMA))
    base = _base(read, read.get(doc, "base", dict, "base"))
    entries = tuple(_patch(read, i, t) for i, t in enumerate(doc.get("patch", []), start=1))
    for key, values in (("file", [e.file for e in entries]), ("subject", [e.subject for e in entries])):
        for value in values:
            if values.count(value) > 1:
                raise read.wrong(f"patch.{key}", value, "a value that occurs once")
    regressions = tuple(
        Regression(
            read.text(t, "finding", f"regression[{i}]"),
            read.text(t, "title", f"regression[{i}]"),
            read.texts(t, "tests", f"regression[{i}]"),
            read.text(t, "stock", f"regression[{i}]"),
        )
        for i, t in enumerate(doc.get("regression", []), start=1)
    )
    for r in regressions:
        if r.stock != "pass":
            raise read.wrong("regression.stock", r.stock, '"pass"')
    return Series(folder, base, entries, regressions)


@dataclass(frozen=True)
class _Reader:
    path: Path

    def wrong(self, field: str, found: object, expected: str) -> UsageError:
        return UsageError(f"{self.path}: {field} is {found!r}, expected {expected}")

    def get(self, table: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
        value = table.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(where if where == key else f"{where}.{key}", value, f"a {kind.__name__}")
        return value

    def text(self, table: Mapping[str, Any], key: str, where: str) -> str:
        return str(self.get(table, key, str, where))

    def texts(self, table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
        values = self.get(table, key, list, where)
        for value in values:
            if not isinstance(value, str):
                raise self.wrong(f"{where}.{key}", value, "strings")
        return tuple(values)

    def hexdigits(self, table: Mapping[str, Any], key: str, where: str, size: int) -> str:
        value = self.text(table, key, where)
        if not _HEX[size].match(value):
            raise self.wrong(f"{where}.{key}", value, f"{size} hex digits")
        return value


def _base(read: _Reader, table: Mapping[str, Any]) -> Base:
    wheels = read.get(table, "wheels", dict, "base")
    for tag in wheels:
        read.hexdigits(wheels, tag, "base.wheels", 64)
    files: dict[str, Entry | None] = {}
    for path, value in read.get(table, "files", dict, "base").items():
        mode, _, blob = str(value).partition(" ")
        if value == "absent":
            files[path] = None
        elif mode in ("100644", "100755") and _HEX[40].match(blob):
            files[path] = Entry(mode, blob)
        else:
            raise read.wrong(f"base.files.{path}", value, '"absent" or "100644 <blob id>"')
    return Base(
        url=read.text(table, "url", "base"),
        tag=read.text(table, "tag", "base"),
        package=read.text(table, "package", "base"),
        version=read.text(table, "version", "base"),
        wheels=wheels,
        commit=read.hexdigits(table, "commit", "base", 40),
        tree=read.hexdigits(table, "tree", "base", 40),
        files=files,
    )


def _patch(read: _Reader, index: int, table: Mapping[str, Any]) -> PatchEntry:
    where = f"patch[{index}]"
    file = read.text(table, "file", where)
    if not _FILE.match(file) or int(file[:4]) != index:
        raise read.wrong(f"{where}.file", file, f'"{index:04d}-<subject>.patch"')
    return PatchEntry(
        file=file,
        sha256=read.hexdigits(table, "sha256", where, 64),
        subject=read.text(table, "subject", where),
        finding=read.text(table, "finding", where),
        status=read.text(table, "status", where),
        adds=read.texts(table, "adds", where),
        depends=read.texts(table, "depends", where),
        tests=read.texts(table, "tests", where),
        files=read.texts(table, "files", where),
        insertions=read.get(table, "insertions", int, where),
        deletions=read.get(table, "deletions", int, where),
        tree_after=read.hexdigits(table, "tree_after", where, 40),
    )
