"""A served checkpoint one of whose table rows cannot be read."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from q4kit.server.client import Client
from tests.gpu import failing_rows


def compile_shim(directory: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the EIO shim")
    return failing_rows.build_shim(directory)


@dataclass
class Disk:
    """The served server, its checkpoint, and the file that makes a byte range of it fail."""

    client: Client
    model: Path
    control: Path

    def poison(self, ids: list[int], position: int) -> Path:
        """Make the row of hash head 0 for token `position` of `ids` unreadable; return its file."""
        table = failing_rows.Table(self.model)
        row = table.place(table.row(ids, position))
        failing_rows.poison(self.control, row)
        return row.path

    def heal(self) -> None:
        failing_rows.heal(self.control)
