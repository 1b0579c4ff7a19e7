"""The summary of a GPU matrix run gives the committed figures from the committed raw answers."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from tests.gpu.summarise import main, rates, summary

RUN = Path(__file__).parents[2] / "results" / "h200_20261129"
SPEEDS = RUN.with_name("h200_20261130b")
ROUNDS = RUN.with_name("h200_20261130d")


def test_the_committed_summary_follows_from_the_raw_answers() -> None:
    cells = json.loads(gzip.decompress((RUN / "matrix.json.gz").read_bytes()))["cells"]
    committed = json.loads((RUN / "matrix_summary.json").read_text())
    made = summary(cells)
    assert made["cells"].keys() == committed["cells"].keys()
    for name, figures in committed["cells"].items():
        for key, value in figures.items():
            assert made["cells"][name][key] == (pytest.approx(value) if isinstance(value, float) else value), (
                name,
                key,
            )
    ratio = made["ratios"]["nvme-full_over_full-pinned"]
    assert ratio == pytest.approx(committed["ratios"]["nvme_full_over_pinned_full"])


def remade(tmp_path: Path, option: str, runs: dict[str, dict[str, object]]) -> object:
    """Return what summarise.py makes of runs, each with the records of its cells."""
    for name, cells in runs.items():
        (tmp_path / name).mkdir()
        for cell, record in cells.items():
            (tmp_path / name / f"{cell}.json").write_text(json.dumps(record))
    assert main([option, *(f"{name}={tmp_path / name}" for name in runs), str(tmp_path / "made.json")]) == 0
    return json.loads((tmp_path / "made.json").read_text())


@pytest.mark.parametrize("run", [SPEEDS, ROUNDS], ids=lambda run: run.name)
def test_the_committed_speeds_follow_from_the_raw_samples(tmp_path: Path, run: Path) -> None:
    committed = json.loads((run / "ple_nvme_speeds.json").read_text())
    raw = {name: json.loads(gzip.decompress((run / f"ple_nvme_{name}.json.gz").read_bytes())) for name in committed}
    assert remade(tmp_path, "--speeds", raw) == committed
    assert all(run["nvme-cold-full-auto"]["base"] == "pinned-full" for run in committed.values())


def test_the_committed_rates_follow_from_the_raw_samples(tmp_path: Path) -> None:
    committed = json.loads((ROUNDS / "matrix_rates.json").read_text())
    raw = json.loads(lzma.decompress((ROUNDS / "matrix_rounds.json.xz").read_bytes()))
    assert remade(tmp_path, "--rates", raw) == committed
    in_place = committed["series"]["half-full-in-place"]
    assert in_place["decode_ratio"]["rounds"] == in_place["rounds"] == 5


def turn(number: int, step_us: float) -> dict[str, object]:
    method = {"decode_tokens": 40, "warmup_tokens": 10, "prefill_tokens": 0, "vocab": 500}
    decode = {"step_us": step_us, "p50_us": step_us, "p95_us": step_us, "ttft_s": 0.1}
    return {"session": 1.0, "gpu": "0", "round": number, "method": method, "decode": decode}


def test_rates_say_which_cell_failed_and_which_has_no_round_with_the_base() -> None:
    found = rates({"full-pinned": {"samples": [turn(0, 1000.0)]}, "a": {"samples": [turn(0, 2000.0)]}})
    assert found["a"]["decode_ratio"]["median"] == 0.5
    late = rates(
        {"full-pinned": {"samples": [turn(0, 1000.0)]}, "a": {"samples": [turn(1, 2000.0), {"refused": "cold"}]}}
    )
    assert (late["a"]["decode_tok_s"], late["a"]["base"], late["a"]["rounds"]) == (500.0, None, 1)
    dead = rates({"full-pinned": {"error": "dead"}, "a": {"samples": [turn(0, 2000.0)]}, "b": {}})
    assert (dead["full-pinned"], dead["a"]["base"], "b" in dead) == ({"error": "dead"}, None, False)


def test_a_folder_without_records_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--rates", f"x={tmp_path}", str(tmp_path / "made.json")])
    assert stopped.value.code == 2
    assert "no record of a cell" in capsys.readouterr().err
