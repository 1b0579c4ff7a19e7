"""Which positions a recording scores: a pure function of the prompts' ids and the options.

Prefill leg: the last tokens of every prompt, teacher-forced in one extend each. Sees prefill kernels,
chunked prefill, prefill graphs. Does not see decode.

Decode leg: short greedy generations from fixed cuts of the prompts. The first generated token comes out
of the extend and only anchors the alignment; every later one comes out of a decode step (decode kernels,
decode graphs, KV and state writes of decode). Because each generation starts from fixed text, a
divergence costs only the rest of its own segment, and the next one is aligned again. Each generated
segment is also teacher-forced afterwards, which gives the decode-against-prefill difference inside one
server without any reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from q4kit.errors import UsageError

MIN_CONTEXT = 32
"""Fewest tokens in front of the first scored position."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose; stored in every recording and equal between comparable ones."""

    scored: int = 450
    """Scored positions of each leg."""
    decode_tokens: int = 32
    """Generated tokens of one decode segment, the first of which comes from the extend."""
    top: int = 20
    """Alternatives recorded at each position."""
    max_prompt_tokens: int = 0
    """Longer prompts keep only their last so many tokens; 0 keeps all."""
    decode: bool = True
    """Whether the decode leg is recorded."""

    def check(self) -> None:
        """Raise `UsageError` for values that cannot be recorded."""
        limits = {"scored": (1, self.scored), "top": (2, self.top), "decode_tokens": (2, self.decode_tokens)}
        for name, (low, value) in limits.items():
            if value < low:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least {low}")
        if self.max_prompt_tokens and self.max_prompt_tokens < 2 * MIN_CONTEXT:
            raise UsageError(f"--max-prompt-tokens {self.max_prompt_tokens}: must be 0 or at least 64")


@dataclass(frozen=True, slots=True)
class Item:
    """One request: the first `length` ids of a prompt, and what is scored.

    Prefill items score positions `first .. length - 1` of the prompt; decode items generate `generate`
    tokens at positions `length .. length + generate - 1`, the first of them not scored.
    """

    name: str
    leg: str
    prompt: str
    length: int
    first: int
    generate: int

    @property
    def scored(self) -> int:
        """Number of positions this item contributes when nothing diverges."""
        return self.length - self.first if self.leg == "prefill" else self.generate - 1


def clip(ids: Sequence[int], options: Options) -> list[int]:
    """Return the ids of a prompt after `--max-prompt-tokens`."""
    return list(ids[-options.max_prompt_tokens :] if options.max_prompt_tokens else ids)


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers that sum to `total` in proportion to `weights` (largest remainders first)."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def make_plan(prompts: dict[str, list[int]], options: Options) -> list[Item]:
    """Return the items of a recording, prefill leg first.

    The longest prompt gets twice the share of the others: only there do sparse attention and chunked
    prefill select anything.

    Raises:
        UsageError: the prompts are too short for so many scored positions.
    """
    options.check()
    if not prompts:
        raise UsageError("the prompt set is empty")
    # The last of equals: --max-prompt-tokens makes prompts alike, and "long" comes last.
    longest = max(reversed(prompts), key=lambda name: len(prompts[name]))
    weights = [2.0 if name == longest and len(prompts) > 1 else 1.0 for name in prompts]
    items = []
    for (name, ids), share in zip(prompts.items(), _shares(options.scored, weights), strict=True):
        if share == 0:
            continue
        if len(ids) < share + MIN_CONTEXT:
            raise UsageError(
                f"prompt {name!r} has {len(ids)} tokens, {share + MIN_CONTEXT} are needed for {share} scored",
                remedy="Lower --scored or raise --max-prompt-tokens.",
            )
        items.append(Item(f"prefill/{name}", "prefill", name, len(ids), len(ids) - share, 0))
    return items + (_decode_items(prompts, weights, options) if options.decode else [])


def _decode_items(prompts: Mapping[str, Sequence[int]], weights: Sequence[float], options: Options) -> list[Item]:
    """Return decode segments with `options.scored` decode positions in all."""
    per_segment = options.decode_tokens - 1
    segments = -(-options.scored // per_segment)
    items, left = [], options.scored
    for (name, ids), count in zip(prompts.items(), _shares(segments, weights), strict=True):
        half = len(ids) // 2
        if count > half // 2:
            raise UsageError(
                f"prompt {name!r} has {len(ids)} tokens, too few for {count} decode segments",
                remedy="Lower --scored, or raise --decode-tokens or --max-prompt-tokens.",
            )
        step = half // max(count, 1)
        for number in range(count):
            # Spread over the later half; the odd offset keeps the cuts from all falling alike into pages.
            length = len(ids) - 1 - (count - 1 - number) * step - (7 * number) % max(step // 2, 1)
            generate = min(options.decode_tokens, left + 1)
            left -= generate - 1
            items.append(Item(f"decode/{name}@{length}", "decode", name, length, length, generate))
    return items
