"""Ask a server for needles: requests out, scored trials in. No printing, no statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from q4kit.bench.room import room
from q4kit.errors import ServerError, UsageError
from q4kit.needle.codes import Needle
from q4kit.needle.haystack import Frame, Haystack, Hidden, TokenTexts, ask, build, chat_frame, chat_mark
from q4kit.needle.plan import Config, Control, Mode, PromptPlan, make_plan
from q4kit.needle.score import Answer, Score, chat_answer, forced_answer, score
from q4kit.server.client import GREEDY, NAN_FINISH_TEXT

CODE_RESERVE = 24
"""Tokens kept free for the forced code of the logprob needle (a code takes 6 to 14)."""

Progress = Callable[[str], None]


class Server(Protocol):
    """What the needle test needs from `q4kit.server.client.Client`."""

    base_url: str

    def health(self) -> bool: ...
    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, ids: list[int]) -> str: ...
    def tokenize_chat(self, messages: Sequence[Mapping[str, str]], **chat: Any) -> list[int]: ...
    def flush_cache(self) -> None: ...
    def server_info(self) -> dict[str, Any]: ...
    def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]: ...


class Ended(StrEnum):
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    FAULT = "fault"


@dataclass(frozen=True)
class Trial:
    """One question and its scored answer. `depth` is where the needle really lay, 0..1."""

    control: Control
    length: int
    cell_depth: float
    depth: float
    token_index: int
    key: str
    code: str
    prompt_tokens: int | None
    cached_tokens: int | None
    score: Score
    text: str
    thinking: str
    finish: str

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "control": self.control.value, "score": self.score.to_json()}


@dataclass(frozen=True)
class Forced:
    """Summed logprob of a forced code (nats), cached prompt tokens, and the number of code tokens."""

    total: float
    cached: int | None
    tokens: int


@dataclass(frozen=True)
class LogprobTrial:
    """Logprob of the right code, forced, with the needle in the prompt and without it. Nats, summed over tokens."""

    length: int
    cell_depth: float
    depth: float
    key: str
    tokens: int
    present: float
    absent: float
    cached_present: int | None
    cached_absent: int | None

    @property
    def gain(self) -> float:
        """How much the needle raises the code's logprob, nats. A reader of the needle gains dozens; noise gains 0."""
        return self.present - self.absent

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "gain": self.gain}


@dataclass
class RunResult:
    trials: list[Trial] = field(default_factory=list)
    logprobs: list[LogprobTrial] = field(default_factory=list)
    logprob_faults: list[str] = field(default_factory=list)
    ended: Ended = Ended.COMPLETE
    fault: str = ""
    remedy: str = ""


class NotFiniteError(ServerError):
    """A logprob of the forced code was NaN or infinite."""


