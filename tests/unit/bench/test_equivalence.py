"""The equivalence test: right verdicts, honest error rates, and a repeat count that is enough."""

from __future__ import annotations

import math

import numpy as np
import pytest

from q4kit.stats.equivalence import Agreement, Reference, compare, power_to_agree, repeats_needed

TEN = Reference(10.0, 10.0)


@pytest.mark.parametrize(
    ("sample", "verdict"),
    [
        ([10.01, 9.99, 10.02, 9.98, 10.0], Agreement.AGREES),
        ([11.0, 11.02, 10.98, 11.01, 10.99], Agreement.FASTER),
        ([9.0, 9.02, 8.98, 9.01, 8.99], Agreement.SLOWER),
        ([9.0, 11.0, 10.0, 9.5, 10.5], Agreement.INCONCLUSIVE),
    ],
)
def test_verdicts(sample: list[float], verdict: Agreement) -> None:
    assert compare(sample, TEN, 0.03).verdict is verdict


def test_for_a_latency_less_is_faster() -> None:
    low = [9.0, 9.02, 8.98, 9.01, 8.99]
    assert compare(low, TEN, 0.03, higher_is_better=False).verdict is Agreement.FASTER


def test_one_sample_decides_nothing_and_asks_for_more() -> None:
    found = compare([10.0], TEN, 0.03)
    assert found.verdict is Agreement.INCONCLUSIVE
    assert found.more_repeats == 2


def test_not_significantly_different_is_not_agreement() -> None:
    """A noisy sample around the claim: a t test sees no difference, the equivalence test sees no proof."""
    assert compare([9.0, 11.0, 10.1], TEN, 0.03).verdict is Agreement.INCONCLUSIVE


def test_significantly_different_can_still_agree() -> None:
    """A precise 1 % difference lies inside a 3 % margin."""
    assert compare([10.1, 10.101, 10.099, 10.1], TEN, 0.03).verdict is Agreement.AGREES


def test_a_published_range_widens_the_limits() -> None:
    wide = Reference(57.1, 58.2)
    assert compare([59.0, 59.01, 58.99, 59.0], wide, 0.03).verdict is Agreement.AGREES
    assert compare([59.0, 59.01, 58.99, 59.0], Reference(57.1, 57.1), 0.03).verdict is Agreement.FASTER


def test_published_spread_makes_agreement_harder() -> None:
    sample = [10.05, 9.95, 10.0, 10.02, 9.98]
    assert compare(sample, TEN, 0.01).verdict is Agreement.AGREES
    assert compare(sample, Reference(10.0, 10.0, sd=0.3, n=3), 0.01).verdict is Agreement.INCONCLUSIVE


@pytest.mark.parametrize("difference", [-0.05, 0.05, 0.03, -0.03])
def test_false_agreement_is_at_most_five_percent(difference: float) -> None:
    assert power_to_agree(0.02, 5, 0.03, difference=difference) <= 0.052


@pytest.mark.parametrize(("cv", "n", "least"), [(0.005, 3, 0.99), (0.01, 5, 0.99), (0.02, 10, 0.97)])
def test_power_at_usual_spreads(cv: float, n: int, least: float) -> None:
    assert power_to_agree(cv, n, 0.03) >= least


@pytest.mark.parametrize(("cv", "difference"), [(0.02, 0.0), (0.02, 0.015), (0.05, 0.01)])
def test_recommended_repeats_reach_the_promised_power(cv: float, difference: float) -> None:
    n = repeats_needed(difference, cv, -0.03, 0.03)
    assert n is not None
    assert power_to_agree(cv, n, 0.03, difference=difference) >= 0.85
    assert power_to_agree(cv, max(2, n // 2), 0.03, difference=difference) < 0.9


def test_at_the_margin_no_number_of_repeats_decides() -> None:
    assert repeats_needed(0.03, 0.02, -0.03, 0.03) is None
    rng = np.random.default_rng(1)
    at_the_edge = list(10.3 + rng.normal(0, 0.001, 5) - 0.0)
    found = compare([x - (np.mean(at_the_edge) - 10.3) for x in at_the_edge], TEN, 0.03)
    assert found.verdict is Agreement.INCONCLUSIVE
    assert found.more_repeats is None


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (math.nan, 1.0)])
def test_a_reference_must_be_a_positive_range(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < low <= high"):
        Reference(low, high)


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1])
def test_margin_out_of_range_is_an_error(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        compare([1.0, 2.0], TEN, margin)
