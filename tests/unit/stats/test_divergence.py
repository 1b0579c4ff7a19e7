"""Divergences against exact values of known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q4kit.stats.divergence import k3, topk_kl

weights = st.lists(st.floats(0.01, 10.0), min_size=6, max_size=6)


def ranked(probabilities: np.ndarray, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [(int(token), math.log(probabilities[token])) for token in order]


def test_k3_of_no_change_is_zero_and_grows_as_half_the_square() -> None:
    assert k3(np.array([0.0]))[0] == 0.0
    assert k3(np.array([1e-3]))[0] == pytest.approx(0.5e-6, rel=1e-3)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_k3_is_never_negative(ratios: list[float]) -> None:
    assert (k3(np.array(ratios)) >= 0).all()


def test_k3_averages_to_the_divergence_of_what_was_sampled() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    exact = float((p * np.log(p / q)).sum())
    expected = float((p * k3(np.log(q / p))).sum())
    assert expected == pytest.approx(exact)


@given(weights, weights, st.integers(2, 6), st.integers(2, 6))
def test_the_proven_end_never_exceeds_the_true_divergence(
    left: list[float], right: list[float], k: int, use: int
) -> None:
    p, q = np.array(left) / sum(left), np.array(right) / sum(right)
    exact = float((p * np.log(p / q)).sum())
    found = topk_kl(ranked(p, k), ranked(q, k), use=use)
    assert found.low <= exact + 1e-12


def test_mass_left_over_by_rounding_on_one_side_is_no_infinite_divergence() -> None:
    p, q = np.array([1.0] * 5 + [1.25]) / 6.25, np.array([1.0] * 6) / 6.0
    exact = float((p * np.log(p / q)).sum())
    assert topk_kl(ranked(p, 6), ranked(q, 6), use=6).low == pytest.approx(exact)


def test_real_mass_on_ids_that_the_other_side_excludes_is_infinite() -> None:
    assert topk_kl([(0, np.log(0.9))], [(0, 0.0)]).low == np.inf


@given(weights, weights, st.integers(2, 6))
def test_the_conditional_end_holds_when_its_condition_does(left: list[float], right: list[float], k: int) -> None:
    p, q = np.array(left) / sum(left), np.array(right) / sum(right)
    exact = float((p * np.log(p / q)).sum())
    true_shift = float(np.abs(np.log(p / q)).max())
    assert topk_kl(ranked(p, k), ranked(q, k), shift=true_shift).high >= exact - 1e-12


def test_complete_lists_give_the_exact_divergence() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    found = topk_kl(ranked(p, 3), ranked(q, 3))
    assert found.low == pytest.approx(float((p * np.log(p / q)).sum()))
    assert found.high == pytest.approx(found.low, abs=1e-9)
    assert found.missing == 0


def test_a_token_missing_on_the_other_side_is_bounded_not_set_to_1e_12() -> None:
    p = [(1, math.log(0.6)), (2, math.log(0.3))]
    q = [(1, math.log(0.6)), (3, math.log(0.1))]
    found = topk_kl(p, q)
    assert found.missing == 1
    # Token 2 has at most 0.1 there, so it fell by at least ln 3; a floor of 1e-12 would say 26 nats.
    assert found.shift == pytest.approx(math.log(3))
    assert found.high < 0.6


def test_an_empty_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty list"):
        topk_kl([], [(1, -1.0)])
