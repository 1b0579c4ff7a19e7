"""From an answer to exactly one outcome class. Pure.

Only the final answer region counts as retrieval. A code that appears only while the model thinks, a neighbour's
code, a damaged code, silence, a cut-off and a crash are different findings with different causes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from q4kit.needle.codes import ALPHABET, GROUP_LENGTH, GROUPS, Needle, squeeze


class Outcome(StrEnum):
    FOUND = "FOUND"
    FOUND_IN_THINKING_ONLY = "FOUND_IN_THINKING_ONLY"
    WRONG_CODE = "WRONG_CODE"
    PARTIAL = "PARTIAL"
    SAID_NONE = "SAID_NONE"
    NO_CODE = "NO_CODE"
    EMPTY = "EMPTY"
    TRUNCATED = "TRUNCATED"
    EARLY_STOP = "EARLY_STOP"
    NAN = "NAN"
    HTTP_ERROR = "HTTP_ERROR"


RETRIEVAL = frozenset(
    {
        Outcome.FOUND, Outcome.FOUND_IN_THINKING_ONLY, Outcome.WRONG_CODE, Outcome.PARTIAL, Outcome.SAID_NONE,
        Outcome.NO_CODE,
    }
)  # fmt: skip
"""The model answered, rightly or wrongly: these are the trials n of k/n."""

BROKEN = frozenset(set(Outcome) - RETRIEVAL)
"""No answer to judge. They are counted apart, and above a limit they make the run invalid."""

MEANING = {
    Outcome.FOUND: "the right code, in the final answer",
    Outcome.FOUND_IN_THINKING_ONLY: "the right code while thinking, not in the answer",
    Outcome.WRONG_CODE: "a code of the prompt, but another depot's (position confused), or an invented one",
    Outcome.PARTIAL: "a damaged copy of the right code",
    Outcome.SAID_NONE: "NONE although the code is there",
    Outcome.NO_CODE: "an answer without anything like a code",
    Outcome.EMPTY: "no visible character",
    Outcome.TRUNCATED: "ran into the token limit before the answer",
    Outcome.EARLY_STOP: "stopped before the answer region began",
    Outcome.NAN: "the logits held a NaN",
    Outcome.HTTP_ERROR: "the server refused or failed the request",
}

_CODE = re.compile(
    rf"(?<![A-Z0-9])[{ALPHABET}]{{{GROUP_LENGTH}}}(?:[-\u2010-\u2015 ]?[{ALPHABET}]{{{GROUP_LENGTH}}}){{{GROUPS - 1}}}"
    r"(?![A-Z0-9])"
)
_PIECE = re.compile(r"[A-Z0-9][A-Z0-9\-]{3,}")
_NONE = re.compile(r"\bNONE\b")
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")
"""End-of-turn and end-of-text tokens, visible because the tool asks for special tokens."""
_THINK = re.compile(r"<think>(.*?)(</think>|\Z)", re.DOTALL)

PARTIAL_DISTANCE = 4
"""Up to this many edits on 12 characters a code counts as a damaged copy; random codes are 10 or more apart."""


@dataclass(frozen=True)
class Answer:
    """What the server said, cut into regions. `finish` is `stop`, `length`, `nan` or `error`."""

    final: str
    """The final answer region: the only text in which a code counts as retrieved."""
    thinking: str = ""
    finish: str = "stop"
    thinking_open: bool = False
    """The thinking block was never closed: there is no final answer region."""
    cut: bool = False
    """The token limit ended the final answer region."""
    free_stop: bool = True
    """The model may stop by itself (chat mode). Under ignore_eos every output runs into the limit."""
    error: str = ""


@dataclass(frozen=True)
class Score:
    """One class and its evidence: the code found, whose it is, its edit distance from the right one."""

    outcome: Outcome
    found: str = ""
    owner: str = ""
    distance: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome.value, "found": self.found, "owner": self.owner, "distance": self.distance}


def chat_answer(text: str, finish: str, *, starts_inside: bool = False) -> Answer:
    """Return the answer of chat mode: thinking apart, the rest up to the end-of-turn token is final."""
    final, thinking, still_open = split_thinking(text, starts_inside=starts_inside)
    final = _SPECIAL.split(final)[0]
    return Answer(final, thinking, finish, still_open, cut=finish == "length")


def forced_answer(text: str, finish: str) -> Answer:
    """Return the answer of ignore_eos mode: the first line that says something, up to any special token.

    What the model goes on to write after its answer, because it was not allowed to stop, is not the answer.
    """
    spoken = _SPECIAL.split(text)[0]
    line, newline, _ = spoken.lstrip().partition("\n")
    ended = bool(newline) or len(spoken) < len(text)
    return Answer(line, "", finish, cut=finish == "length" and not ended, free_stop=False)


def split_thinking(text: str, *, starts_inside: bool = False) -> tuple[str, str, bool]:
    """Return (final answer, thinking, still open) of raw model output with `<think>` tags.

    `starts_inside`: the chat template already opened the block, so the output begins inside it.
    """
    if starts_inside and "<think>" not in text:
        text = "<think>" + text
    thinking: list[str] = []
    still_open = False

    def take(match: re.Match[str]) -> str:
        nonlocal still_open
        thinking.append(match.group(1))
        still_open = still_open or match.group(2) == ""
        return ""

    final = _THINK.sub(take, text)
    if "</think>" in final:
        # A closing tag without an opening one: the template opened it unseen.
        before, _, final = final.rpartition("</think>")
        thinking.append(before)
    return final, "\n".join(thinking), still_open


def score(answer: Answer, wanted: Needle, others: Sequence[Needle]) -> Score:
    """Return the class of `answer` to the question for `wanted`; `others` are the other needles of the prompt."""
    if answer.finish == "error":
        return Score(Outcome.HTTP_ERROR, found=answer.error)
    if answer.finish == "nan":
        return Score(Outcome.NAN)
    right = squeeze(wanted.code)
    first = _CODE.search(answer.final.upper())
    if first is not None:
        # The first code decides: listing every code of the prompt must not count as retrieval.
        return _judge_code(squeeze(first.group(0)), right, wanted, others)
    if answer.thinking_open:
        return Score(Outcome.TRUNCATED if answer.finish == "length" else Outcome.EARLY_STOP)
    if right in squeeze(answer.thinking):
        return Score(Outcome.FOUND_IN_THINKING_ONLY, right, wanted.key, 0)
    if _NONE.search(answer.final):
        return Score(Outcome.SAID_NONE)
    if not answer.free_stop and answer.finish == "stop":
        return Score(Outcome.EARLY_STOP)
    if answer.cut and (answer.free_stop or _breaks_off(answer.final, right)):
        return Score(Outcome.TRUNCATED)
    if not answer.final.strip():
        return Score(Outcome.EMPTY)
    near = min(((edit_distance(squeeze(m), right), m) for m in _PIECE.findall(answer.final.upper())), default=None)
    if near is not None and near[0] <= PARTIAL_DISTANCE:
        return Score(Outcome.PARTIAL, near[1], wanted.key, near[0])
    return Score(Outcome.NO_CODE)


def _breaks_off(text: str, right: str) -> bool:
    """Return whether the text ends in at least one group of the right code, unfinished."""
    tail = squeeze(text.split()[-1]) if text.split() else ""
    return GROUP_LENGTH <= len(tail) < len(right) and right.startswith(tail)


def _judge_code(found: str, right: str, wanted: Needle, others: Sequence[Needle]) -> Score:
    if found == right:
        return Score(Outcome.FOUND, found, wanted.key, 0)
    owner = _owner(found, others)
    distance = edit_distance(found, right)
    if not owner and distance <= PARTIAL_DISTANCE:
        return Score(Outcome.PARTIAL, found, wanted.key, distance)
    return Score(Outcome.WRONG_CODE, found, owner, distance)


def _owner(found: str, others: Sequence[Needle]) -> str:
    """Return the key whose code this is, or "" for an invented code."""
    return next((n.key for n in others if squeeze(n.code) == found), "")


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance of two short strings."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]
