"""What two aligned runs differ by: the figures of a comparison, each with its error bar. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from q4kit.oracle.align import Divergence, ItemPair, Row, margin
from q4kit.stats.divergence import KlInterval, k3, topk_kl
from q4kit.stats.resample import Estimate, Floats, bootstrap_interval, quantile_interval, sign_test

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
"""Percentiles of the signed change. Symmetric ones are noise; a skew is damage."""
SEED_MEAN, SEED_MAX = 0.01, 0.5
"""Published fixed thresholds, nats: printed as a second policy so that old log entries can be re-checked."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A position where the two sides rank another token first."""

    item: str
    pos: int
    margin: float
    """Reference's gap between its two best, nats."""
    near_tie: bool


@dataclass(slots=True)
class Bin:
    """One place: a prompt, a depth in the context, or a range of decode steps.

    Attributes:
        sizes: |change| of its compared positions, nats.
        near_ties, real_flips: argmax changes there, up to the near-tie bound and wider. A flip of a segment's first
            token is in no `sizes`: its position is not scored, and it is no decode step.
    """

    sizes: list[float] = field(default_factory=list)
    near_ties: int = 0
    real_flips: int = 0

    @property
    def positions(self) -> int:
        """Number of compared positions."""
        return len(self.sizes)

    @property
    def mean(self) -> float | None:
        """Mean |change|, nats; None where nothing could be compared."""
        return float(np.mean(self.sizes)) if self.sizes else None

    @property
    def maximum(self) -> float | None:
        """Largest |change|, nats; None where nothing could be compared."""
        return max(self.sizes, default=None)

    def count(self, flip: Flip) -> None:
        """Add an argmax change."""
        if flip.near_tie:
            self.near_ties += 1
        else:
            self.real_flips += 1


@dataclass(frozen=True, slots=True)
class LegSummary:
    """Figures of one leg; changes are candidate minus reference, in nats.

    Attributes:
        positions: compared positions.
        lost: positions behind decode divergences.
        bounds: positions whose value is only an upper bound on the candidate's log-probability.
        mean, rms, bias: mean |change|, root mean square, signed mean.
        maximum: largest |change|.
        percentiles: signed, keyed by percent.
        signs: positive, negative, two-sided p of the sign test.
        k3: mean of exp(r) - 1 - r.
        kl: mean KL(reference || candidate) over positions with alternatives: proven low, conditional high.
        flips: argmax changes on both sides of the near-tie bound.
        bins: changes and flips by prompt, by depth in the context and by decode step.
    """

    leg: str
    positions: int
    lost: int
    bounds: int
    nonzero: int
    mean: Estimate
    rms: Estimate
    bias: Estimate
    maximum: float
    percentiles: dict[int, Estimate]
    signs: tuple[int, int, float]
    k3: Estimate
    kl: KlInterval | None
    flips: tuple[Flip, ...]
    divergences: tuple[Divergence, ...]
    bins: dict[str, Bin]

    @property
    def real_flips(self) -> int:
        """Number of argmax changes wider than the near-tie bound."""
        return sum(not flip.near_tie for flip in self.flips)

    @property
    def seed_holds(self) -> bool:
        """Whether the published fixed thresholds hold."""
        return self.mean.value <= SEED_MEAN and self.maximum <= SEED_MAX


def changes(rows: Sequence[Row]) -> Floats:
    """Return candidate minus reference, nats, shape [rows]."""
    return np.array([row.logprob - row.ref.logprob for row in rows])


