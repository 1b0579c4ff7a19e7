"""Each verdict only where it is earned, and the exit code that follows from it."""

from __future__ import annotations

import pytest
from gate_runs import failed, recording, served

from q4kit.gate.judge import Row, conclusion, judge_all
from q4kit.gate.plan import Expectation
from q4kit.gate.store import Record
from q4kit.oracle import floor as floors

FLOOR = floors.build([recording(0), recording(90), recording(91)])
EXPECT = Expectation(2, "Unsupported BCG")


def judged(records: list[Record], shifts: dict[int, float] | None = None, **options: object) -> list[Row]:
    shifts = shifts or {}
    by_prefix = {record.prefix: record for record in records}
    prefixes = sorted(by_prefix)
    return judge_all(
        prefixes,
        by_prefix,
        lambda k: recording(k, shift=shifts.get(k, 0.0)),
        FLOOR,
        **options,  # type: ignore[arg-type]
    )


def verdicts(rows: list[Row]) -> list[str]:
    return [str(row.verdict) for row in rows]


def test_equal_prefixes_hold_and_the_ends_are_compared_too() -> None:
    rows = judged([served(k) for k in range(3)])
    assert verdicts(rows) == ["REFERENCE", "EQUIVALENT", "EQUIVALENT", "EQUIVALENT"]
    assert (rows[-1].prefix, rows[-1].against) == (2, 0)
    assert conclusion(rows)[2] == 0


def test_a_change_is_different_at_its_own_patch_only() -> None:
    rows = judged([served(k) for k in range(4)], {2: 1e-3, 3: 1e-3})
    assert verdicts(rows)[:4] == ["REFERENCE", "EQUIVALENT", "DIFFERENT", "EQUIVALENT"]
    verdict, evidence, code = conclusion(rows)
    assert (verdict, code) == ("DOES NOT HOLD", 1)
    assert evidence.startswith("prefix 2: DIFFERENT: ")


def test_small_steps_that_add_up_are_seen_at_the_end() -> None:
    # Inside the tolerance from patch to patch, outside of it over the whole way.
    rows = judged([served(k) for k in range(4)], {1: 1e-3, 2: 2e-3, 3: 3e-3}, tolerance=1.5e-3)
    assert verdicts(rows) == ["REFERENCE", "EQUIVALENT", "EQUIVALENT", "EQUIVALENT", "DIFFERENT"]
    assert conclusion(rows)[2] == 1


def test_a_prefix_that_fails_first_is_a_result_and_later_ones_are_judged_without_it() -> None:
    rows = judged([failed(0), served(1), served(2)])
    assert verdicts(rows) == ["FAILS", "REFERENCE", "EQUIVALENT"]
    assert rows[0].evidence == "boot: ValueError: no"
    assert conclusion(rows)[2] == 0


def test_a_patch_that_breaks_serving_does_not_hold_and_the_next_is_compared_across_it() -> None:
    rows = judged([served(0), failed(1), served(2)])
    assert verdicts(rows) == ["REFERENCE", "BROKEN", "EQUIVALENT"]
    assert rows[2].against == 0
    assert conclusion(rows)[2] == 1


def test_an_expected_failure_holds() -> None:
    line = "TypeError: Unsupported BCG output type: X"
    rows = judged([failed(0, line), failed(1, line), served(2)], expect=EXPECT)
    assert verdicts(rows) == ["FAILS AS EXPECTED", "FAILS AS EXPECTED", "REFERENCE"]
    assert conclusion(rows)[2] == 0


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        ([failed(0, "OSError: disk full"), served(2)], "FAILS OTHERWISE"),
        ([served(0), served(2)], "SERVES UNEXPECTEDLY"),
        ([failed(2, "TypeError: Unsupported BCG output type: X")], "BROKEN"),
    ],
)
def test_anything_else_than_expected_does_not_hold(records: list[Record], verdict: str) -> None:
    rows = judged(records, expect=EXPECT)
    assert verdict in verdicts(rows)
    assert conclusion(rows)[2] == 1


def test_one_served_prefix_compares_nothing() -> None:
    verdict, evidence, code = conclusion(judged([failed(0), served(1)]))
    assert (verdict, code) == ("INCONCLUSIVE", 3)
    assert "nothing was compared" in evidence


def test_a_missing_prefix_is_partial() -> None:
    rows = judge_all([0, 1], {0: served(0)}, recording, FLOOR)
    assert verdicts(rows) == ["REFERENCE", "NOT MEASURED"]
    assert conclusion(rows)[2] == 3


def test_without_a_floor_a_change_is_no_verdict() -> None:
    rows = judge_all([0, 1], {k: served(k) for k in (0, 1)}, lambda k: recording(k, shift=k * 1e-3), None)
    assert verdicts(rows) == ["REFERENCE", "INCONCLUSIVE"]
    assert conclusion(rows)[2] == 3


def test_an_unknown_argument_is_no_failure() -> None:
    rows = judged([Record(0, "t", "", "argument", reason="argument `--x` from patch 1 on"), served(1), served(2)])
    assert verdicts(rows) == ["UNKNOWN ARGUMENT", "REFERENCE", "EQUIVALENT"]
    assert rows[0].evidence == "argument `--x` from patch 1 on"
    assert conclusion(rows)[2] == 0
