"""The summary of a GPU matrix run gives the committed figures from the committed raw answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.gpu.summarise import summary

RUN = Path(__file__).parents[2] / "results" / "h200_20261129"


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
