"""Figures of the write-up without a unit, which `claims.py check` leaves alone, are those of the raw files."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import bits

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
WRITEUP = (ROOT / "docs" / "WRITEUP.md").read_text()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def cells_of(run: str) -> dict[str, Any]:
    cells: dict[str, Any] = json.loads(lzma.decompress((RESULTS / run / "matrix_bits.json.xz").read_bytes()))
    return cells


def table_row(first: str) -> list[str]:
    """Return the cells of the one table row of the write-up that begins with `first`."""
    rows = [line for line in WRITEUP.splitlines() if line.startswith(f"| {first}")]
    assert len(rows) == 1, (first, len(rows))
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


@pytest.mark.parametrize("kernel", ["packed", "paged", "flash"])
def test_errors_of_the_sparse_kernels(kernel: str) -> None:
    records = [r for r in lines(RESULTS / "h200_20261130" / "units.jsonl") if r.get("case") == kernel]
    records = [r for r in records if r["script"] == "sparse_gqa" and min(r["contexts"]) > 5]
    assert len(records) == 4
    _, largest, mean, *_ = table_row(f"{kernel} |")
    assert float(largest) == pytest.approx(max(r["max_error"] for r in records), rel=0.015)
    assert float(mean) == pytest.approx(max(r["mean_error"] for r in records), rel=0.015)


@pytest.mark.parametrize(("prompt", "step"), [("16,384 tokens", "short_step"), ("4,096 tokens", "long_step")])
def test_shares_of_the_disks_own_rate(prompt: str, step: str) -> None:
    speeds = json.loads((RESULTS / "h200_20261130b" / "ple_nvme_speeds.json").read_text())[step]
    for cell, name in zip(table_row(prompt)[1:], ("nvme-wait-cold-full-auto", "nvme-cold-full-auto"), strict=True):
        found = re.search(r"tok/s, ([\d.]+)$", cell)
        assert found
        assert float(found[1]) == pytest.approx(speeds[name]["prefill_tok_s"] * 16 / 109389, abs=0.005), name


def test_bits_with_all_patches() -> None:
    cells = cells_of("h200_20261130d")
    twins = {
        "half-full-in-place": "full-pinned", "half-full-nvme": "full-pinned", "paged-experts-nvme": "full-pinned",
        "nvme-breakable": "breakable-resident", "breakable-resident": "full-pinned",
    }  # fmt: skip
    for name, twin in twins.items():
        found = bits.compare(tuple(cells[twin]["runs"]), tuple(cells[name]["runs"]))
        assert (found["compared"], found["differ"], found["unrepeated"]) == (10207, 0, 0), name
        assert cells[name]["long"]["ids"] == cells["reference"]["long"]["ids"]
    assert table_row("all 21 patches: budget 2 read in place")[1:] == ["5 of 5", "0 of 10,207 each", "200 of 200 each"]


@pytest.mark.parametrize(("run", "differ"), [("h200_20261130b", "3,133"), ("h200_20261130d", "2,112")])
def test_graphs_against_eager(run: str, differ: str) -> None:
    cells = cells_of(run)
    found = bits.compare(tuple(cells["reference"]["runs"]), tuple(cells["full-pinned"]["runs"]))
    assert f"{found['differ']:,}" == differ
    assert found["compared"] == 10207
    moved = {
        len(eager["prompt"]) + 1
        for eager, graph in zip(cells["reference"]["runs"][0], cells["full-pinned"]["runs"][0], strict=True)
        if eager["prompt"] != graph["prompt"]
    }
    assert moved == ({63, 65, 2047, 3000} if differ == "3,133" else {63, 2047})
    section = WRITEUP.split("Graphs of either kind do not give the bits of eager", 1)[1].split("\n\n", 1)[0]
    assert differ in section


@pytest.mark.parametrize(
    ("file", "row", "count"),
    [
        ("ple_nvme_bits", "all 21 patches: table on NVMe", "7 of 7"),
        ("ple_nvme_mtp", "all 21 patches: the same with spec", "1 of 1"),
    ],
)
def test_verdicts_of_the_table_on_disk(file: str, row: str, count: str) -> None:
    verdicts = [r for r in lines(RESULTS / "h200_20261130d" / f"{file}.jsonl") if r["kind"] == "verdict"]
    assert all(r["bits"] == {"compared": 10207, "differ": 0, "unrepeated": 0} for r in verdicts)
    assert all(r["greedy_common"] == 1000 and r["greedy_equal"] and r["pair_equal"] for r in verdicts)
    assert table_row(row)[1] == count == f"{len(verdicts)} of {len(verdicts)}"
