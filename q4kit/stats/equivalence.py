"""Does a measured mean agree with a published value within a margin? Two one-sided tests (TOST). Pure.

The answer is read off one interval: the 1 - 2 * alpha t interval of the relative difference `mean / claim - 1`.
Inside the margin on both sides: AGREES. Wholly above or below it: FASTER or SLOWER. Anything else has not been
decided by this sample, and `repeats_needed` says how many more would decide it.

Source: D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987), 657-680 (interval inclusion form of TOST).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats

from q4kit.stats.intervals import t_interval

MAX_REPEATS = 1000
"""Beyond this many repeats the true difference sits at the margin's edge: no realistic sample decides it."""


class Agreement(StrEnum):
    """Where the measured mean lies against the published one, for a quantity that is better when `higher`."""

    AGREES = "AGREES"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Equivalence:
    """Verdict and the numbers it rests on. Differences and margins are relative (0.03 = 3 %)."""

    verdict: Agreement
    difference: float
    low: float
    high: float
    lower_limit: float
    upper_limit: float
    alpha: float
    n: int
    more_repeats: int | None
    """Repeats still to run when INCONCLUSIVE; None when no number up to MAX_REPEATS is expected to decide."""

    def to_json(self) -> dict[str, object]:
        data = dict(self.__dict__)
        data["verdict"] = self.verdict.value
        for key in ("low", "high"):
            data[key] = data[key] if math.isfinite(data[key]) else None
        return data


@dataclass(frozen=True)
class Reference:
    """A published value or range (`low` < `high`), with its own spread where the source gives one."""

    low: float
    high: float
    sd: float | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and 0 < self.low <= self.high):
            raise ValueError(f"a reference needs 0 < low <= high, found low={self.low} high={self.high}")

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def compare(
    sample: Sequence[float], reference: Reference, margin: float, *, alpha: float = 0.05, higher_is_better: bool = True
) -> Equivalence:
    """Return the verdict of `sample` against `reference` within the relative `margin`.

    The limits are `reference.low * (1 - margin)` and `reference.high * (1 + margin)`; differences are stated
    relative to the reference's middle. When the source gives sd and n, its uncertainty is added (Welch).
    """
    if not 0 < margin < 1:
        raise ValueError(f"margin must lie strictly between 0 and 1, found {margin}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie strictly between 0 and 0.5, found {alpha}")
    summary = t_interval(sample)
    middle = reference.middle
    difference = summary.mean / middle - 1
    lower = reference.low * (1 - margin) / middle - 1
    upper = reference.high * (1 + margin) / middle - 1
    if summary.n < 2:
        return Equivalence(Agreement.INCONCLUSIVE, difference, -math.inf, math.inf, lower, upper, alpha, summary.n, 2)

    own = summary.sd**2 / summary.n
    theirs = reference.sd**2 / reference.n if reference.sd and reference.n and reference.n > 1 else 0.0
    half = _half_width(own, theirs, summary.n, reference.n or 0, alpha) / middle
    low, high = difference - half, difference + half
    verdict = decide(low, high, lower, upper, higher_is_better=higher_is_better)
    more: int | None = 0
    if verdict is Agreement.INCONCLUSIVE:
        needed = repeats_needed(
            difference, summary.sd / middle, lower, upper, alpha=alpha, other_variance=theirs / middle**2
        )
        more = None if needed is None else max(1, needed - summary.n)
    return Equivalence(verdict, difference, low, high, lower, upper, alpha, summary.n, more)


def decide(low: float, high: float, lower: float, upper: float, *, higher_is_better: bool = True) -> Agreement:
    """Return where the interval `low..high` of a relative difference lies against the limits `lower..upper`."""
    if lower <= low and high <= upper:
        return Agreement.AGREES
    if low > upper or high < lower:
        above = low > upper
        return Agreement.FASTER if above == higher_is_better else Agreement.SLOWER
    return Agreement.INCONCLUSIVE


def compare_statistic(
    groups: Sequence[Sequence[float]],
    statistic: Callable[..., float],
    reference: Reference,
    margin: float,
    *,
    alpha: float = 0.05,
    higher_is_better: bool = True,
    resamples: int = 4999,
) -> Equivalence:
    """Return the verdict for a statistic that is no mean: a median, a ratio of sums, a mean of medians.

    `statistic` takes one array a group; its 1 - 2 alpha interval is a percentile bootstrap, resampled within groups
    (seeded: the same data give the same answer). Fewer than five values in a group decide nothing.
    """
    middle = reference.middle
    lower, upper = reference.low * (1 - margin) / middle - 1, reference.high * (1 + margin) / middle - 1
    value = float(statistic(*groups))
    n = sum(len(g) for g in groups)
    if min(len(g) for g in groups) < 5:
        low, high = -math.inf, math.inf
    else:
        interval = stats.bootstrap(
            tuple(groups), statistic, confidence_level=1 - 2 * alpha, n_resamples=resamples, method="percentile",
            vectorized=False, rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(interval.low) / middle - 1, float(interval.high) / middle - 1
    verdict = decide(low, high, lower, upper, higher_is_better=higher_is_better)
    more = 0 if verdict is not Agreement.INCONCLUSIVE else None
    return Equivalence(verdict, value / middle - 1, low, high, lower, upper, alpha, n, more)


def _half_width(own: float, theirs: float, n: int, reference_n: int, alpha: float) -> float:
    """Return the half width of the 1 - 2 alpha interval of a difference of means (Welch-Satterthwaite degrees)."""
    variance = own + theirs
    if variance == 0:
        return 0.0
    degrees = variance**2 / (own**2 / (n - 1) + (theirs**2 / (reference_n - 1) if theirs else 0.0))
    return float(stats.t.ppf(1 - alpha, degrees)) * math.sqrt(variance)


def repeats_needed(
    difference: float,
    cv: float,
    lower: float,
    upper: float,
    *,
    alpha: float = 0.05,
    power: float = 0.9,
    other_variance: float = 0.0,
) -> int | None:
    """Return the least n for which the interval is expected to clear the nearest limit with `power`.

    Takes the observed relative `difference` and `cv` for the true ones, which is the usual planning assumption.
    None when `MAX_REPEATS` would not do.
    """
    room = min(abs(difference - lower), abs(difference - upper))
    inside = lower < difference < upper
    # Inside, both tests must pass: split the miss between the two sides when the difference is near the middle.
    beta = (1 - power) / 2 if inside else 1 - power
    for n in range(2, MAX_REPEATS + 1):
        spread = math.sqrt(cv**2 / n + other_variance)
        if (stats.t.ppf(1 - alpha, n - 1) + stats.t.ppf(1 - beta, n - 1)) * spread <= room:
            return n
    return None


def power_to_agree(
    cv: float,
    n: int,
    margin: float,
    *,
    difference: float = 0.0,
    alpha: float = 0.05,
    draws: int = 20_000,
    seed: int = 0,
) -> float:
    """Return the share of simulated samples of size n that end in AGREES (for docs and tests)."""
    rng = np.random.default_rng(seed)
    data = rng.normal(1 + difference, cv, size=(draws, n))
    half = stats.t.ppf(1 - alpha, n - 1) * data.std(axis=1, ddof=1) / math.sqrt(n)
    centre = data.mean(axis=1) - 1
    return float(np.mean((centre - half >= -margin) & (centre + half <= margin)))
