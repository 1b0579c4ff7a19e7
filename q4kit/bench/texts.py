"""Prompt texts of three kinds, from a seed. Pure; no tokenizer here.

The kind is part of a prefill number. A model with an n-gram table reads few distinct table rows for a repeated
sentence and many for unique words, so on a disk-backed table the two prompts measure different things.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import chain


class TextKind(StrEnum):
    FILLER = "filler"
    """One sentence repeated: the kindest prompt, and what most published prefill numbers used."""
    PROSE = "prose"
    """Sentences from a small grammar: words repeat, sentences do not."""
    WORDS = "words"
    """Pronounceable words that never repeat inside a prompt: the hardest prompt for any cache."""


_SENTENCE = "The lamps along the canal are lit one by one as the evening comes down over the town."

_SUBJECTS = (
    "the surveyor",
    "an old clockmaker",
    "the night porter",
    "a visiting botanist",
    "the harbour pilot",
    "her younger brother",
    "the librarian",
    "a retired judge",
    "the glassblower",
    "our neighbour",
    "the ferry captain",
    "a travelling printer",
    "the apprentice",
    "the village doctor",
    "a weather observer",
)
_VERBS = (
    "measured",
    "described",
    "repaired",
    "remembered",
    "copied",
    "carried",
    "examined",
    "sketched",
    "forgot",
    "catalogued",
    "weighed",
    "unwrapped",
    "borrowed",
    "explained",
    "counted",
    "polished",
    "buried",
    "translated",
)
_OBJECTS = (
    "a brass compass",
    "the tide tables",
    "a box of letters",
    "the broken lens",
    "three clay jars",
    "the parish map",
    "a bundle of reeds",
    "the spare rudder",
    "an unsigned contract",
    "the seed ledger",
    "a copper kettle",
    "the winter timetable",
    "a pair of scales",
    "the harbour chart",
    "a folded sail",
)
_PLACES = (
    "beside the lock",
    "in the upper gallery",
    "under the chestnut trees",
    "at the edge of the marsh",
    "behind the mill",
    "on the north quay",
    "in a room without windows",
    "along the old railway",
    "near the weighing house",
    "at the top of the tower",
    "between two warehouses",
    "by the kitchen door",
)
_TIMES = (
    "before the first bell",
    "on a wet Thursday",
    "late in the autumn",
    "an hour after noon",
    "while the others slept",
    "during the long frost",
    "as the market closed",
    "in the year of the flood",
    "without any hurry",
    "for the second time",
    "shortly before the inspection",
    "when the wind had turned",
)
_LINKS = (
    "and nobody asked why",
    "although the light was poor",
    "because the road was closed",
    "so the matter was settled",
    "while the dog kept watch",
    "and wrote the result on a slate",
    "but said nothing of it",
    "which surprised the whole street",
    "until the lamp ran dry",
)

_ONSETS = ("b", "br", "c", "ch", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s",
           "sh", "st", "t", "tr", "v", "w", "z")  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "b", "d", "g", "k", "l", "m", "n", "nd", "p", "r", "rk", "s", "st", "t", "x")


def pieces(kind: TextKind, seed: str) -> Iterator[str]:
    """Yield an endless text in short pieces; concatenated they are the text. Same kind and seed, same text.

    The first piece differs between seeds, so two prompts share no prefix that a cache could hold.
    """
    rng = random.Random(f"{kind.value}:{seed}")
    opening = f"Entry {rng.getrandbits(64):016x}. "
    makers: dict[TextKind, Callable[[random.Random], Iterator[str]]] = {
        TextKind.FILLER: _filler,
        TextKind.PROSE: _prose,
        TextKind.WORDS: _words,
    }
    return chain([opening], makers[kind](rng))


def build(kind: TextKind, seed: str, at_least_chars: int) -> str:
    """Return a text of at least `at_least_chars` characters."""
    parts: list[str] = []
    size = 0
    for piece in pieces(kind, seed):
        parts.append(piece)
        size += len(piece)
        if size >= at_least_chars:
            break
    return "".join(parts)


def _filler(rng: random.Random) -> Iterator[str]:
    while True:
        yield _SENTENCE + " "


def _prose(rng: random.Random) -> Iterator[str]:
    """Yield sentences; the 15*18*15*12*12*9 combinations make an exact repeat in one prompt improbable."""
    while True:
        core = f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {rng.choice(_PLACES)}"
        order = rng.randrange(3)
        when, link = rng.choice(_TIMES), rng.choice(_LINKS)
        if order == 0:
            sentence = f"{core} {when}, {link}."
        elif order == 1:
            sentence = f"{when}, {core}, {link}."
        else:
            sentence = f"{core}, {link}, {when}."
        yield sentence[0].upper() + sentence[1:] + (" " if rng.random() < 0.85 else "\n\n")


def _words(rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        syllables = rng.randint(2, 4)
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
        if word not in seen:
            seen.add(word)
            yield word + " "
