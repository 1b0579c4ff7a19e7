"""The verdict: EQUIVALENT, DIFFERENT or INCONCLUSIVE, with the one line of evidence it rests on. Pure.

EQUIVALENT is a claim with a size: no change was seen *and* a fault of the stated size (by default 2 % of
the positions wrong by 0.2 nats, in either leg) would have been seen in 99 of 100 comparisons with this
floor. Without such power the answer is INCONCLUSIVE, never EQUIVALENT by lack of data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from q4kit.oracle.align import LEGS, ItemPair, pair
from q4kit.oracle.floor import Floor, recording_id
from q4kit.oracle.recording import Recording
from q4kit.oracle.summary import LegSummary, self_consistency, summarise
from q4kit.stats.exchange import ALPHA, STATISTICS, ExchangeTest, Group, Outcome, deviations
from q4kit.stats.power import Fault, detection_rate
from q4kit.stats.resample import Estimate, Floats

EQUIVALENT, DIFFERENT, INCONCLUSIVE = "EQUIVALENT", "DIFFERENT", "INCONCLUSIVE"

REQUIRED_FAULT = Fault(share=0.02, size=0.2)
REQUIRED_POWER = 0.99
MIN_KEPT = 0.5
"""Least share of a leg's positions that must survive decode divergences for EQUIVALENT."""


@dataclass(slots=True)
class Comparison:
    """Everything a comparison found.

    Attributes:
        floor_size: per leg, mean |change| and maximum between A/A runs and the reference, nats.
        outcome: of the exchangeability test; None without a usable floor.
        power: share of planted faults of the required size that the test catches, per leg.
        heterogeneous: ids of floor runs that the test itself would call different from the others.
    """

    verdict: str
    evidence: str
    legs: dict[str, LegSummary]
    floor_size: dict[str, tuple[float, float]]
    outcome: Outcome | None
    power: dict[str, float]
    heterogeneous: list[str]
    consistency: dict[str, Estimate | None]
    warnings: list[str] = field(default_factory=list)


def floor_values(floor: Floor, reference: Recording, pairs: Sequence[ItemPair]) -> dict[str, Group]:
    """Return, per leg, the values of candidate, reference and floor runs at their common positions.

    Column 0 is the candidate, column 1 the reference, the others the floor's runs, without the
    reference's own run if the floor holds it.
    """
    own = recording_id(reference)
    keep = [index for index, run in enumerate(floor.runs) if run["id"] != own]
    rows: dict[str, list[list[float]]] = {leg: [] for leg in LEGS}
    bins: dict[str, list[int]] = {leg: [] for leg in LEGS}
    prompts = list(dict.fromkeys(item.prompt for item in pairs))
    for found, item, result in zip(pairs, floor.items, reference.results, strict=True):
        first = 0 if found.leg == "prefill" else 1
        tokens = [position.token for position in result.positions]
        agreed = _common_prefix(tokens, item.tokens)
        usable = min([agreed, *(len(item.logprobs[index]) for index in keep)])
        for offset, row in enumerate(found.rows, start=first):
            if offset < usable:
                rows[found.leg].append(
                    [row.logprob, row.ref.logprob, *(item.logprobs[index][offset] for index in keep)]
                )
                bins[found.leg].append(prompts.index(found.prompt))
    return {
        leg: Group(leg, np.array(rows[leg]), np.array(bins[leg], dtype=np.int64))
        for leg in LEGS
        if rows[leg] and len(rows[leg][0]) >= 3
    }


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return index
    return len(left)


