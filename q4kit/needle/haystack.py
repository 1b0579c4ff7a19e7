"""Put needles into a haystack of token ids: exact length, sentence borders, codes proven unique."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from q4kit.bench.prompts import exact_prompt
from q4kit.bench.texts import TextKind
from q4kit.errors import UsageError
from q4kit.needle.codes import Needle, answer_prefix, assert_unique, question
from q4kit.needle.plan import Mode, Placed, PromptPlan

_LOOK_BACK = 128
"""How far before the wished position a sentence may end, tokens."""
_CHAT_MARK = "qzxjkv"


class Tokenizer(Protocol):
    """The server's tokenizer over HTTP."""

    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Frame:
    """Token ids around the prompt (the chat template) and whether they leave a thinking block open."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    opens_thinking: bool = False


@dataclass(frozen=True)
class Hidden:
    """A needle at its real place: token index in the prompt and depth (index over haystack length)."""

    needle: Needle
    cell_depth: float
    index: int
    depth: float
    wanted: bool


@dataclass(frozen=True)
class Haystack:
    """A prompt without its question. `ids` is shared by all questions; `spare` pads each one to the exact length."""

    ids: tuple[int, ...]
    spare: tuple[int, ...]
    length: int
    reserve: int
    hidden: tuple[Hidden, ...]
    frame: Frame


@dataclass
class TokenTexts:
    """Texts of single tokens, asked for once each."""

    tokenizer: Tokenizer
    known: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, token: int) -> str:
        if token not in self.known:
            self.known[token] = self.tokenizer.detokenize([token])
        return self.known[token]


def chat_frame(tokenizer: Tokenizer, rendered: Sequence[int]) -> Frame:
    """Return the frame of a chat template from a rendered turn whose content is `chat_mark()`.

    Raises:
        UsageError: the mark does not occur exactly once, so the template does something unusual to content.
    """
    text = tokenizer.detokenize(list(rendered))
    if text.count(_CHAT_MARK) != 1:
        raise UsageError(
            "the chat template does not repeat the user's text exactly once", remedy="use --mode ignore_eos"
        )
    before, after = text.split(_CHAT_MARK)
    return Frame(
        tuple(tokenizer.tokenize(before)),
        tuple(tokenizer.tokenize(after)),
        after.count("<think>") > after.count("</think>"),
    )


def chat_mark() -> str:
    """Return the placeholder that stands for the prompt when the template is probed."""
    return _CHAT_MARK


def tail_ids(tokenizer: Tokenizer, mode: Mode, key: str, frame: Frame, *, answering: bool) -> list[int]:
    """Return the ids after the haystack: the question, the template's end and, when `answering`, the opening
    of the answer (always there in ignore_eos mode)."""
    ids = tokenizer.tokenize("\n\n" + question(key))
    ids += frame.after
    if mode is Mode.CHAT and answering and frame.opens_thinking:
        ids += tokenizer.tokenize("\n</think>\n\n")
    if mode is Mode.IGNORE_EOS or answering:
        ids += tokenizer.tokenize(answer_prefix(key) if mode is Mode.IGNORE_EOS else answer_prefix(key).lstrip())
    return ids


def build(
    tokenizer: Tokenizer,
    plan: PromptPlan,
    kind: TextKind,
    mode: Mode,
    frame: Frame,
    texts: TokenTexts,
    *,
    remove_wanted: bool = False,
    reserve: int = 0,
) -> Haystack:
    """Return the haystack of a plan; with `remove_wanted` each wanted needle is replaced by as many filler tokens.

    A forced answer of up to `reserve` tokens stays within `plan.length` too: its prompt is that much shorter.

    Raises:
        UsageError: the needles do not fit, or a code or key is not unique in the decoded prompt.
    """
    placed = [(p, True) for p in plan.wanted] + [(p, False) for p in plan.distractors]
    sentences = {p.needle.key: tokenizer.tokenize(" " + p.needle.sentence) for p, _ in placed}
    tails = [len(tail_ids(tokenizer, mode, p.needle.key, frame, answering=True)) for p in plan.wanted]
    total = sum(len(s) for s in sentences.values())
    body = plan.length - len(frame.before) - max(tails) - total - reserve
    slack = max(tails) + reserve
    if body < total:
        raise UsageError(
            f"{len(placed)} needles ({total} tokens) do not fit a prompt of {plan.length} tokens",
            remedy="use a longer --lengths, fewer --per-prompt or fewer --distractors",
        )
    filler = exact_prompt(tokenizer.tokenize, kind, plan.text_seed, body + slack + total).ids
    hay, spare, substitute = filler[:body], filler[body : body + slack], filler[body + slack :]
    ids, hidden = _insert(hay, placed, sentences, texts, substitute if remove_wanted else None, len(frame.before))
    whole = tuple(frame.before) + tuple(ids)
    decoded = tokenizer.detokenize(list(whole))
    present = [h.needle for h in hidden if not (remove_wanted and h.wanted)]
    absent = [h.needle for h in hidden if remove_wanted and h.wanted]
    assert_unique(decoded, present, absent=absent)
    return Haystack(whole, tuple(spare), plan.length, reserve, hidden, frame)


def ask(tokenizer: Tokenizer, hay: Haystack, mode: Mode, key: str, *, answering: bool = False) -> list[int]:
    """Return the prompt for one question: haystack, padding text, question.

    It has exactly `hay.length` ids, or `hay.reserve` fewer when an answer will be forced after it.
    """
    tail = tail_ids(tokenizer, mode, key, hay.frame, answering=answering)
    gap = hay.length - (hay.reserve if answering else 0) - len(hay.ids) - len(tail)
    if not 0 <= gap <= len(hay.spare):
        raise UsageError(f"a question of {len(tail)} tokens leaves a gap of {gap} tokens, 0..{len(hay.spare)} allowed")
    return [*hay.ids, *hay.spare[:gap], *tail]


def _insert(
    hay: Sequence[int],
    placed: Sequence[tuple[Placed, bool]],
    sentences: dict[str, list[int]],
    texts: TokenTexts,
    substitute: Sequence[int] | None,
    offset: int,
) -> tuple[list[int], tuple[Hidden, ...]]:
    """Return the ids with all sentences inserted, and where each one begins."""
    spots = sorted(((_border(hay, round(p.depth * len(hay)), texts), p, wanted) for p, wanted in placed),
                   key=lambda s: (s[0], s[1].needle.key))  # fmt: skip
    ids: list[int] = []
    found: list[tuple[Placed, bool, int]] = []
    taken = used = 0
    for spot, p, wanted in spots:
        ids += hay[used:spot]
        used = spot
        sentence = sentences[p.needle.key]
        found.append((p, wanted, offset + len(ids)))
        if substitute is not None and wanted:
            ids += substitute[taken : taken + len(sentence)]
            taken += len(sentence)
        else:
            ids += sentence
    ids += hay[used:]
    size = offset + len(ids)
    return ids, tuple(Hidden(p.needle, p.cell_depth, at, at / size, wanted) for p, wanted, at in found)


def _border(hay: Sequence[int], wished: int, texts: TokenTexts) -> int:
    """Return the last sentence end at or before `wished`; else the last word start; else `wished`."""
    wished = min(max(wished, 0), len(hay))
    if wished == 0:
        return 0
    for at in range(wished, max(0, wished - _LOOK_BACK), -1):
        if texts[hay[at - 1]].rstrip().endswith(".") or texts[hay[at - 1]].endswith("\n"):
            return at
    for at in range(min(wished, len(hay) - 1), max(0, wished - _LOOK_BACK), -1):
        if texts[hay[at]].startswith((" ", "\n")):
            return at
    return wished
