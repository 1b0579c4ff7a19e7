"""How far two predictive distributions lie apart, from what a server's answer holds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from q4kit.stats.resample import Floats


def k3(log_ratio: Floats) -> Floats:
    """Return exp(r) - 1 - r, elementwise, for r = ln q(token) - ln p(token); never negative.

    Averaged over tokens sampled from p it estimates KL(p || q) without bias and with low variance
    (Schulman, "Approximating KL divergence", 2020). On text that p did not sample it is only a size, and
    must not be called a divergence of the model's distributions.
    """
    return np.asarray(np.expm1(log_ratio) - log_ratio, dtype=float)


@dataclass(frozen=True, slots=True)
class KlInterval:
    """KL(p || q) of one position, in nats, as far as two top-k lists determine it."""

    low: float
    """Proven: KL of the distributions coarsened to the shared ids and one bucket for all the rest."""
    high: float
    """Holds if no unseen id moved by more than `shift`."""
    missing: int
    """Ids of p's list that are not in q's: their q is only known to be at most q's k-th probability."""
    shift: float
    """Largest |ln p/q| of a listed id; for a missing id, its smallest possible value. nats."""


_ROUNDING = 1e-6
"""Mass that the rounding of listed float32 probabilities may leave over on one side and not on the other."""


def topk_kl(
    p_top: Sequence[tuple[int, float]],
    q_top: Sequence[tuple[int, float]],
    *,
    use: int = 10,
    shift: float = 0.0,
) -> KlInterval:
    """Return the interval of KL(p || q) that the lists of both sides allow.

    The lower end needs no assumption: merging outcomes never increases a divergence (data processing
    inequality), and a missing id simply joins the bucket of the rest. An upper end without an assumption
    does not exist, because q may be arbitrarily small on ids that nobody listed; so it is stated for a
    bound on how far unlisted ids may have moved: the largest move among all listed ones, or `shift`
    where that is larger. A missing id's move is at least ln(p / q_k). Nothing is ever set to 1e-12.

    Args:
        p_top, q_top: (id, ln probability), best first; the first `use` of p are compared.
        shift: least bound to assume for unlisted ids, nats.
    """
    if not p_top or not q_top:
        raise ValueError("an empty list of alternatives says nothing about a divergence")
    q = dict(q_top)
    q_floor = min(logprob for _, logprob in q_top)
    known, rest_p, rest_q, missing = 0.0, 1.0, 1.0, 0
    for token, logprob in p_top[:use]:
        if token in q:
            p_i, q_i = math.exp(logprob), math.exp(q[token])
            known += p_i * (logprob - q[token])
            rest_p -= p_i
            rest_q -= q_i
            shift = max(shift, abs(logprob - q[token]))
        else:
            missing += 1
            shift = max(shift, logprob - q_floor)
    # Rounding may leave a rest of -1e-8 when the listed ids hold all the mass.
    rest_p, rest_q = max(rest_p, 0.0), max(rest_q, 0.0)
    if rest_p == 0.0 or (rest_q == 0.0 and rest_p <= _ROUNDING):
        bucket = 0.0
    elif rest_q == 0.0:
        bucket = math.inf
    else:
        bucket = rest_p * math.log(rest_p / rest_q)
    low = max(known + bucket, 0.0)
    return KlInterval(low, max(known + rest_p * shift, low), missing, shift)
