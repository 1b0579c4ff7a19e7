"""Needles: high-entropy codes under invented names, from a seed, and the proof that none occurs twice. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from q4kit.errors import UsageError

ALPHABET = "ABCDEFGHJKMNPQRSTVWXYZ23456789"
"""No 0/O, 1/I/L or U: nothing that reads alike, no words."""
GROUPS, GROUP_LENGTH = 3, 4

_ONSETS = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z")
_RIMES = ("al", "en", "ir", "om", "ur", "ask", "esh", "ilt", "orn", "und")


@dataclass(frozen=True)
class Needle:
    """One key and its code, e.g. `depot Ralpen` -> `K7QM-3TXD-9WBE` (58.9 bits)."""

    key: str
    code: str

    @property
    def sentence(self) -> str:
        """The sentence that hides in the haystack; distractors have the same form."""
        return f"The access code of depot {self.key} is {self.code}."


def question(key: str) -> str:
    """Return the question that asks for one code and offers a way to say that there is none."""
    return (
        f"Somewhere in the text above the access code of depot {key} is stated. "
        f"Answer with the access code of depot {key} only. If the text does not state it, answer NONE."
    )


def answer_prefix(key: str) -> str:
    """Return the opening of the answer in completion mode; a code must follow."""
    return f"\nThe access code of depot {key} is"


def make_needles(seed: str, count: int) -> list[Needle]:
    """Return `count` needles with pairwise different keys and codes; same seed, same needles."""
    if count < 1:
        raise UsageError(f"at least one needle is needed, found {count}")
    rng = random.Random(f"needles:{seed}")
    needles: list[Needle] = []
    keys: set[str] = set()
    codes: set[str] = set()
    while len(needles) < count:
        key = rng.choice(_ONSETS) + rng.choice(_RIMES) + rng.choice(_ONSETS).lower() + rng.choice(_RIMES)
        code = make_code(rng)
        if key in keys or code in codes:
            continue
        keys.add(key)
        codes.add(code)
        needles.append(Needle(key, code))
    return needles


def make_code(rng: random.Random) -> str:
    """Return one code of 12 letters and digits in three groups."""
    return "-".join("".join(rng.choice(ALPHABET) for _ in range(GROUP_LENGTH)) for _ in range(GROUPS))


def assert_unique(text: str, needles: list[Needle], *, absent: list[Needle] | None = None) -> None:
    """Raise when a code or key does not occur exactly once in `text` (or, for `absent`, at all).

    Separators and case are ignored for codes, so that no accidental near-copy gives a code away.
    """
    flat = squeeze(text)
    for needle in needles:
        found = flat.count(squeeze(needle.code))
        if found != 1:
            raise UsageError(
                f"code {needle.code} occurs {found} times in the prompt, expected once", remedy="take another --seed"
            )
        if text.count(needle.key) != 1:
            raise UsageError(
                f"key {needle.key} occurs {text.count(needle.key)} times in the prompt, expected once",
                remedy="take another --seed",
            )
    for needle in absent or []:
        if squeeze(needle.code) in flat:
            raise UsageError(
                f"code {needle.code} must be absent from the prompt but occurs", remedy="take another --seed"
            )


def squeeze(text: str) -> str:
    """Return the letters and digits of `text`, upper case."""
    return "".join(c for c in text.upper() if c.isalnum())
