"""Does a path lead to a checkpoint at all? Whether that is complete, `q4kit.serving.checkpoint` finds out."""

from __future__ import annotations

from pathlib import Path

from q4kit.errors import UsageError

REMEDY = "name a checkpoint folder; tools/make_tiny_model.py makes a small one"


def check(folder: Path) -> None:
    """Raise UsageError where `folder` is missing, is a file, or holds no config.json."""
    if not folder.exists():
        raise UsageError(f"{folder}: no such folder", remedy=REMEDY)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a checkpoint folder", remedy=REMEDY)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json", remedy=REMEDY)
