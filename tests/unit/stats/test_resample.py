"""Estimates against closed forms and against counted coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from q4kit.stats.resample import bootstrap_interval, quantile_interval, sign_test

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=80), st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.99]))
def test_quantile_interval_encloses_the_sample_quantile(values: list[float], q: float) -> None:
    found = quantile_interval(values, q)
    assert found.low <= found.value <= found.high
    assert found.value in values


def test_median_interval_of_ten_has_the_ranks_of_the_table() -> None:
    # For n = 10 the 95 % interval of the median lies between the 2nd and the 9th order statistic.
    found = quantile_interval(range(1, 11), 0.5)
    assert (found.low, found.high) == (2, 9)


def test_a_sample_too_small_for_a_percentile_has_an_open_end_not_its_own_extreme() -> None:
    found = quantile_interval(range(100), 0.999)
    assert found.high == math.inf


def test_quantile_interval_covers_at_least_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    truth = stats.lognorm(1.6).ppf(0.95)
    hits = sum(
        found.low <= truth <= found.high
        for found in (quantile_interval(draw.lognormal(0, 1.6, 200), 0.95) for _ in range(400))
    )
    assert hits >= 0.93 * 400


def test_bootstrap_of_a_mean_agrees_with_the_normal_theory() -> None:
    sample = np.random.default_rng(1).normal(3.0, 2.0, 2000)
    found = bootstrap_interval(sample, lambda values: values.mean(axis=-1))
    half = 1.96 * sample.std(ddof=1) / math.sqrt(sample.size)
    assert found.value == pytest.approx(sample.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)


def test_bootstrap_gives_the_same_interval_for_the_same_data() -> None:
    sample = np.random.default_rng(2).normal(size=50)
    mean = lambda values: values.mean(axis=-1)  # noqa: E731
    assert bootstrap_interval(sample, mean) == bootstrap_interval(sample, mean)


def test_sign_test_is_the_binomial_one_and_ignores_zeros() -> None:
    assert sign_test([1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 0, 0]) == (8, 2, pytest.approx(0.109375))


def test_sign_test_of_nothing_says_nothing() -> None:
    assert sign_test([0.0, 0.0]) == (0, 0, 1.0)


def test_an_empty_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        quantile_interval([], 0.5)
