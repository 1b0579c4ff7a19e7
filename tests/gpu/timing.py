"""One turn of timing of a server, and what the turns of two servers say about each other.

A sample is {"session", "gpu", "round", "at" (wall clock, seconds), "method" (what was asked), "decode", ...}. Two
servers are compared within a round only: sampled seconds apart, on one GPU, by the same method.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from q4kit.errors import ServerError
from q4kit.server.client import GREEDY, Client
from q4kit.stats.resample import bootstrap_interval

PROMPT_TOKENS = 400


@dataclass(frozen=True)
class Method:
    """What one turn asks."""

    decode_tokens: int
    """Decode steps that are counted."""
    warmup_tokens: int
    """Decode steps before them that are not."""
    prefill_tokens: int
    """Tokens of the prompt whose prefill is timed; 0: none is."""
    vocab: int
    """Random token ids are below this."""

    def to_json(self) -> dict[str, int]:
        """Return it as it stands in a sample."""
        return asdict(self)


def unique(seed: int, length: int, vocab: int) -> list[int]:
    """Return random tokens: nearly every n-gram of them is new to the server."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def step_figures(events: Sequence[tuple[float, int]], warmup_tokens: int) -> dict[str, float]:
    """Return the figures of a stream (pure).

    `events`: (seconds, tokens so far) of each event with new tokens. Steps up to `warmup_tokens` are left out; a
    p50 far from the mean, or a p95 far from the p50, shows steps of two kinds.
    """
    counted = [event for event in events if event[1] > warmup_tokens]
    if len(counted) < 2:
        raise ServerError(
            f"{len(counted)} stream events after {warmup_tokens} tokens of warm-up, expected at least 2",
            remedy="ask for more tokens, or read the server's log",
        )
    (t0, n0), (t1, n1) = counted[0], counted[-1]
    steps = [(b - a) / (m - n) * 1e6 for (a, n), (b, m) in pairwise(counted) for _ in range(m - n) if m > n]
    cuts = statistics.quantiles(steps, n=20, method="inclusive") if len(steps) > 1 else [steps[0]] * 19
    return {"step_us": (t1 - t0) / (n1 - n0) * 1e6, "p50_us": cuts[9], "p95_us": cuts[18], "steps": n1 - n0}


def decode(client: Client, seed: int, method: Method) -> dict[str, float]:
    """Return the figures of one streamed request of a unique prompt, and "ttft_s"."""
    client.flush_cache()
    payload = {
        "input_ids": unique(seed, PROMPT_TOKENS, method.vocab),
        "sampling_params": {
            **GREEDY,
            "max_new_tokens": method.warmup_tokens + method.decode_tokens,
            "ignore_eos": True,
        },
    }
    start = time.monotonic()
    events = [(e.t_monotonic, e.completion_tokens) for e in client.stream_generate(payload) if e.completion_tokens]
    return step_figures(events, method.warmup_tokens) | {"ttft_s": events[0][0] - start}


def prefill(client: Client, seed: int, method: Method) -> float:
    """Return prompt tokens a second of one unique prompt, to its first token."""
    client.flush_cache()
    ids = unique(seed, method.prefill_tokens, method.vocab)
    start = time.monotonic()
    client.generate({"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": 1}})
    return method.prefill_tokens / (time.monotonic() - start)


def seed_of(number: int, offset: int = 0) -> int:
    """Return the seed of a round's text: the same for all servers of a round, another one in each round."""
    return 10_000 + 100 * number + offset


def figure(sample: dict[str, Any], name: str) -> float | None:
    """Return "step_us" or "prefill_tok_s" of a sample, None where it has none."""
    return sample.get("decode", {}).get("step_us") if name == "step_us" else sample.get(name)


def _rounds(samples: Sequence[dict[str, Any]], method: Method) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (sample["session"], sample["gpu"], sample["round"]): sample
        for sample in samples
        if sample["method"] == method.to_json() and "decode" in sample
    }


def paired(
    base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], method: Method
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the (base, other) samples of the rounds that both have."""
    left, right = _rounds(base, method), _rounds(other, method)
    return [(left[key], right[key]) for key in left if key in right]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, ends, number, and the percentile bootstrap interval of the median (95 %)."""
    import numpy as np

    out: dict[str, Any] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    out["rounds"] = len(values)
    if len(values) >= 5:
        estimate = bootstrap_interval(np.asarray(values, dtype=float), lambda x: np.median(x, axis=-1))
        out["bootstrap_95"] = [estimate.low, estimate.high]
    return out


def compare(
    base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], method: Method, least: int = 1
) -> dict[str, Any]:
    """Return how fast `other` is against `base`, formed per round: ratios (above 1: faster) and added microseconds."""
    pairs = paired(base, other, method)
    if len(pairs) < least:
        return {}
    steps = [(figure(b, "step_us"), figure(o, "step_us")) for b, o in pairs]
    out: dict[str, Any] = {
        "decode_ratio": spread([b / o for b, o in steps if b and o]),
        "added_us_per_step": spread([o - b for b, o in steps if b and o]),
    }
    for name in ("p50_us", "p95_us"):  # [base, other]
        out[f"step_{name}"] = [
            statistics.median(sample["decode"][name] for sample in side) for side in zip(*pairs, strict=True)
        ]
    rates = [(figure(b, "prefill_tok_s"), figure(o, "prefill_tok_s")) for b, o in pairs]
    known = [o / b for b, o in rates if b and o]
    return out | ({"prefill_ratio": spread(known)} if known else {})
