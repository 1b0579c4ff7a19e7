"""The GPU comparison of disk and pinned tables judges by what two runs of one server differ by."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ple_nvme import CELLS, drop_table_pages, memory_gib, name_of, unique, verdict


def record(noise: float = 0.0) -> dict[str, Any]:
    """Return the raw record of one server; its second run is `noise` away from its first."""
    scored = [{"prompt": [-1.0, -2.0], "output": [-0.5], "ids": [4]}]
    again = copy.deepcopy(scored)
    again[0]["prompt"][1] += noise
    memory = {"RssAnon": 1.0, "RssFile": 0.5, "RssShmem": 0.0, "processes": 3}
    return {
        "scored": scored,
        "scored_again": again,
        "greedy": [1, 2, 3, 4],
        "greedy_again": [1, 2, 3, 4],
        "pair": [[1], [2]],
        "one_left": [5, 6],
        "uncached": [5, 6],
        "one_left_cached": 2048,
        "rss_gib_start": memory,
        "rss_gib_end": memory,
        "step_us_warm": [1000.0, 1200.0],
        "step_us_cold": [1000.0],
        "prefill_tok_s_warm": [100.0],
        "prefill_tok_s_cold": [100.0],
    }


def test_equal_answers_hold_and_speeds_are_ratios_of_medians() -> None:
    disk = record()
    disk["step_us_warm"] = [1250.0, 1350.0]
    compared = verdict(record(), disk)
    assert compared["equal"]
    assert compared["added_us_per_step_warm"] == pytest.approx(200)
    assert compared["decode_ratio_warm"] == pytest.approx(1100 / 1300)


def test_a_bit_off_is_unequal_where_the_server_repeats_its_bits() -> None:
    disk = record()
    disk["scored"][0]["prompt"][0] += 1e-6
    disk["scored_again"][0]["prompt"][0] += 1e-6
    assert not verdict(record(), disk)["equal"]
    assert verdict(record(noise=1e-6), disk)["equal"]


def test_another_token_is_unequal_unless_the_server_itself_does_not_repeat() -> None:
    disk = record()
    disk["greedy"] = [1, 2, 9, 4]
    disk["greedy_again"] = [1, 2, 9, 4]
    assert not verdict(record(), disk)["equal"]
    pinned = record()
    pinned["greedy_again"] = [1, 7, 3, 4]
    assert verdict(pinned, disk)["equal"]


def test_every_disk_cell_has_its_pinned_one_before_it() -> None:
    for position, (ple, graph, _) in enumerate(CELLS):
        if ple == "nvme":
            assert ("pinned", graph, None) in CELLS[:position]
    assert name_of(("nvme", "full", "auto")) == "nvme-full-auto"
    assert name_of(("pinned", "eager", None)) == "pinned-eager"


def test_texts_repeat_and_memory_is_read(tmp_path: Path) -> None:
    assert unique(7, 100, 500) == unique(7, 100, 500) != unique(8, 100, 500)
    assert memory_gib(os.getpgid(0))["RssAnon"] > 0
    table = tmp_path / "table"
    table.write_bytes(os.urandom(1 << 16))
    drop_table_pages([table])
    assert table.stat().st_size == 1 << 16
