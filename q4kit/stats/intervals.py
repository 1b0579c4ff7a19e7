"""Confidence intervals for proportions and means. Pure; scipy does the distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

Side = Literal["two-sided", "lower", "upper"]
_ALTERNATIVE: dict[Side, Literal["two-sided", "greater", "less"]] = {
    "two-sided": "two-sided",
    "lower": "greater",
    "upper": "less",
}


@dataclass(frozen=True)
class Interval:
    """A closed interval `[low, high]` that covers the true value with probability `confidence`."""

    low: float
    high: float
    confidence: float

    def to_json(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high, "confidence": self.confidence}


def clopper_pearson(successes: int, trials: int, *, confidence: float = 0.95, side: Side = "lower") -> Interval:
    """Return the exact binomial interval for `successes` of `trials`.

    `lower` (the default) is the one-sided bound a retrieval claim rests on: 5/5 gives 0.549, 20/20 0.861.
    With no trials nothing is known: [0, 1].

    Source: Clopper and Pearson, Biometrika 26 (1934), 404-413.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie in 0..{trials}, found {successes}")
    if trials == 0:
        return Interval(0.0, 1.0, confidence)
    found = stats.binomtest(successes, trials, alternative=_ALTERNATIVE[side]).proportion_ci(confidence, method="exact")
    return Interval(float(found.low), float(found.high), confidence)


def trials_for_lower_bound(bound: float, *, confidence: float = 0.95) -> int:
    """Return the least n whose n/n successes have a one-sided lower bound of at least `bound` (0.95 needs 59)."""
    if not 0 < bound < 1:
        raise ValueError(f"bound must lie strictly between 0 and 1, found {bound}")
    # n/n has the closed form bound = alpha**(1/n); the tiny slack keeps exact powers from rounding up.
    return math.ceil(math.log(1 - confidence) / math.log(bound) - 1e-9)


@dataclass(frozen=True)
class MeanInterval:
    """Mean of a sample with its Student t interval; `sd` is the sample (n - 1) standard deviation.

    `cut` says that `low` is a bound of the quantity itself and not mean - t sd / sqrt(n): see `cut_at`.
    """

    n: int
    mean: float
    sd: float
    low: float
    high: float
    confidence: float
    cut: bool = False

    def cut_at(self, least: float) -> MeanInterval:
        """Return the interval without what lies below `least`, for a quantity that never does.

        Its true mean does not lie there either, so the coverage is that of the whole interval. A single sample, whose
        interval is unbounded, stays as it is.
        """
        if self.n < 2 or self.low >= least:
            return self
        return replace(self, low=least, cut=True)

    @property
    def cv(self) -> float:
        """Coefficient of variation, sd / mean."""
        return self.sd / self.mean if self.mean else math.inf

    def to_json(self) -> dict[str, float | int | bool | None]:
        finite = {
            k: (v if math.isfinite(v) else None) for k, v in (("sd", self.sd), ("low", self.low), ("high", self.high))
        }
        return {"n": self.n, "mean": self.mean, **finite, "confidence": self.confidence, "cut": self.cut}


def t_interval(sample: Sequence[float], *, confidence: float = 0.95) -> MeanInterval:
    """Return the mean and its two-sided t interval; one sample has an unbounded interval, none is an error."""
    n = len(sample)
    if n == 0:
        raise ValueError("t_interval needs at least one sample, found none")
    if not all(math.isfinite(x) for x in sample):
        raise ValueError(f"t_interval needs finite samples, found {list(sample)}")
    mean = math.fsum(sample) / n
    if n == 1:
        return MeanInterval(1, mean, math.nan, -math.inf, math.inf, confidence)
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in sample) / (n - 1))
    half = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * sd / math.sqrt(n)
    return MeanInterval(n, mean, sd, mean - half, mean + half, confidence)


@dataclass(frozen=True)
class Trend:
    """Monotone trend of a sample over its order: Mann-Kendall test and Theil-Sen slope.

    `slope_per_repeat` is relative to the sample's median (0.01 = 1 % a repeat); `detectable` says whether n is
    large enough for the exact test to reach `alpha` at all.
    """

    n: int
    tau: float
    p_value: float
    slope_per_repeat: float
    alpha: float
    detectable: bool

    @property
    def drifts(self) -> bool:
        return self.detectable and self.p_value < self.alpha

    def to_json(self) -> dict[str, float | int | bool]:
        return {**self.__dict__, "drifts": self.drifts}


def mann_kendall(sample: Sequence[float], *, alpha: float = 0.05) -> Trend:
    """Return the trend of `sample` over its order (thermal throttling, a cache that fills, a leak).

    With fewer than five repeats the exact two-sided p value cannot fall below 0.05 (n = 4: 2/4! = 0.083).
    """
    n = len(sample)
    detectable = n >= 2 and 2 / math.factorial(n) < alpha
    if n < 2 or len(set(sample)) == 1:
        return Trend(n, 0.0, 1.0, 0.0, alpha, detectable)
    order = list(range(n))
    # scipy's default picks the exact distribution for small samples without ties.
    tau, p_value = stats.kendalltau(order, sample)
    slope = float(stats.theilslopes(sample, order).slope)
    middle = float(sorted(sample)[n // 2])
    return Trend(n, float(tau), float(p_value), slope / middle if middle else math.inf, alpha, detectable)