def run(
    server: Server,
    config: Config,
    result: RunResult,
    *,
    progress: Progress = lambda _: None,
    chat: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run all prompts of the plan into `result` and return it; Ctrl-C and a lost server end it early, kept."""
    try:
        check_room(server.server_info(), max(config.lengths), config.answer_tokens)
        frame = Frame()
        if config.mode is Mode.CHAT:
            rendered = server.tokenize_chat([{"role": "user", "content": chat_mark()}], **(chat or {}))
            frame = chat_frame(server, rendered)
        _Runner(server, config, frame, result, progress).all()
    except KeyboardInterrupt:
        result.ended = Ended.INTERRUPTED
    except ServerError as error:
        result.ended, result.fault, result.remedy = Ended.FAULT, str(error), error.remedy
    return result


def check_room(info: Mapping[str, Any], length: int, answer_tokens: int) -> None:
    """Raise UsageError when the longest prompt and its answer cannot fit, as far as the server says what fits."""
    found = room(info, answer_tokens)
    if found is not None and length > found.longest:
        raise UsageError(
            f"a prompt of {length} tokens and {answer_tokens} for the answer do not fit: "
            f"the server's {found.name} is {found.limit}",
            remedy=f"the largest length that fits is {max(found.longest, 0)}: -l {max(found.longest, 0)}, or start the "
            f"server with a larger {found.name}",
        )


class _Runner:
    def __init__(self, server: Server, config: Config, frame: Frame, result: RunResult, progress: Progress) -> None:
        self.server, self.config, self.frame, self.result = server, config, frame, result
        self.progress = progress
        self.texts = TokenTexts(server)

    def all(self) -> None:
        absent_done: set[int] = set()
        plans = make_plan(self.config)
        for number, plan in enumerate(plans, 1):
            self.progress(f"prompt {number}/{len(plans)}: {plan.length} tokens, {plan.control.value}")
            # All requests about one haystack in a row, so that its prefix is computed once.
            present = self._build(plan)
            self._questions(plan, present, plan.control)
            if plan.control is not Control.NONE:
                continue
            with_needle = self._forced_all(present) if self.config.logprob else {}
            first_of_length = plan.length not in absent_done
            if not (self.config.logprob or first_of_length):
                continue
            removed = self._build(plan, remove=True)
            if first_of_length:
                absent_done.add(plan.length)
                self._questions(plan, removed, Control.ABSENT)
            elif self.config.logprob:
                self._open(removed)
            if self.config.logprob:
                self._pair(present, with_needle, self._forced_all(removed))

    def _build(self, plan: PromptPlan, *, remove: bool = False) -> Haystack:
        return build(
            self.server, plan, self.config.kind, self.config.mode, self.frame, self.texts,
            remove_wanted=remove, reserve=CODE_RESERVE if self.config.logprob else 0,
        )  # fmt: skip

    def _open(self, hay: Haystack) -> None:
        """Flush the cache and compute the haystack once, so that every question only computes its tail.

        Asking the first question would not do: a model with recurrent layers can continue only from a state that
        was saved, and the server saves one at the end of a request, behind the point where the questions part.
        """
        self.server.flush_cache()
        if not self.config.share_prefix:
            return
        try:
            self.server.generate({"input_ids": list(hay.ids), "sampling_params": {**GREEDY, "max_new_tokens": 1}})
        except ServerError:
            # The questions will fail the same way and be classified; only a dead server ends the run here.
            self.server.health()

    def _questions(self, plan: PromptPlan, hay: Haystack, control: Control) -> None:
        self._open(hay)
        needles = [h.needle for h in hay.hidden]
        for hidden in (h for h in hay.hidden if h.wanted):
            if not self.config.share_prefix:
                self.server.flush_cache()
            ids = ask(self.server, hay, self.config.mode, hidden.needle.key)
            others = [n for n in needles if n.key != hidden.needle.key]
            trial = self._trial(plan, hidden, ids, others, control)
            self.result.trials.append(trial)
            self.progress(f"  depth {hidden.depth:6.1%}  {trial.score.outcome.value}")

    def _trial(self, plan: PromptPlan, hidden: Hidden, ids: list[int], others: list[Needle], control: Control) -> Trial:
        params = {
            **GREEDY,
            "ignore_eos": self.config.mode is Mode.IGNORE_EOS,
            "max_new_tokens": self.config.answer_tokens,
        }
        text, meta = "", {}
        try:
            answer_json = self.server.generate({"input_ids": ids, "sampling_params": params})
            text, meta = str(answer_json.get("text") or ""), answer_json["meta_info"]
            finish = str((meta.get("finish_reason") or {}).get("type", "stop"))
            answer = self._answer(text, finish)
        except ServerError as error:
            if NAN_FINISH_TEXT in str(error):
                answer = Answer("", finish="nan", error=str(error))
            else:
                # Refused request or dead server? The second ends the run, the first is an outcome.
                self.server.health()
                answer = Answer("", finish="error", error=str(error))
        prompt_tokens = meta.get("prompt_tokens")
        if meta and prompt_tokens != len(ids):
            raise ServerError(
                f"the server counted {prompt_tokens} prompt tokens, {len(ids)} ids were sent",
                remedy="the server must take input_ids as they are; is it SGLang?",
            )
        return Trial(
            control=control, length=plan.length, cell_depth=hidden.cell_depth, depth=hidden.depth,
            token_index=hidden.index, key=hidden.needle.key, code=hidden.needle.code, prompt_tokens=prompt_tokens,
            cached_tokens=meta.get("cached_tokens"), score=score(answer, hidden.needle, others), text=text,
            thinking=answer.thinking, finish=answer.error or answer.finish,
        )  # fmt: skip

    def _answer(self, text: str, finish: str) -> Answer:
        if self.config.mode is Mode.CHAT:
            return chat_answer(text, finish, starts_inside=self.frame.opens_thinking)
        return forced_answer(text, finish)

    def _forced_all(self, hay: Haystack) -> dict[str, Forced]:
        """Return the forced logprob of every wanted code in one haystack, by key; NaN is noted and left out."""
        found: dict[str, Forced] = {}
        for hidden in (h for h in hay.hidden if h.wanted):
            try:
                found[hidden.needle.key] = self._forced(hay, hidden.needle)
            except NotFiniteError as error:
                self.result.logprob_faults.append(str(error))
            except ServerError as error:
                if NAN_FINISH_TEXT not in str(error):
                    raise
                self.result.logprob_faults.append(str(error))
        return found

    def _pair(self, hay: Haystack, present: Mapping[str, Forced], absent: Mapping[str, Forced]) -> None:
        """Keep one logprob trial for every code that was read in both haystacks."""
        for hidden in hay.hidden:
            key = hidden.needle.key
            if key not in present or key not in absent:
                continue
            trial = LogprobTrial(
                length=hay.length,
                cell_depth=hidden.cell_depth,
                depth=hidden.depth,
                key=key,
                tokens=present[key].tokens,
                present=present[key].total,
                absent=absent[key].total,
                cached_present=present[key].cached,
                cached_absent=absent[key].cached,
            )
            self.result.logprobs.append(trial)

    def _forced(self, hay: Haystack, needle: Needle) -> Forced:
        """Return the logprob of a code, forced after its question."""
        if not self.config.share_prefix:
            self.server.flush_cache()
        prompt = ask(self.server, hay, self.config.mode, needle.key, answering=True)
        code = self.server.tokenize(" " + needle.code)
        if len(code) > CODE_RESERVE:
            raise UsageError(f"code {needle.code} takes {len(code)} tokens, {CODE_RESERVE} are reserved")
        answer = self.server.generate(
            {
                "input_ids": [*prompt, *code],
                "sampling_params": {**GREEDY, "max_new_tokens": 0},
                "return_logprob": True,
                # The server returns no logprob for the token at the start position itself.
                "logprob_start_len": len(prompt) - 1,
            }
        )
        meta = answer["meta_info"]
        values = code_logprobs(meta.get("input_token_logprobs"), code)
        return Forced(math.fsum(values), meta.get("cached_tokens"), len(code))


def code_logprobs(entries: Iterable[Sequence[Any]] | None, code: Sequence[int]) -> list[float]:
    """Return the logprobs of the code's tokens from `input_token_logprobs` ([logprob, id, text] each).

    Raises:
        ServerError: missing entries, or ids that are not the code's: the positions are off.
        NotFiniteError: a value is NaN, infinite or null.
    """
    rows = list(entries or [])[-len(code) :]
    ids = [row[1] for row in rows]
    if ids != list(code):
        raise ServerError(
            f"logprobs came back for ids {ids}, the forced code is {list(code)}",
            remedy="the server cut or shifted input_token_logprobs; nothing can be read from it",
        )
    values = [row[0] for row in rows]
    if any(v is None or not math.isfinite(v) for v in values):
        raise NotFiniteError(f"logprobs of the forced code are not finite: {values}")
    return [float(v) for v in values]
