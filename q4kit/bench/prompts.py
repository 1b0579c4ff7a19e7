"""Token prompts of an exact length, cut by the server's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from q4kit.bench.texts import TextKind, build
from q4kit.errors import ServerError, UsageError

Tokenize = Callable[[str], list[int]]

_FIRST_GUESS_CHARS = 6
"""Characters a token to begin with; the loop corrects it."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of one request and where they came from."""

    ids: list[int]
    kind: TextKind
    seed: str


def exact_prompt(tokenize: Tokenize, kind: TextKind, seed: str, length: int) -> Prompt:
    """Return a prompt of exactly `length` token ids.

    Raises:
        UsageError: length below 1.
        ServerError: the tokenizer returns next to nothing for a growing text.
    """
    if length < 1:
        raise UsageError(f"context length must be at least 1 token, found {length}")
    chars = _FIRST_GUESS_CHARS * length + 64
    for _ in range(8):
        ids = tokenize(build(kind, seed, chars))
        if len(ids) >= length:
            return Prompt(ids[:length], kind, seed)
        chars = int(chars * length / max(1, len(ids)) * 1.1) + 64
    raise ServerError(
        f"the server's tokenizer made {len(ids)} tokens of {chars} characters; {length} were wanted",
        remedy="check the /tokenize route of this server",
    )


def repeat_seed(run_seed: int, length: int, repeat: int | str) -> str:
    """Return the text seed of one repeat; every (run, length, repeat) has its own text."""
    return f"{run_seed}:{length}:{repeat}"
