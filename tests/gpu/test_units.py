"""Runs the GPU scripts of this folder, each in its own process, and asserts every case they print.

The two matrices are left to run_all.sh: they are hours of servers, not a test. Servers here serve the "gpu" preset,
where it says many_rows with a larger table.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from q4kit.tinymodel import PRESETS, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"),
]


UNITS = (
    "bcg_outputs",
    "pinned_exact",
    "qsa_sync",
    "fp8_kv",
    "offload",
    "sparse_gqa",
    "repeatable_kernels",
    "ple_step_breakdown",
    "ple_memop",
)
SERVERS: dict[str, tuple[str, ...]] = {
    "fp8_kv_prompts": ("{out}", "--model={model}", "--patched={patched}"),
    "ple_faults": ("--model={many_rows}", "--patched={patched}", "--log={out}/server.log"),
    "full_table": ("{out}", "--patched={patched}"),
    "ple_nvme": ("{out}", "--model={model}", "--patched={patched}", "--only", "pinned-full", "nvme-full-auto"),
    "ple_soak": ("--model={model}", "--patched={patched}", "--seconds=240", "--log={out}/server.log"),
}


def run(script: str, *arguments: str, timeout_s: float) -> list[dict[str, Any]]:
    """Return the JSON lines of a script that ended well."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    cases: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert cases, done.stderr[-4000:]
    assert [case for case in cases if not case.get("ok", True)] == []
    assert done.returncode == 0, done.stderr[-4000:]
    return cases


@pytest.mark.parametrize("script", UNITS)
def test_script(script: str) -> None:
    cases = run(script, timeout_s=600)
    assert all("ok" in case for case in cases)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "gpu"
    generate(folder, PRESETS["gpu"])
    return folder


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "gpu"
    generate(folder, replace(PRESETS["gpu"], table_rows=20_000))
    return folder


@pytest.mark.parametrize("script", SERVERS)
def test_server_script(script: str, model: Path, many_rows: Path, tmp_path: Path) -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    names = {"out": tmp_path / "out", "model": model, "many_rows": many_rows, "patched": Path(found.origin).parents[1]}
    run(script, *(argument.format(**names) for argument in SERVERS[script]), timeout_s=1200)
