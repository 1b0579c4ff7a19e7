"""What a comparison could have seen: faults planted into A/A data, and the share that is caught. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from q4kit.stats.exchange import ALPHA, ExchangeTest, Group
from q4kit.stats.resample import Floats


@dataclass(frozen=True, slots=True)
class Fault:
    """A share of positions, chosen at random, each wrong by `size` nats in a random direction."""

    share: float
    size: float

    def __str__(self) -> str:
        return f"{100 * self.share:.3g} % of positions off by {self.size:.3g} nats"

    def plant(self, values: Floats, draw: np.random.Generator) -> Floats:
        """Return a copy of `values` (shape [positions]) with the fault in it; at least one position."""
        count = max(round(self.share * values.size), 1)
        hit = draw.choice(values.size, size=count, replace=False)
        result = values.copy()
        result[hit] += self.size * draw.choice([-1.0, 1.0], size=count)
        return result


def detection_rate(
    groups: Sequence[Group],
    index: int,
    fault: Fault,
    *,
    trials: int = 200,
    alpha: float = ALPHA,
    redraws: int = 500,
    seed: int = 1,
) -> float:
    """Return the share of comparisons that catch `fault` in group `index`, every group's floor as given.

    Each trial takes one A/A run as the candidate, redraws it among all A/A runs position by position (so
    that trials are not the same few runs again), plants the fault and tests it against the others. The
    real comparison has one floor run more, so this errs towards a lower rate. With only two A/A runs the
    candidate column stands in as the third.
    """
    first = 1 if groups[0].values.shape[1] > 3 else 0
    pools = [group.values[:, first:] for group in groups]
    test = ExchangeTest([pool.shape for pool in pools], redraws=redraws, seed=seed)
    draw = np.random.default_rng(seed)
    caught = 0
    for _ in range(trials):
        taken = []
        for number, (group, pool) in enumerate(zip(groups, pools, strict=True)):
            shuffled = draw.permuted(pool, axis=1)
            if number == index:
                shuffled[:, 0] = fault.plant(shuffled[:, 0], draw)
            taken.append(Group(group.name, shuffled, group.bins))
        caught += test.run(taken, alpha).alarm
    return caught / trials
