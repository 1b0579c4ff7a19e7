"""Records of cells on disk: written after every stage, kept for the same inputs, put aside for others.

And which SGLang a record is about.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from q4kit import provenance
from q4kit.report import write_atomic


def series(tree: Path | str | None) -> dict[str, Any]:
    """Return which SGLang, with which patches, the folder `tree` holds; None: the one that is installed.

    As provenance.series_of has it, which says so where there is no package.
    """
    if tree is None:
        found = importlib.util.find_spec("sglang")
        package = Path(found.origin).parent if found and found.origin else Path("sglang")
    else:
        package = Path(tree) / "sglang"
    return provenance.series_of(package)


def save(path: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all."""
    write_atomic(path, json.dumps(record).encode())


def kept(path: Path, inputs: str) -> dict[str, Any] | None:
    """Return the record of a cell, None where there is none of these `inputs`; another one is put aside."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("inputs") == inputs:
        return record
    path.replace(path.with_name(f"{path.name}.old"))
    print(f"{path.stem}: measured with another tree, checkpoint or arguments: again", file=sys.stderr, flush=True)
    return None


def without_error(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell that failed had learned before it did, to go on from."""
    return {name: value for name, value in record.items() if name not in ("error", "full")}
