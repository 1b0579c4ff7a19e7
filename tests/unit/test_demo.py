"""The demo's verdict: every step must have come out as it must, and a missing result is a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from q4kit.demo import STEPS, build


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "series.json").write_text(json.dumps({"state": "applied", "prefix": 2}))
    for step in STEPS:
        (tmp_path / f"{step.stem}.json").write_text(json.dumps({"verdict": step.verdict, "evidence": "seen"}))
        (tmp_path / f"{step.stem}.exit").write_text(f"{step.exit_code}\n")
    (tmp_path / "patched.log").write_text(
        "[2026-01-01 00:00:00] PLE rows: pread (auto asked for), 8 rows of 160 B in 1 file(s)\n"
    )
    return tmp_path


def test_holds_when_every_step_does(results: Path) -> None:
    report, code = build(results)
    assert (code, report.verdict, report.data["failed"]) == (0, "HOLDS", [])


@pytest.mark.parametrize("stem", [step.stem for step in STEPS])
def test_a_missing_result_fails_and_is_named(results: Path, stem: str) -> None:
    (results / f"{stem}.json").unlink()
    report, code = build(results)
    assert (code, report.data["failed"]) == (1, [stem])


def test_a_fault_that_passes_the_oracle_fails_the_demo(results: Path) -> None:
    (results / "fault-oracle.json").write_text(json.dumps({"verdict": "EQUIVALENT", "evidence": "blind"}))
    (results / "fault-oracle.exit").write_text("0")
    report, code = build(results)
    assert (code, report.data["failed"]) == (1, ["fault-oracle"])
    assert "fault-oracle" in report.evidence


def test_an_exit_code_that_contradicts_the_verdict_fails(results: Path) -> None:
    (results / "oracle.exit").write_text("4")
    assert build(results)[1] == 1


def test_an_unapplied_series_fails(results: Path) -> None:
    (results / "series.json").write_text(json.dumps({"state": "drifted"}))
    report, code = build(results)
    assert (code, report.data["failed"]) == (1, ["series"])


def test_a_server_that_held_the_table_in_memory_fails(results: Path) -> None:
    assert "pread (auto asked for), 8 rows of 160 B" in build(results)[0].text()
    for log in ("Uvicorn running\n", None):
        if log is None:
            (results / "patched.log").unlink()
        else:
            (results / "patched.log").write_text(log)
        report, code = build(results)
        assert (code, report.data["failed"]) == (1, ["disk"])
