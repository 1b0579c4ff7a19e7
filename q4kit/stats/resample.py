"""Estimates with error bars that assume no distribution: order statistics, bootstrap, signs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def to_json(self) -> list[float]:
        """Return [value, low, high]."""
        return [self.value, self.low, self.high]


def quantile_interval(samples: Sequence[float] | Floats, q: float, confidence: float = 0.95) -> Estimate:
    """Return a quantile (an order statistic, not interpolated) with its distribution-free interval.

    The ends are the order statistics whose binomial(n, q) ranks cover `confidence`; where the sample is
    too small to bound one side, that end is infinite rather than the sample's extreme. Source: David and
    Nagaraja, Order Statistics, 7.1.
    """
    values = np.sort(np.asarray(samples, dtype=float))
    _require(values.size > 0 and 0 < q < 1, f"{values.size} samples, q={q}")
    n = values.size
    tail = (1 - confidence) / 2
    # P(X_(k) <= x_q) = P(Bin(n, q) >= k), with X_(k) the k-th smallest, k from 1.
    low_rank = int(stats.binom.ppf(tail, n, q))
    high_rank = int(stats.binom.ppf(1 - tail, n, q)) + 1
    low = float(values[low_rank - 1]) if low_rank >= 1 else -math.inf
    high = float(values[high_rank - 1]) if high_rank <= n else math.inf
    return Estimate(float(np.quantile(values, q, method="inverted_cdf")), low, high)


def bootstrap_interval(
    samples: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Return a statistic with its percentile bootstrap interval.

    Args:
        samples: values, shape [n].
        statistic: maps [..., n] to [...], vectorised over the leading axes.
        seed: of the resampling; the same data give the same interval.
    """
    _require(samples.size > 0, "no samples")
    draw = np.random.default_rng(seed)
    picks = draw.integers(0, samples.size, (resamples, samples.size))
    replicates = statistic(samples[picks])
    low, high = np.quantile(replicates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(statistic(samples)), float(low), float(high))


def sign_test(differences: Sequence[float] | Floats) -> tuple[int, int, float]:
    """Return (positive, negative, two-sided exact p) of the signs; zeros carry no sign and are left out."""
    values = np.asarray(differences, dtype=float)
    positive, negative = int((values > 0).sum()), int((values < 0).sum())
    if positive + negative == 0:
        return 0, 0, 1.0
    return positive, negative, float(stats.binomtest(positive, positive + negative).pvalue)


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(f"out of range: {found}")
