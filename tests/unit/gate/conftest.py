"""Fixtures of the gate's unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder that passes for a checkpoint where only its bytes count."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder
