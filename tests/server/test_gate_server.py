"""The gate on the real server: a fault planted into one patch is DIFFERENT at that patch, and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serving import cached_model

from q4kit import series
from q4kit.tinymodel import PRESETS

ROOT = Path(__file__).resolve().parents[2]
FAULT = ROOT / "data" / "faults" / "ple_scale_dropped.patch"
ARGUMENT = "--ple-offload-backend nvme"


def gate(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    python = os.environ.get("Q4_PYTHON", sys.executable)
    command = [sys.executable, str(ROOT / "tools" / "gate.py"), str(out), "--python", python, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_a_fault_planted_into_one_patch_is_different_there(tmp_path: Path) -> None:
    model = cached_model(replace(PRESETS["mini"], dtype="float32", ple_dtype="float8_e4m3fn", table_rows=500))
    entries = series.load().entries
    first = next(entry.number for entry in entries if ARGUMENT in entry.adds)
    out = tmp_path / "gate"
    options = [
        "--model", str(model), "--short", "--prefixes", f"0,{first},{first + 1}", "--plant", str(FAULT),
        "--plant-at", str(first + 1), f"--server-args={ARGUMENT}",
    ]  # fmt: skip
    done = gate(out, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((out / "table.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["UNKNOWN ARGUMENT", "REFERENCE", "DIFFERENT"]
    assert rows[0]["evidence"] == f"argument `{ARGUMENT}` from patch {first} on"
    assert rows[2]["subject"] == entries[first].subject
    assert rows[2]["legs"]["prefill"]["changed"] > 0
    for row in rows[1:]:
        record = row["record"]
        assert record["boot_s"] > 0
        assert record["peak_rss_gib"] >= record["rss_gib"] > 0.1
        assert record["speed"][0]["decode_tok_s"] > 0
    assert not (out / "tree").exists()

    # A second call has nothing left to measure: same verdict, no server.
    logs = {path: path.stat().st_mtime_ns for path in out.glob("*.log")}
    assert len(logs) == 2
    assert gate(out, *options).returncode == 1
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.log")} == logs

    # The folder belongs to these settings.
    other = gate(out, *options[:-1], "--server-args=--ple-offload-backend=nvme --disable-overlap-schedule")
    assert other.returncode == 2
    assert "measured with another server_args" in other.stderr
