"""Intervals against published values, against simulation, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q4kit.stats.intervals import clopper_pearson, mann_kendall, t_interval, trials_for_lower_bound


@pytest.mark.parametrize(("n", "bound"), [(5, 0.549), (20, 0.861), (59, 0.950)])
def test_all_found_is_no_proof_of_100_percent(n: int, bound: float) -> None:
    assert clopper_pearson(n, n).low == pytest.approx(bound, abs=1e-3)
    assert clopper_pearson(n, n).high == 1.0


def test_two_sided_interval_has_the_textbook_value() -> None:
    """Clopper and Pearson's chart: 10 of 50 at 95 % gives 10.0 % to 33.7 %."""
    found = clopper_pearson(10, 50, side="two-sided")
    assert (found.low, found.high) == pytest.approx((0.1003, 0.3372), abs=1e-4)


def test_no_trials_say_nothing() -> None:
    assert (clopper_pearson(0, 0).low, clopper_pearson(0, 0).high) == (0.0, 1.0)


def test_more_successes_than_trials_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"0\.\.3, found 4"):
        clopper_pearson(4, 3)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.floats(0.02, 0.98))
def test_lower_bound_covers_at_least_as_often_as_it_says(n: int, p: float) -> None:
    """P(bound > p) <= 5 %, summed exactly over the binomial distribution."""
    from scipy.stats import binom

    ks = np.arange(n + 1)
    too_high = np.array([clopper_pearson(int(k), n).low > p for k in ks])
    assert float(binom.pmf(ks, n, p)[too_high].sum()) <= 0.05 + 1e-9


@settings(deadline=None)
@given(st.floats(0.01, 0.995))
def test_trials_for_a_bound_are_enough_and_one_fewer_is_not(bound: float) -> None:
    n = trials_for_lower_bound(bound)
    assert clopper_pearson(n, n).low >= bound - 1e-9
    if n > 1:
        assert clopper_pearson(n - 1, n - 1).low < bound


def test_t_interval_uses_the_sample_standard_deviation() -> None:
    """Population sd would be too small by 1.22 at n = 3."""
    found = t_interval([1.0, 2.0, 3.0])
    assert found.sd == pytest.approx(1.0)
    assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_t_interval_of_one_sample_is_unbounded_and_json_ready() -> None:
    found = t_interval([5.0])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert found.to_json() == {
        "n": 1,
        "mean": 5.0,
        "sd": None,
        "low": None,
        "high": None,
        "confidence": 0.95,
        "cut": False,
    }


@pytest.mark.parametrize("sample", [[], [1.0, math.nan], [math.inf]])
def test_t_interval_refuses_nothing_and_nan(sample: list[float]) -> None:
    with pytest.raises(ValueError, match="t_interval needs"):
        t_interval(sample)


def test_cutting_at_0_covers_the_true_mean_of_positive_values_exactly_as_often() -> None:
    """Skewed and wide, so that most intervals are cut; what is cut off cannot hold the mean."""
    rng = np.random.default_rng(5)
    whole = [t_interval(list(rng.gamma(0.5, 100, 3))) for _ in range(2000)]
    cut = [i.cut_at(0.0) for i in whole]
    assert np.mean([i.cut for i in cut]) > 0.5
    assert [i.low <= 50 <= i.high for i in cut] == [i.low <= 50 <= i.high for i in whole]
    assert all(c.low == max(w.low, 0.0) and (c.mean, c.sd, c.high) == (w.mean, w.sd, w.high)
               for c, w in zip(cut, whole, strict=True))  # fmt: skip


def test_t_interval_covers_the_true_mean() -> None:
    rng = np.random.default_rng(7)
    hits = [(i := t_interval(list(rng.normal(50, 2, 5)))).low <= 50 <= i.high for _ in range(2000)]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)


def test_throttling_shows_as_drift() -> None:
    found = mann_kendall([57.0, 56.2, 55.1, 54.8, 53.9])
    assert found.drifts
    assert found.slope_per_repeat == pytest.approx(-0.0138, abs=1e-3)


def test_four_repeats_cannot_show_drift() -> None:
    found = mann_kendall([4.0, 3.0, 2.0, 1.0])
    assert not found.detectable
    assert not found.drifts


def test_noise_rarely_counts_as_drift() -> None:
    rng = np.random.default_rng(3)
    share = np.mean([mann_kendall(list(rng.normal(50, 1, 8))).drifts for _ in range(1000)])
    assert share <= 0.06
