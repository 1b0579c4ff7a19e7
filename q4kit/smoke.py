"""Does a server's chat route answer, and answer the same thing every time? A smoke test, not a quality test.

One question is asked three times with everything stated that decides the answer: twice whole, once as a stream.
The prefix cache is emptied before each, so that all three do the same work. On a GPU equal work need not give equal
bits, and one bit can turn a greedy choice between two near tokens: there, answers whose text differs are a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from q4kit import exit_codes
from q4kit.errors import ServerError
from q4kit.report import Report
from q4kit.server.client import Client

ROUTE = "/v1/chat/completions"
MESSAGES: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "Name the four seasons, one word each."},)
MAX_TOKENS = 24
SEED = 20261129
_FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Answer:
    """What a chat completion said. `usage`: prompt, completion and total tokens."""

    text: str
    finish: str | None
    usage: Mapping[str, int | None]

    @property
    def comparable_text(self) -> str:
        """The text without a UTF-8 character that the token limit cut in two: a stream may hold it back."""
        return self.text.rstrip("\ufffd")


@dataclass
class Result:
    """The answers, and what is wrong with them."""

    model: str
    prompt_tokens: int
    answers: list[Answer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Answers that differ where equal bits are not promised."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def report(self) -> tuple[Report, int]:
        """Return the report and the exit code: 0 holds, 1 something is wrong with an answer."""
        first = self.answers[0] if self.answers else None
        good = "are well formed" if self.warnings else "are equal"
        evidence = "; ".join(self.problems) or f"two answers and a streamed one {good}, usage adds up"
        report = Report("Chat smoke test", "HOLDS" if self.holds else "BROKEN", evidence, warnings=list(self.warnings))
        report.facts = [
            ("model", self.model.rsplit("/", 1)[-1]),
            ("prompt tokens", self.prompt_tokens),
            ("completion tokens", first.usage.get("completion_tokens") if first else None),
            ("answer", repr(first.text[:60]) if first else None),
        ]
        report.data = {
            "problems": self.problems,
            "differences": self.warnings,
            "texts": [answer.text for answer in self.answers],
        }
        return report, exit_codes.HOLDS if self.holds else exit_codes.NEGATIVE


def payload(model: str) -> dict[str, Any]:
    """Return the request: greedy, seeded, short."""
    return {
        "model": model,
        "messages": [dict(message) for message in MESSAGES],
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": SEED,
        "max_tokens": MAX_TOKENS,
        "n": 1,
    }


def run(client: Client) -> Result:
    """Return what the chat route of `client`'s server answered.

    Raises:
        ServerError: the server is down, refuses, breaks off a stream, or sends what is no chat completion at all.
    """
    model = client.models()[0]
    result = Result(model, len(client.tokenize_chat(MESSAGES)))
    for kind in ("first", "second"):
        client.flush_cache()
        raw = client.openai(ROUTE, payload(model))
        if raw.get("object") != "chat.completion" or len(raw["choices"]) != 1:
            result.problems.append(
                f"{kind} answer: expected one choice of a chat.completion, found {raw.get('object')!r} "
                f"with {len(raw['choices'])} choices"
            )
        result.answers.append(_whole(raw, kind))
    client.flush_cache()
    result.answers.append(_streamed(client, payload(model)))
    for kind, answer in zip(("first", "second", "streamed"), result.answers, strict=True):
        result.problems += _problems(kind, answer, result.prompt_tokens)
    first = result.answers[0]
    exact = client.server_info().get("device") != "cuda"
    for kind, answer in (("second", result.answers[1]), ("streamed", result.answers[2])):
        if not exact and answer.comparable_text != first.comparable_text:
            # From that token on it is another answer, of another length and perhaps another end.
            result.warnings.append(_unequal(kind, first, answer)[0] + "; GPU kernels do not promise equal bits")
        else:
            result.problems += _unequal(kind, first, answer)
    return result


def _whole(raw: Mapping[str, Any], kind: str) -> Answer:
    choice = raw["choices"][0]
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        raise ServerError(
            f"{ROUTE}, {kind} answer: no message of the role 'assistant' (found {message!r:.120})",
            remedy="Is this URL an SGLang server with a chat template?",
        )
    text = (message.get("reasoning_content") or "") + (message.get("content") or "")
    return Answer(text, choice.get("finish_reason"), _usage(raw.get("usage")))


def _streamed(client: Client, request: dict[str, Any]) -> Answer:
    text, finish, usage = "", None, None
    for event in client.openai_stream(ROUTE, request | {"stream_options": {"include_usage": True}}):
        text += event.text_delta
        for choice in event.raw.get("choices") or ():
            finish = choice.get("finish_reason") or finish
        usage = event.raw.get("usage") or usage
    return Answer(text, finish, _usage(usage))


def _usage(raw: Any) -> dict[str, int | None]:
    known = raw if isinstance(raw, Mapping) else {}
    values = {name: known.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {k: v if isinstance(v, int) and not isinstance(v, bool) else None for k, v in values.items()}


def _problems(kind: str, answer: Answer, prompt: int) -> list[str]:
    """Return what is wrong with one answer by itself."""
    found = []
    if not answer.text:
        found.append(f"{kind} answer is empty")
    if answer.finish not in _FINISHED:
        found.append(f"{kind} answer: finish reason {answer.finish!r}, expected one of {', '.join(_FINISHED)}")
    sent, made, total = (answer.usage[n] for n in ("prompt_tokens", "completion_tokens", "total_tokens"))
    if sent is None or made is None or total is None:
        return [*found, f"{kind} answer: usage is incomplete ({dict(answer.usage)})"]
    if sent != prompt:
        found.append(f"{kind} answer: usage counts {sent} prompt tokens, the server's own tokenizer {prompt}")
    if sent + made != total:
        found.append(f"{kind} answer: usage says {sent} + {made} = {total}")
    if not 0 < made <= MAX_TOKENS:
        found.append(f"{kind} answer: {made} completion tokens, expected 1 to {MAX_TOKENS}")
    if answer.finish == "length" and made != MAX_TOKENS:
        found.append(f"{kind} answer: ended by its length with {made} of {MAX_TOKENS} tokens")
    return found


def _unequal(kind: str, first: Answer, other: Answer) -> list[str]:
    """Return how an answer differs from the first: its text before all else."""
    found = []
    if other.comparable_text != first.comparable_text:
        at = next(
            (i for i, (a, b) in enumerate(zip(first.text, other.text, strict=False)) if a != b),
            min(len(first.text), len(other.text)),
        )
        found.append(
            f"{kind} answer differs from the first at character {at}: {other.text[at : at + 20]!r}, "
            f"expected {first.text[at : at + 20]!r}"
        )
    if other.finish != first.finish:
        found.append(f"{kind} answer: finish reason {other.finish!r}, the first had {first.finish!r}")
    if other.usage != first.usage:
        found.append(f"{kind} answer: usage {dict(other.usage)}, the first had {dict(first.usage)}")
    return found