def compare(
    reference: Recording,
    candidate: Recording,
    floor: Floor | None,
    *,
    tolerance: float | None = None,
    fault: Fault = REQUIRED_FAULT,
    alpha: float = ALPHA,
) -> Comparison:
    """Return the comparison of two recordings that `align.check_plans` has passed.

    Args:
        floor: A/A runs of the reference's configuration.
        tolerance: a largest |change| that the user declares to be no difference, nats. It overrules the
            floor, and the evidence says so.
        fault: the size of fault that EQUIVALENT must exclude.
        alpha: false-alarm rate.
    """
    pairs = pair(reference, candidate)
    groups = floor_values(floor, reference, pairs) if floor else {}
    sizes = {leg: floor_size(group.values[:, 1:]) for leg, group in groups.items()}
    noise = max((largest for _, largest in sizes.values()), default=0.0)
    # Both of the two best may move by the floor's largest change, in opposite directions.
    near_tie = 2 * max(noise, tolerance or 0.0)
    legs = {leg: found for leg in LEGS if (found := summarise(leg, pairs, near_tie=near_tie)) is not None}
    result = Comparison(
        verdict=INCONCLUSIVE,
        evidence="",
        legs=legs,
        floor_size=sizes,
        outcome=None,
        power={},
        heterogeneous=[],
        consistency={
            "reference": self_consistency(_decoded_and_forced(reference)),
            "candidate": self_consistency(_decoded_and_forced(candidate)),
        },
    )
    lost = [leg for leg in LEGS if leg not in legs and any(found.leg == leg for found in pairs)]
    if lost:
        _all_lost(result, lost[0], pairs, near_tie)
    else:
        _decide(result, groups, floor, tolerance, fault, alpha)
    return result


def _all_lost(result: Comparison, leg: str, pairs: Sequence[ItemPair], near_tie: float) -> None:
    """Fill in the verdict of a leg that diverged at the first token of every segment."""
    margins = [found.divergence.margin for found in pairs if found.leg == leg and found.divergence]
    real = sum(gap > near_tie for gap in margins)
    result.verdict = DIFFERENT if real else INCONCLUSIVE
    result.evidence = (
        f"every {leg} segment diverges at its first token ({len(margins)} segments, {real} of them at a margin above "
        f"{near_tie:.3g} nats), so no {leg} position can be compared"
    )


def _decide(
    result: Comparison,
    groups: Mapping[str, Group],
    floor: Floor | None,
    tolerance: float | None,
    fault: Fault,
    alpha: float,
) -> None:
    """Fill in verdict and evidence."""
    legs = result.legs
    worst = max(leg.maximum for leg in legs.values())
    diverged = sum(len(leg.divergences) for leg in legs.values())
    positions = sum(leg.positions for leg in legs.values())
    if worst == 0.0 and diverged == 0:
        result.verdict = EQUIVALENT
        result.evidence = f"bit-identical: all {positions} log-probabilities and all generated tokens are equal"
        return
    scarce = [leg for leg in legs.values() if leg.positions < MIN_KEPT * (leg.positions + leg.lost)]
    flips = sum(leg.real_flips for leg in legs.values())
    if tolerance is not None and worst <= tolerance and flips == 0 and not scarce:
        result.verdict = EQUIVALENT
        result.evidence = (
            f"within the stated tolerance: max |change| {worst:.3g} <= {tolerance:.3g} nats on {positions} "
            "positions, no real argmax flip (a tolerance of yours, not a measured floor)"
        )
        return
    if floor is None or set(groups) != set(legs):
        missing = "no floor was given" if floor is None else "the floor does not cover every leg"
        result.evidence = f"{missing}, so a max |change| of {worst:.3g} nats cannot be told from noise"
        return
    zero = [leg for leg in groups if result.floor_size[leg][1] == 0.0]
    changed = [leg for leg in zero if legs[leg].maximum > 0 or legs[leg].divergences]
    if changed:
        leg = legs[changed[0]]
        result.verdict = DIFFERENT
        result.evidence = (
            f"the {leg.leg} floor is exactly zero over {len(floor.runs)} runs, and {leg.nonzero} of "
            f"{leg.positions} positions changed (mean {leg.mean.value:.3g}, max {leg.maximum:.3g} nats)"
        )
        return
    noisy = [group for leg, group in groups.items() if leg not in zero]
    test = ExchangeTest([group.values.shape for group in noisy])
    outcome = result.outcome = test.run(noisy, alpha)
    result.heterogeneous = _heterogeneous(noisy, floor, alpha)
    if outcome.alarm:
        _alarm(result, outcome, noisy)
        return
    result.power = {group.name: detection_rate(noisy, index, fault, alpha=alpha) for index, group in enumerate(noisy)}
    weak = {leg: rate for leg, rate in result.power.items() if rate < REQUIRED_POWER}
    ratio = " and ".join(
        f"{name} {legs[name].mean.value:.3g} (floor {result.floor_size[name][0]:.3g})" for name in groups
    )
    if weak:
        weakest, rate = min(weak.items(), key=lambda entry: entry[1])
        result.evidence = (
            f"no change seen (p = {outcome.p:.3g}), but {fault} in the {weakest} leg would be seen in only "
            f"{rate:.0%} of comparisons with this floor: record more positions or floor runs"
        )
    elif scarce:
        result.evidence = (
            f"no change seen, but decode divergences left only {scarce[0].positions} of "
            f"{scarce[0].positions + scarce[0].lost} {scarce[0].leg} positions: use a smaller --decode-tokens"
        )
    else:
        result.verdict = EQUIVALENT
        result.evidence = (
            f"one more run of the same thing (p = {outcome.p:.3g}): mean |change| {ratio} nats; {fault} would "
            f"have been caught in >= {min(result.power.values(), default=1.0):.1%} of comparisons"
        )


