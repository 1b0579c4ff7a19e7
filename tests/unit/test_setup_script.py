"""scripts/setup.sh: which Python it takes. The script is real; nothing is installed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """Return a Python that says it is too old."""
    python = tmp_path / "old" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("kind", ["missing", "old"])
def test_a_python_that_was_asked_for_and_cannot_be_used_is_named(tmp_path: Path, old_python: Path, kind: str) -> None:
    """Without a word another one would be taken, and a full installation begin with it."""
    python = old_python if kind == "old" else tmp_path / "no" / "python"
    begin = time.monotonic()
    done = subprocess.run(
        [SCRIPTS / "setup.sh", "--cpu", tmp_path / "venv"],
        env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 4
    assert f"error: PYTHON={python} is not a Python 3.11, 3.12 or 3.13 with venv" in done.stderr
    assert "remedy: name another one" in done.stderr
    assert not (tmp_path / "venv").exists()
    assert time.monotonic() - begin < 30
