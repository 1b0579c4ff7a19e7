"""A table that is really cold: a copy that only one server maps, dropped from the page cache and looked at.

The page cache is per file and keeps what any process maps. A checkpoint's shards are mapped by every server that loads
them, so a table is measured cold from a private flat copy (--ple-offload-dir), and each sample is taken only after
mincore has said that the pages are gone. They are dropped before its server boots, too: a reader that finds rows
resident copies them from a mapping, and what it has mapped stays. So the mmap reader cannot be measured cold here; auto
(which sends rows that are not resident to O_DIRECT) and pread can.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from q4kit.bench import machine
from q4kit.errors import EnvironmentFault

MAX_RESIDENT = 0.02
"""Cold means at most this share of the table in the page cache."""
ROOT = Path(__file__).resolve().parents[2]


def files_of(folder: Path) -> list[Path]:
    """Return the data files of a flat table."""
    return sorted(folder.glob("*.bin"))


def make_copies(folder: Path, names: list[str], model: Path, tree: Path) -> dict[str, Path]:
    """Return a flat table of `model` for each name, in `folder`/name; made where it is not there yet.

    Raises EnvironmentFault with the tool's message if the first cannot be exported.
    """
    tables = {name: folder / name for name in names}
    whole = [table for table in folder.glob("*") if (table / "ple.json").is_file()]
    for table in tables.values():
        if (table / "ple.json").is_file():
            continue
        if whole:
            shutil.rmtree(table, ignore_errors=True)
            partial = table.with_name(f".{table.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(whole[0], partial)  # another inode, so pages of its own
            os.replace(partial, table)
        else:
            _export(model, table, tree)
        whole.append(table)
    return tables


def _export(model: Path, table: Path, tree: Path) -> None:
    path = os.pathsep.join([str(tree), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "tools" / "ple_table.py"), "export", str(model), str(table)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentFault(f"no flat table of {model} in {table}: {done.stderr.strip()[-1500:]}")


def drop(files: list[Path]) -> float:
    """Drop the files from the page cache and return the share that is still there.

    Raises EnvironmentFault where the kernel does not tell it (the files belong to somebody else).
    """
    share = machine.evict(files)
    if share is None:
        raise EnvironmentFault(
            f"{files[0].parent if files else 'no file'}: the resident share of the table cannot be read",
            remedy="make the copy as the user that measures: mincore tells it to a file's owner only",
        )
    return share


def refusal(name: str, what: str, share: float) -> str | None:
    """Return why a cold sample cannot be taken, None where it can."""
    if share <= MAX_RESIDENT:
        return None
    return f"{name}: {share:.1%} of the table is resident before {what}; cold is {MAX_RESIDENT:.0%} at most"