def _alarm(result: Comparison, outcome: Outcome, noisy: Sequence[Group]) -> None:
    """Fill in the verdict of an alarm: DIFFERENT, unless the floor itself is not one population."""
    if outcome.spike_at is not None and outcome.spike_p <= outcome.p:
        group, at = outcome.spike_at
        size = float(np.abs(deviations(next(g for g in noisy if g.name == group).values)[:, 0]).max())
        cause = (
            f"one {group} position (row {at}) is off by {size:.3g} nats, chance {outcome.spike_p:.2g} under the floor"
        )
    else:
        group, _, statistic = outcome.leading.partition("/")
        leg = result.legs[group]
        cause = (
            f"p = {outcome.p:.2g}, led by {group} {STATISTICS[statistic]}: mean |change| {leg.mean.value:.3g} "
            f"against a floor of {result.floor_size[group][0]:.3g}, max {leg.maximum:.3g} against "
            f"{result.floor_size[group][1]:.3g} nats"
        )
    if not result.heterogeneous or _beyond(result, factor=2.0):
        result.verdict = DIFFERENT
        result.evidence = cause
        return
    result.evidence = (
        f"{cause}; but {len(result.heterogeneous)} floor runs differ from the other floor runs as well, so the "
        "floor is not one population: record more runs, with restarts"
    )


def _beyond(result: Comparison, factor: float) -> bool:
    """Return whether some leg's mean change is `factor` times anything seen between A/A runs."""
    return any(result.legs[leg].mean.value > factor * size for leg, (size, _) in result.floor_size.items() if size > 0)


def _heterogeneous(groups: Sequence[Group], floor: Floor, alpha: float) -> list[str]:
    """Return the floor runs that the test calls different when the other A/A runs are the floor."""
    columns = groups[0].values.shape[1] if groups else 0
    if columns < 4:
        return []
    shapes = [(group.values.shape[0], columns - 1) for group in groups]
    # alpha is split over the runs, so p must be able to get that small.
    test = ExchangeTest(shapes, redraws=4000)
    found = []
    for candidate in range(1, columns):
        order = [candidate, *(column for column in range(1, columns) if column != candidate)]
        taken = [Group(group.name, group.values[:, order], group.bins) for group in groups]
        if test.run(taken, alpha / (columns - 1)).alarm:
            found.append("reference" if candidate == 1 else f"run {candidate - 2}")
    return found


def floor_size(runs: Floats) -> tuple[float, float]:
    """Return the largest mean |change| and the largest |change| between any two runs, nats.

    Args:
        runs: ln p, shape [positions, runs].
    """
    pairs = [np.abs(runs[:, a] - runs[:, b]) for a in range(runs.shape[1]) for b in range(a + 1, runs.shape[1])]
    return max(float(each.mean()) for each in pairs), max(float(each.max()) for each in pairs)


def _decoded_and_forced(recording: Recording) -> list[tuple[float, float]]:
    return [
        (position.logprob, position.again)
        for result in recording.results
        if result.item.leg == "decode"
        for position in result.positions[1:]
        if position.again is not None
    ]
