"""The float32 reference of the sparse decode check is grouped-query attention, and its limits tell faults apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu import sparse_gqa as script  # noqa: E402

SCRIPT = Path(script.__file__)


def small(contexts: tuple[int, ...] = (70, 40), selected: int = 64) -> script.Case:
    return script.make_case(contexts, selected, "cpu")


def test_positions_are_distinct_ascending_and_end_in_minus_one() -> None:
    case = small()
    full, short = case.positions
    assert full.unique().numel() == 64
    assert full.diff().gt(0).all()
    assert short[:40].tolist() == list(range(40))
    assert short[40:].eq(-1).all()
    assert case.counts.tolist() == [64, 40]
    assert case.starts.tolist() == [0, 64, 104]


def test_slots_are_no_positions_and_no_slot_is_shared() -> None:
    case = small()
    used = torch.cat([case.slot_table[0, :70], case.slot_table[1, :40]])
    assert used.unique().numel() == 110
    assert not torch.equal(case.slot_table[0, :70], torch.arange(70, dtype=torch.int32))


def test_reference_is_torchs_grouped_query_attention() -> None:
    case = small()
    for row, count in enumerate(case.counts.tolist()):
        slots = case.slot_table[row][case.positions[row, :count].long()].long()
        q = case.q[row].float()[None, :, None]
        k, v = (t[slots].float().transpose(0, 1)[None] for t in (case.k, case.v))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(script.reference(case)[row], expected, atol=1e-5, rtol=1e-5)


def test_limits_admit_the_rounding_of_bf16_and_refuse_a_wrong_group_and_a_lost_position() -> None:
    case = script.make_case((3000,), script.SELECTED, "cpu")
    expected = script.reference(case)
    assert script.verdict(*script.errors(expected.bfloat16(), expected))
    assert not script.verdict(*script.errors(script.reference(case, interleaved=True), expected))
    case.positions[0, -50:] = -1
    assert not script.verdict(*script.errors(script.reference(case), expected))


@pytest.mark.parametrize("errors", [(1.1e-3, 0.0), (0.0, 1.1e-4), (float("nan"), 0.0), (0.0, float("nan"))])
def test_verdict_refuses_what_is_past_a_limit_or_no_number(errors: tuple[float, float]) -> None:
    assert not script.verdict(*errors)
    assert script.verdict(script.MAX_ERROR, script.MEAN_ERROR)


def test_without_a_gpu_it_says_so_and_exits_4() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert "needs an NVIDIA GPU" in done.stderr
    assert "--self-check" in done.stderr
