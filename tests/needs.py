"""Marks that skip a test, with the reason, where the environment cannot run it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def _patched() -> bool:
    package = importlib.util.find_spec("sglang")  # found, not imported: that takes seconds
    return package is not None and (Path(package.origin or "").parent / "srt" / "layers" / "ple_rows").is_dir()


needs_series = pytest.mark.skipif(
    not _patched(), reason="needs an SGLang with the series applied (PYTHONPATH=<tree>/python)"
)
