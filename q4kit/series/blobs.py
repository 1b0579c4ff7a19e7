"""Git object ids computed from bytes alone: no repository, no git binary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = "0" * 40
"""The id git writes for a side that does not exist (a file added or deleted)."""
EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
"""The blob id of an empty file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a tree: git mode (``100644`` or ``100755``) and blob id."""

    mode: str
    blob: str


def blob_id(data: bytes) -> str:
    """Return git's id of a file with this content: SHA-1 over ``blob <length>\\0<content>``."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def tree_id(files: Mapping[str, Entry]) -> str:
    """Return git's id of the tree that holds exactly ``files`` (path with ``/`` -> entry).

    Same id as ``git write-tree`` of an index with these entries, so a recorded id can be checked with git or without.
    """
    children: dict[str, dict[str, Entry]] = {}
    rows: list[tuple[bytes, bytes]] = []
    for path, entry in files.items():
        head, slash, rest = path.partition("/")
        if slash:
            children.setdefault(head, {})[rest] = entry
        else:
            rows.append((head.encode(), _row(entry.mode, head, entry.blob)))
    for name, below in children.items():
        # git orders a directory as if its name ended in "/"
        rows.append((name.encode() + b"/", _row("40000", name, tree_id(below))))
    body = b"".join(row for _, row in sorted(rows))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def _row(mode: str, name: str, oid: str) -> bytes:
    return mode.encode() + b" " + name.encode() + b"\0" + bytes.fromhex(oid)