def summarise(leg: str, pairs: Sequence[ItemPair], *, near_tie: float) -> LegSummary | None:
    """Return the figures of one leg; None when it has no position.

    Args:
        near_tie: an argmax change with a reference margin up to this is a near-tie, nats.
    """
    chosen = [pair for pair in pairs if pair.leg == leg]
    rows = [row for pair in chosen for row in pair.rows]
    if not rows:
        return None
    change = changes(rows)
    return LegSummary(
        leg=leg,
        positions=len(rows),
        lost=sum(pair.lost for pair in chosen),
        bounds=sum(row.bound for row in rows),
        nonzero=int((change != 0).sum()),
        mean=bootstrap_interval(np.abs(change), lambda values: values.mean(axis=-1)),
        rms=bootstrap_interval(change, lambda values: np.sqrt((values**2).mean(axis=-1))),
        bias=bootstrap_interval(change, lambda values: values.mean(axis=-1)),
        maximum=float(np.abs(change).max()),
        percentiles={percent: quantile_interval(change, percent / 100) for percent in PERCENTILES},
        signs=sign_test(change),
        k3=bootstrap_interval(k3(change), lambda values: values.mean(axis=-1)),
        kl=_mean_kl(rows),
        flips=tuple(flip for pair in chosen for _, _, flip in _flips(pair, near_tie)),
        divergences=tuple(pair.divergence for pair in chosen if pair.divergence),
        bins=_bins(chosen, near_tie),
    )


def _bins(pairs: Sequence[ItemPair], near_tie: float) -> dict[str, Bin]:
    """Return the bins that hold anything, by name in order."""
    found: defaultdict[str, Bin] = defaultdict(Bin)
    for pair in pairs:
        for step, row in enumerate(pair.rows, start=1):
            for name in _bin_names(pair, row, step):
                found[name].sizes.append(abs(row.logprob - row.ref.logprob))
        for step, row, flip in _flips(pair, near_tie):
            for name in _bin_names(pair, row, step):
                found[name].count(flip)
    return {name: found[name] for name in sorted(found)}


def _bin_names(pair: ItemPair, row: Row, step: int) -> list[str]:
    """Return the bins of a position: its prompt, its depth in the context (by factors of 4), its decode step if > 0."""

    def span(value: int, low: int) -> str:
        while value >= 4 * low:
            low *= 4
        return f"{low:5d} .. {4 * low - 1}"

    names = [f"prompt {pair.prompt}"]
    names.append(f"position {span(row.ref.pos, 256)}" if row.ref.pos >= 256 else "position     0 .. 255")
    if pair.leg == "decode" and step:
        names.append(f"decode step {span(step, 1)}")
    return names


def _mean_kl(rows: Sequence[Row]) -> KlInterval | None:
    """Return the mean of the positions' KL intervals; the assumed shift is the leg's largest."""
    listed = [row for row in rows if row.ref.top and row.other.top]
    if not listed:
        return None
    shift = max(topk_kl(row.ref.top, row.other.top).shift for row in listed)
    each = [topk_kl(row.ref.top, row.other.top, shift=shift) for row in listed]
    return KlInterval(
        math.fsum(interval.low for interval in each) / len(each),
        math.fsum(interval.high for interval in each) / len(each),
        sum(interval.missing for interval in each),
        shift,
    )


def _flips(pair: ItemPair, near_tie: float) -> Iterator[tuple[int, Row, Flip]]:
    """Yield decode step (0 for the extend's token), row and flip of every argmax change of an item."""
    for step, row in enumerate(pair.rows, start=1):
        if row.ref.top and row.other.top and row.ref.top[0][0] != row.other.top[0][0]:
            gap = margin(row.ref)
            yield step, row, Flip(pair.name, row.ref.pos, gap, gap <= near_tie)
    if pair.divergence and pair.divergence.offset == 0:
        # The extend's token is no scored row, but its flip lost the whole segment.
        gap = pair.divergence.margin
        yield 0, pair.divergence.row, Flip(pair.name, pair.divergence.row.ref.pos, gap, gap <= near_tie)


def self_consistency(positions: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the mean k3 of decode against prefill inside one run.

    Args:
        positions: (decode logprob, teacher-forced logprob) of the same token, nats.

    SGLang's own CI uses bands of 0.002 to 0.015 for hybrid and mixture models on sampled text; greedy text
    gives smaller numbers, so read it against the other side's, not against those bands.
    """
    if not positions:
        return None
    ratio = np.array([forced - decoded for decoded, forced in positions])
    return bootstrap_interval(k3(ratio), lambda values: values.mean(axis=-1))
