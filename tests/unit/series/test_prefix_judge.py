"""Where a red test may fail, as its marker declares it."""

from __future__ import annotations

from typing import Any

import pytest

from q4kit.series.prefix_tests import judge


def item(**found: Any) -> dict[str, Any]:
    return {
        "red": True,
        "red_in_setup": False,
        "outcome": "failed",
        "when": "call",
        "error": "X",
        "message": "",
    } | found


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (item(), True),
        (item(when="setup"), False),
        (item(when="setup", red_in_setup=True), True),
        (item(when="setup", red_in_setup=True, error="FixtureLookupError"), False),
        (item(when="teardown", red_in_setup=True), False),
        (item(outcome="passed", red_in_setup=True), False),
        (item(outcome="skipped", when="setup", red_in_setup=True), False),
    ],
)
def test_a_fixture_may_show_the_fault_only_where_declared(found: dict[str, Any], holds: bool) -> None:
    assert (judge("t", 3, 2, found).problem == "") is holds


def test_a_declared_fixture_does_not_excuse_a_failure_with_the_patch() -> None:
    assert (
        judge("t", 3, 3, item(when="setup", red_in_setup=True)).problem == "fails in its setup phase, expected to pass"
    )
