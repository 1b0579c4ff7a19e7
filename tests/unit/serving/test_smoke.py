"""The chat smoke test against a fake server of known truth: the good answer passes, each bad one is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from q4kit import smoke
from q4kit.errors import ServerError
from tests.fakes.adversary import BREAK, DONE, Adversary, Reply, sse

TEXT = "Spring summer autumn winter."
Change = Callable[[dict[str, Any], int], None]
"""Spoils an answer; the number says which one (0 and 1 whole, 2 streamed)."""


class Chat:
    """A chat route that answers TEXT in 24 tokens, unless `change` spoils it."""

    def __init__(self, change: Change | None = None, cut: bool = False, device: str = "cpu") -> None:
        self.server = Adversary(info={"device": device})
        self.change, self.cut, self.count = change or (lambda answer, number: None), cut, 0
        self.server.handlers[smoke.ROUTE] = self.reply

    def reply(self, payload: dict[str, Any]) -> Reply:
        prompt = len(self.server._tokenize({"messages": payload["messages"]}).body["tokens"])
        answer: dict[str, Any] = {
            "object": "chat.completion",
            "choices": [{"message": {"role": "assistant", "content": TEXT}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 24, "total_tokens": prompt + 24},
        }
        self.change(answer, self.count)
        self.count += 1
        if not payload.get("stream"):
            return Reply(answer)
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        parts = [text[:9], text[9:]]
        events: list[dict[str, Any] | str] = [{"choices": [{"delta": {"content": p}}]} for p in parts]
        events.append({"choices": [{"delta": {}, "finish_reason": choice["finish_reason"]}]})
        events.append({"choices": [], "usage": answer["usage"]})
        if self.cut:
            return Reply(steps=[(0.0, sse(events[0])), (0.0, BREAK)])
        return Reply(steps=[(0.0, sse(*events, DONE))])

    def run(self) -> smoke.Result:
        return smoke.run(self.server.client())


def test_a_good_server_holds_and_every_parameter_is_stated() -> None:
    chat = Chat()
    result = chat.run()
    assert result.problems == []
    report, code = result.report()
    assert (report.verdict, code) == ("HOLDS", 0)
    sent = chat.server.payloads(smoke.ROUTE)
    assert len(sent) == 3
    assert all(p["temperature"] == 0.0 and p["seed"] == smoke.SEED and p["max_tokens"] == 24 for p in sent)
    assert [p.get("stream", False) for p in sent] == [False, False, True]
    assert len(chat.server.payloads("/flush_cache")) == 3


def spoil(path: tuple[Any, ...], value: Any, only: int | None = None) -> Change:
    def change(answer: dict[str, Any], number: int) -> None:
        if only is not None and number != only:
            return
        target: Any = answer
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = copy.deepcopy(value)

    return change


CONTENT = ("choices", 0, "message", "content")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil(CONTENT, ""), "first answer is empty"),
        (
            spoil(CONTENT, "Spring summer autumn  winter.", only=1),
            "second answer differs from the first at character 21",
        ),
        (spoil(CONTENT, "Spring summer autumn", only=2), "streamed answer differs from the first at character 20"),
        (spoil(("choices", 0, "finish_reason"), None), "finish reason None"),
        (spoil(("choices", 0, "finish_reason"), "stop", only=2), "finish reason 'stop', the first had 'length'"),
        (spoil(("usage", "total_tokens"), 7), "= 7"),
        (spoil(("usage", "prompt_tokens"), 1), "usage counts 1 prompt tokens, the server's own tokenizer"),
        (spoil(("usage", "completion_tokens"), 25), "25 completion tokens, expected 1 to 24"),
        (spoil(("usage", "completion_tokens"), 23), "ended by its length with 23 of 24"),
        (spoil(("usage",), None), "usage is incomplete"),
        (spoil(("usage", "total_tokens"), True), "usage is incomplete"),
        (spoil(("object",), "text_completion"), "found 'text_completion'"),
    ],
)
def test_a_bad_answer_is_named(change: Change, words: str) -> None:
    result = Chat(change).run()
    report, code = result.report()
    assert (report.verdict, code) == ("BROKEN", 1)
    assert any(words in problem for problem in result.problems), result.problems


def test_on_a_gpu_another_text_is_a_warning_with_its_position() -> None:
    def other(answer: dict[str, Any], number: int) -> None:
        if number == 1:
            answer["choices"][0] |= {"finish_reason": "stop"}
            answer["choices"][0]["message"]["content"] = "Spring summer fall."
            prompt = answer["usage"]["prompt_tokens"]
            answer["usage"] |= {"completion_tokens": 5, "total_tokens": prompt + 5}

    report, code = Chat(other, device="cuda").run().report()
    assert (report.verdict, code) == ("HOLDS", 0)
    assert "equal" not in report.evidence
    (warning,) = report.warnings
    assert "second answer differs from the first at character 14" in warning
    assert Chat(other).run().report()[1] == 1


@pytest.mark.parametrize(
    "change",
    [
        spoil(CONTENT, "", only=1),
        spoil(("choices", 0, "finish_reason"), "stop", only=2),
        spoil(("usage", "total_tokens"), 7, only=1),
    ],
)
def test_on_a_gpu_everything_else_still_counts(change: Change) -> None:
    assert Chat(change, device="cuda").run().report()[1] == 1


def test_a_character_cut_by_the_token_limit_is_no_difference() -> None:
    assert Chat(spoil(CONTENT, TEXT + "\ufffd", only=0)).run().problems == []
    assert Chat(spoil(CONTENT, "\ufffd" + TEXT, only=0)).run().problems != []


@pytest.mark.parametrize("message", [None, {"role": "user", "content": "x"}, "text"])
def test_what_is_no_chat_completion_is_a_server_error(message: Any) -> None:
    with pytest.raises(ServerError, match="no message of the role 'assistant'"):
        Chat(spoil(("choices", 0, "message"), message)).run()


def test_a_stream_that_breaks_off_is_a_server_error() -> None:
    with pytest.raises(ServerError):
        Chat(cut=True).run()


def test_nan_logits_and_a_missing_route_are_server_errors() -> None:
    with pytest.raises(ServerError, match="NaN"):
        Chat(spoil(("choices", 0, "matched_stop"), "NaN happened")).run()
    server = Adversary()
    with pytest.raises(ServerError, match="404"):
        smoke.run(server.client())
