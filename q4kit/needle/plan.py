"""Which needle lies where in which prompt: grid, jitter, controls. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from q4kit.bench.texts import TextKind
from q4kit.errors import UsageError
from q4kit.needle.codes import Needle, make_needles

MAX_LENGTH = 262_144


class Mode(StrEnum):
    """How the question is put. Both send token ids, so the length is exact in both."""

    IGNORE_EOS = "ignore_eos"
    """Raw completion: the answer's opening is given and the model may not stop."""
    CHAT = "chat"
    """The server's chat template; the model may think and stops by itself."""


class Control(StrEnum):
    """Trials that must come out one known way; without them neither success nor failure means anything."""

    NONE = "retrieval"
    ABSENT = "absent"
    """The needle is not in the prompt: its code must not appear. Finds leaks, and guessing in chat mode."""
    SHORT = "short"
    """The same question over a short context: must be found, else model or prompt is at fault, not the length."""
    SHIFTED = "shifted"
    """The needle moved and got a new code: the answer must follow. Finds answers that come from a cache."""


@dataclass(frozen=True)
class Config:
    """A needle run. Lengths in tokens, depths in 0..1."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int = 1
    """Trials per cell (length x depth)."""
    per_prompt: int = 5
    distractors: int = 5
    jitter: float = 0.02
    """Each depth moves by a random amount up to this, so that page and chunk borders are not hit by design."""
    mode: Mode = Mode.IGNORE_EOS
    kind: TextKind = TextKind.PROSE
    seed: int = 0
    answer_tokens: int = 64
    short_length: int = 1024
    logprob: bool = True
    share_prefix: bool = True
    """Questions about one prompt reuse its prefix cache; False flushes it before every request."""

    def __post_init__(self) -> None:
        for length in self.lengths:
            if not 256 <= length <= MAX_LENGTH:
                raise UsageError(f"length must lie in 256..{MAX_LENGTH} tokens, found {length}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"depth must lie in 0..1, found {depth}", remedy="0 is the beginning, 1 the end")
        for name, least in (("samples", 1), ("per_prompt", 1), ("distractors", 0), ("answer_tokens", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if not 0 <= self.jitter < 0.5:
            raise UsageError(f"jitter must lie in 0..0.5, found {self.jitter}")
        if not self.lengths or not self.depths:
            raise UsageError("a run needs at least one length and one depth")


@dataclass(frozen=True)
class Placed:
    """A needle and the depth it is to be put at; `cell_depth` is the grid value it stands for."""

    needle: Needle
    depth: float
    cell_depth: float


@dataclass(frozen=True)
class PromptPlan:
    """One haystack: its length, its text seed, the needles that are asked for and the distractors."""

    length: int
    text_seed: str
    wanted: tuple[Placed, ...]
    distractors: tuple[Placed, ...]
    control: Control = Control.NONE


def even_depths(count: int) -> tuple[float, ...]:
    """Return `count` depths from 0 to 1 (one depth: the middle)."""
    if count < 1:
        raise UsageError(f"at least one depth is needed, found {count}")
    return (0.5,) if count == 1 else tuple(i / (count - 1) for i in range(count))


def make_plan(config: Config) -> list[PromptPlan]:
    """Return the prompts of a run: the short control first, then per length the grid and its shifted control.

    The absent control needs no prompt of its own here: it is the first prompt of each length with its wanted
    needles taken out.
    """
    prompts: list[PromptPlan] = []
    shortest = min(config.lengths)
    if config.short_length < shortest:
        prompts.append(_prompt(config, config.short_length, "short", _spread(config.depths, config), Control.SHORT))
    for length in sorted(config.lengths):
        groups = _groups(config.depths, config.per_prompt)
        for sample in range(config.samples):
            for number, group in enumerate(groups):
                prompts.append(_prompt(config, length, f"{sample}:{number}", group, Control.NONE))
        prompts.append(_shifted(next(p for p in prompts if p.length == length and p.control is Control.NONE), config))
    return prompts


def _groups(depths: Sequence[float], per_prompt: int) -> list[tuple[float, ...]]:
    """Deal the depths to as few prompts as possible, interleaved so that one prompt covers the whole range."""
    count = -(-len(depths) // per_prompt)
    return [tuple(depths[start::count]) for start in range(count)]


def _spread(depths: Sequence[float], config: Config) -> tuple[float, ...]:
    return _groups(depths, config.per_prompt)[0]


def _prompt(config: Config, length: int, name: str, depths: Sequence[float], control: Control) -> PromptPlan:
    seed = f"{config.seed}:{length}:{name}"
    rng = random.Random(f"plan:{seed}")
    needles = make_needles(seed, len(depths) + config.distractors)
    wanted = tuple(
        Placed(needle, min(1.0, max(0.0, depth + rng.uniform(-config.jitter, config.jitter))), depth)
        for needle, depth in zip(needles, depths, strict=False)
    )
    distractors = tuple(Placed(n, d := rng.random(), d) for n in needles[len(depths) :])
    return PromptPlan(length, f"hay:{seed}", wanted, distractors, control)


def _shifted(plan: PromptPlan, config: Config) -> PromptPlan:
    """Return the same haystack with every wanted needle elsewhere and every code new; keys stay."""
    fresh = make_needles(f"{config.seed}:{plan.length}:shifted", len(plan.wanted))
    moved = tuple(
        Placed(Needle(p.needle.key, new.code), (p.depth + 0.37) % 1.0, p.cell_depth)
        for p, new in zip(plan.wanted, fresh, strict=True)
    )
    return PromptPlan(plan.length, plan.text_seed, moved, plan.distractors, Control.SHIFTED)
