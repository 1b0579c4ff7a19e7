"""Runs the GPU unit scripts of this folder, each in its own process, and asserts every case they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize("script", ["bcg_outputs", "pinned_exact", "qsa_sync", "fp8_kv", "offload"])
def test_script(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / f"{script}.py")], capture_output=True, text=True, timeout=600
    )
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert cases, done.stderr[-4000:]
    assert [case for case in cases if not case["ok"]] == []
    assert done.returncode == 0, done.stderr[-4000:]
