"""Is a candidate run one more run of the same thing? An exact test against several A/A runs.

Under the hypothesis "nothing changed", the candidate's value at a position and the values of n earlier
runs at that position are exchangeable: any of the n + 1 could have been the candidate's. So the null
distribution of *any* statistic comes from redrawing, at every position, which of the n + 1 values plays
the candidate. That needs no model of the noise: heavy tails, positions that are noisy and positions that
are quiet are all carried by the data, and the false-alarm rate is exact for any n >= 2 (it does need
positions to be independent given the data; `homogeneity` in the caller guards that).

Eight kinds of change are looked for at once. Each statistic is put in units of its own redrawn standard
deviation, and the largest is compared with the redrawn distribution of the largest (the max-T procedure
of Westfall and Young, 1993), so looking for many things costs no false alarms.

One thing exchangeability cannot see: a single wrong position, however wrong, has chance 1/(n + 1) of
being the largest of its n + 1 values. For that there is a tail bound from the A/A noise (`spike`): a
log-normal tail at least as heavy as any of the noise's outer quantiles implies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.stats import norm

from q4kit.stats.resample import Floats

ALPHA = 0.005
"""False-alarm rate of one comparison, over all statistics and groups together."""
SPIKE_SHARE = 0.2
"""Part of `ALPHA` spent on isolated positions."""
REDRAWS = 2000
_TAIL_POINTS = (0.9, 0.99, 0.999)
_MIN_TAIL_SAMPLES = 40

STATISTICS: Mapping[str, str] = {
    "mean": "mean |deviation| (overall size)",
    "energy": "mean squared deviation (few large ones)",
    "log": "mean log |deviation| (every position a little noisier)",
    "scaled": "mean |deviation| in units of its position's own spread (quiet positions moved)",
    "bias": "mean signed deviation, either sign (systematic shift)",
    "exceed": "positions above the pooled 99 % point (damaged positions)",
    "bin": "worst bin's mean |deviation| (damage in one place)",
    "flips": "share of nonzero deviations (bits changed where they used not to)",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Positions that are judged together, e.g. one leg.

    Attributes:
        values: shape [positions, runs + 1]; column 0 is the candidate, the others are the A/A runs.
        bins: shape [positions], a small integer for each position's place.
    """

    name: str
    values: Floats
    bins: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        positions, columns = self.values.shape
        if columns < 3:
            raise ValueError(f"group {self.name!r}: {columns - 1} A/A runs, at least 2 are needed")
        if positions == 0 or self.bins.shape != (positions,):
            raise ValueError(f"group {self.name!r}: {positions} positions, {self.bins.shape} bins")
        if not np.isfinite(self.values).all():
            raise ValueError(f"group {self.name!r}: values that are not finite")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the test.

    Attributes:
        p: probability of so unusual a most unusual statistic when nothing changed; at least 1 / redraws.
        p_each: p of every statistic alone, keyed "group/statistic".
        leading: the most unusual statistic.
        spike_p: probability of so large a single deviation under the fitted tail.
        spike_at: (group, position) of the largest deviation.
        alarm: whether the test says that something changed.
    """

    p: float
    p_each: dict[str, float]
    leading: str
    spike_p: float
    spike_at: tuple[str, int] | None
    alarm: bool


def deviations(values: Floats) -> Floats:
    """Return each entry minus the mean of the others at its position, shape as `values`."""
    columns = values.shape[1]
    centred = values - values.mean(axis=1, keepdims=True)
    # Exactly equal entries must give exactly 0, which subtracting a rounded mean does not.
    centred[np.ptp(values, axis=1) == 0] = 0.0
    return np.asarray(centred * (columns / (columns - 1)), dtype=float)


def _features(group: Group) -> tuple[list[str], Floats]:
    """Return feature names and features [features, positions, columns], all equivariant under redrawing."""
    signed = deviations(group.values)
    size = np.abs(signed)
    spread = size.mean(axis=1, keepdims=True)
    positive = size[size > 0]
    tiny = float(np.median(positive)) * 1e-3 if positive.size else 1.0
    threshold = np.quantile(size, 0.99)
    features = {
        "mean": size,
        "energy": size**2,
        "log": np.log(size + tiny),
        "scaled": np.divide(size, spread, out=np.zeros_like(size), where=spread > 0),
        "bias": signed,
        "exceed": (size > threshold).astype(float),
        "flips": (size > 0).astype(float),
    }
    names = list(features)
    stacked = [features[name] for name in names]
    labels = np.unique(group.bins)
    if labels.size > 1:
        for label in labels:
            names.append(f"bin{label}")
            stacked.append(size * (group.bins == label)[:, None])
    return names, np.stack(stacked)


@dataclass(slots=True)
class ExchangeTest:
    """The test for groups of fixed shape; the redraws are made once and shared by all data.

    Args:
        shapes: (positions, columns) of each group, in order.
        redraws: draws of the null distribution, the observation among them; resolution of p is 1 / redraws.
        seed: fixes the redraws, so the same data always give the same verdict.
    """

    shapes: Sequence[tuple[int, int]]
    redraws: int = REDRAWS
    seed: int = 0
    _choices: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self._choices = []
        for positions, columns in self.shapes:
            chosen = draw.integers(0, columns, (self.redraws, positions))
            chosen[0] = 0  # row 0 is the observation itself
            flat = chosen + np.arange(positions) * columns
            # Sparse: one product gives every sum, without the threads of a dense BLAS on a busy machine.
            rows = np.arange(0, flat.size + 1, positions)
            self._choices.append(
                sparse.csr_array((np.ones(flat.size), flat.ravel(), rows), shape=(self.redraws, positions * columns))
            )

    def sums(self, index: int, group: Group) -> tuple[list[str], Floats]:
        """Return names and standardised statistics [redraws, statistics]; larger is more unusual."""
        names, features = _features(group)
        flat = features.reshape(len(names), -1)
        scale = np.abs(flat).max(axis=1, keepdims=True)
        scale[scale == 0] = 1.0
        # Sums of equal terms in another order differ in their last bits; ties must stay ties.
        sums = np.round(self._choices[index] @ (flat / scale).T, 9)
        spread = sums.std(axis=0)
        # A statistic that no redraw moves (all values equal) says nothing: 0 everywhere.
        unit = np.divide(sums - sums.mean(axis=0), spread, out=np.zeros_like(sums), where=spread > 1e-9)
        places = [at for at, name in enumerate(names) if name.startswith("bin")]
        kept = [at for at, name in enumerate(names) if not name.startswith("bin")]
        signed = names.index("bias")
        unit[:, signed] = np.abs(unit[:, signed])
        columns = [unit[:, at] for at in kept]
        if places:
            worst = unit[:, places].max(axis=1)
            # The largest of several standardised sums is itself put in units of its own spread.
            columns.append((worst - worst.mean()) / max(float(worst.std()), 1e-9))
        return [names[at] for at in kept] + ["bin"] * bool(places), np.stack(columns, axis=1)

    def run(self, groups: Sequence[Group], alpha: float = ALPHA) -> Outcome:
        """Return the outcome for one candidate."""
        found = [group.values.shape for group in groups]
        if found != [tuple(shape) for shape in self.shapes]:
            raise ValueError(f"groups of shape {found}, the test was made for {list(self.shapes)}")
        names: list[str] = []
        tables = []
        for index, group in enumerate(groups):
            own, table = self.sums(index, group)
            names += [f"{group.name}/{name}" for name in own]
            tables.append(table)
        table = np.concatenate(tables, axis=1)
        largest = table.max(axis=1)
        # Row 0 counts itself, so p is never 0 and the test is exact (Phipson and Smyth, 2010).
        p = float((largest >= largest[0]).mean())
        each = (table >= table[0]).mean(axis=0).tolist()
        spike_p, spike_at = spike(groups)
        alarm = p <= alpha * (1 - SPIKE_SHARE) or spike_p <= alpha * SPIKE_SHARE
        leading = names[int(table[0].argmax())]
        return Outcome(p, dict(zip(names, each, strict=True)), leading, spike_p, spike_at, alarm)


def spike(groups: Sequence[Group]) -> tuple[float, tuple[str, int] | None]:
    """Return the chance of the largest single deviation under the A/A tail, and where it is.

    The chance is of the maximum over all groups' positions; 1.0 where the A/A runs have too few nonzero
    deviations to fit one.
    """
    worst, where = 1.0, None
    for group in groups:
        own = deviations(group.values[:, 1:]) if group.values.shape[1] > 3 else None
        if own is None:
            # Two runs: their difference is the only deviation there is.
            own = (group.values[:, 1] - group.values[:, 2])[:, None]
        noise = np.abs(own).ravel()
        candidate = np.abs(group.values[:, 0] - group.values[:, 1:].mean(axis=1))
        at = int(candidate.argmax())
        chance = _tail_chance(noise, float(candidate[at]), candidate.size * len(groups))
        if chance < worst:
            worst, where = chance, (group.name, at)
    return worst, where


def _tail_chance(noise: Floats, value: float, trials: int) -> float:
    """Return P(max of `trials` draws >= value) under a log-normal tail at least as heavy as `noise`.

    sigma is the largest that any of the pooled 90, 99 and 99.9 % points implies against the median, plus
    10 %: noise whose tail is heavier than log-normal shows it in the outer points.
    """
    positive = noise[noise > 0]
    if positive.size < _MIN_TAIL_SAMPLES or value <= noise.max():
        return 1.0
    logs = np.log(positive)
    middle = float(np.median(logs))
    usable = [q for q in _TAIL_POINTS if positive.size * (1 - q) >= 1]
    sigma = 1.1 * max(float(np.quantile(logs, q) - middle) / float(norm.isf(1 - q)) for q in usable)
    if sigma <= 0:
        return 1.0
    single = float(norm.sf((math.log(value) - middle) / sigma)) * positive.size / noise.size
    return float(-np.expm1(trials * np.log1p(-min(single, 1 - 1e-12))))
