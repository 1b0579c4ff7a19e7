"""Whole runs on a fake that reads its prompt: honest readers, cheats, and servers that break."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import requests

from q4kit.errors import ServerError, UsageError
from q4kit.needle import plot, render
from q4kit.needle.plan import Config, Control, Mode
from q4kit.needle.runner import Ended, NotFiniteError, RunResult, code_logprobs, run
from q4kit.needle.score import Outcome
from q4kit.needle.summary import Verdict, judge, may_claim, summarise
from q4kit.report import dump_json
from tests.fakes.adversary import Adversary, Reply

Reader = Callable[[str, str], str]
"""(prompt text, key) -> what the model says."""


def honest(prompt: str, key: str) -> str:
    found = re.search(rf"depot {key} is ([A-Z0-9-]{{14}})\.", prompt)
    return found[1] if found else "NONE"


class Model(Adversary):
    """Answers by `reader`; a forced code gets `seen` nats when it stands in the prompt and `unseen` when not."""

    def __init__(self, reader: Reader = honest, *, seen: float = -1.0, unseen: float = -40.0) -> None:
        super().__init__()
        self.reader, self.seen, self.unseen = reader, seen, unseen
        self.handlers["/generate"] = self.generate

    def generate(self, payload: dict[str, Any]) -> Reply:
        ids = payload["input_ids"]
        text = self.tokenizer.decode(ids)
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "cached_tokens": 0}
        if payload.get("return_logprob"):
            start = payload["logprob_start_len"]
            code = self.tokenizer.decode(ids[start + 1 :]).strip()
            total = self.seen if text.count(code) > 1 else self.unseen
            rows = [[None, ids[start], None]] + [[total / len(ids[start + 1 :]), i, None] for i in ids[start + 1 :]]
            meta |= {"input_token_logprobs": rows, "finish_reason": {"type": "length", "length": 0}}
            return Reply({"text": "", "meta_info": meta})
        asked = re.findall(r"access code of depot (\w+) is stated", text)
        key = asked[-1] if asked else "nobody"
        meta["finish_reason"] = {"type": "length" if payload["sampling_params"]["ignore_eos"] else "stop"}
        return Reply({"text": f" {self.reader(text, key)}\nmore words", "meta_info": meta})


CONFIG = Config((6000, 8000), (0.0, 0.5, 1.0), short_length=5000, distractors=3)


def go(model: Model, config: Config = CONFIG) -> RunResult:
    return run(model.client(), config, RunResult())


def test_a_length_equal_to_the_context_is_refused_with_the_largest_that_fits() -> None:
    model = Model()
    model.info["context_length"] = 8000
    with pytest.raises(UsageError, match="a prompt of 8000 tokens and 64 for the answer do not fit") as caught:
        go(model)
    assert model.payloads("/generate") == []
    said = re.search(r"the largest length that fits is (\d+): -l (\d+),", caught.value.remedy)
    assert said is not None
    largest = int(said[1])
    assert said[2] == said[1]
    with pytest.raises(UsageError):
        go(model, Config((largest + 1,), (0.5,), short_length=5000))
    assert go(model, Config((largest,), (0.5,), short_length=5000)).ended is Ended.COMPLETE


def verdict(result: RunResult, mode: Mode = Mode.IGNORE_EOS, **more: Any) -> tuple[Verdict, int]:
    found = judge(result, summarise(result, mode), **more)
    return found.verdict, found.exit_code


@pytest.mark.parametrize("mode", list(Mode))
def test_honest_reader_is_retrieved_with_all_controls(mode: Mode) -> None:
    config = Config((6000, 8000), (0.0, 0.5, 1.0), short_length=5000, distractors=3, mode=mode)
    result = go(Model(), config)
    assert verdict(result, mode) == (Verdict.RETRIEVED, 0)
    summary = summarise(result, mode)
    assert (summary.overall.found, summary.overall.trials) == (6, 6)
    controls = {(c.control, c.length): c.passed for c in summary.controls}
    assert controls == {
        (Control.SHORT, 5000): True,
        **{(c, n): True for c in (Control.ABSENT, Control.SHIFTED) for n in (6000, 8000)},
    }


def test_prompts_have_the_exact_length_and_forced_ones_stay_below_it() -> None:
    model = Model()
    result = go(model)
    assert {t.prompt_tokens for t in result.trials} == {5000, 6000, 8000}
    forced = [len(p["input_ids"]) for p in model.payloads("/generate") if p.get("return_logprob")]
    assert forced
    assert all(n in range(5976, 6001) or n in range(7976, 8001) for n in forced)


def test_requests_about_one_haystack_come_in_a_row() -> None:
    """A 262,144-token prefill takes minutes: each haystack may be computed once, then only its tails."""
    model = Model()
    go(model)
    heads: list[tuple[int, ...]] = []
    for path, payload in model.transport.seen:
        if path == "/generate" and (not heads or heads[-1] != tuple(payload["input_ids"][:4000])):
            heads.append(tuple(payload["input_ids"][:4000]))
    # short, then per length: with needles, without, shifted.
    assert len(heads) == 1 + 2 * 3
    assert len(set(heads)) == len(heads)


def test_six_of_six_may_claim_sixty_percent() -> None:
    summary = summarise(go(Model()), Mode.IGNORE_EOS)
    assert summary.overall.bound == pytest.approx(0.05 ** (1 / 6))
    assert "3/3 codes retrieved; the true rate is at least 36.8%" in may_claim(summary)[0]
    assert "needs 59 trials" in may_claim(summary)[-1]


def test_required_bound_asks_for_more_trials() -> None:
    result = go(Model())
    assert verdict(result, require=0.9) == (Verdict.INCONCLUSIVE, 3)
    assert "90% needs 23 more trials" in judge(result, summarise(result, Mode.IGNORE_EOS), require=0.9).evidence


def test_reader_that_loses_the_middle_is_located() -> None:
    def middle_blind(prompt: str, key: str) -> str:
        at = prompt.find(f"depot {key} is") / len(prompt)
        return "AAAA-BBBB-CCCC" if len(prompt) > 7000 and 0.3 < at < 0.7 else honest(prompt, key)

    result = go(Model(middle_blind))
    assert verdict(result)[0] is Verdict.LOST
    lost = [(c.length, c.depth) for c in summarise(result, Mode.IGNORE_EOS).cells if not c.found]
    assert lost == [(8000, 0.5)]


def test_reader_that_gives_a_neighbours_code_is_named() -> None:
    def neighbour(prompt: str, key: str) -> str:
        codes = re.findall(r"depot (\w+) is ([A-Z0-9-]{14})\.", prompt)
        return next(code for name, code in codes if name != key)

    result = go(Model(neighbour))
    assert verdict(result) == (Verdict.LOST, 1)
    real = [t for t in result.trials if t.control is Control.NONE]
    assert {t.score.outcome for t in real} == {Outcome.WRONG_CODE}
    assert all(t.score.owner and t.score.owner != t.key for t in real)


def test_a_model_that_cannot_read_is_lost_and_expected_so() -> None:
    result = go(Model(lambda prompt, key: "mumble"))
    assert verdict(result) == (Verdict.LOST, 1)
    assert "not even over a short context" in judge(result, summarise(result, Mode.IGNORE_EOS)).evidence
    assert verdict(result, expect="none") == (Verdict.NONE_FOUND, 0)
    assert verdict(go(Model()), expect="none") == (Verdict.RETRIEVED, 1)


def test_answers_from_a_stale_cache_fail_the_controls() -> None:
    """A server that mixes requests up answers with a code that is not in the prompt."""
    memory: dict[str, str] = {}

    def stale(prompt: str, key: str) -> str:
        return memory.setdefault(key, honest(prompt, key))

    result = go(Model(stale))
    assert verdict(result) == (Verdict.INVALID, 1)
    assert "were not in the prompt" in judge(result, summarise(result, Mode.IGNORE_EOS)).evidence
    shifted = [c for c in summarise(result, Mode.IGNORE_EOS).controls if c.control is Control.SHIFTED]
    assert all(c.good == 0 for c in shifted)


def test_guessing_instead_of_none_fails_the_absent_control_in_chat() -> None:
    def guesser(prompt: str, key: str) -> str:
        found = honest(prompt, key)
        return found if found != "NONE" else re.findall(r"is ([A-Z0-9-]{14})\.", prompt)[0]

    config = Config((6000,), (0.0, 1.0), short_length=5000, distractors=3, mode=Mode.CHAT)
    assert verdict(go(Model(guesser), config), Mode.CHAT) == (Verdict.INVALID, 3)


def test_http_errors_are_not_wrong_answers() -> None:
    model = Model()
    good = model.handlers["/generate"]
    model.handlers["/generate"] = lambda p: (
        Reply({"error": {"message": "bad request"}}, None, 400) if len(p["input_ids"]) > 7000 else good(p)
    )
    config = Config((6000, 8000), (0.0, 0.5, 1.0), short_length=5000, distractors=3, logprob=False)
    result = go(model, config)
    assert verdict(result) == (Verdict.INVALID, 3)
    summary = summarise(result, Mode.IGNORE_EOS)
    assert (summary.overall.found, summary.overall.trials, summary.overall.broken) == (3, 3, 3)
    assert judge(result, summary).evidence == "3 of 6 answers cannot be judged (limit 10%)"
    assert "bad request" in next(t.finish for t in result.trials if t.score.outcome is Outcome.HTTP_ERROR)


def test_nan_is_a_negative_verdict_not_a_miss() -> None:
    model = Model()
    meta = {"prompt_tokens": 1, "finish_reason": {"type": "stop", "matched": "NaN happened"}}
    model.handlers["/generate"] = lambda _: Reply({"text": "", "meta_info": meta})
    result = go(model)
    assert {t.score.outcome for t in result.trials} == {Outcome.NAN}
    assert verdict(result) == (Verdict.INVALID, 1)
    assert result.logprob_faults


@pytest.mark.parametrize("stop", ["server", "user"])
def test_cut_short_keeps_every_trial_so_far(stop: str) -> None:
    model = Model()
    good = model.handlers["/generate"]
    calls = 0

    def fail(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += "is stated" in model.tokenizer.decode(payload["input_ids"])
        if calls == 8:
            if stop == "user":
                raise KeyboardInterrupt
            model.transport.down = True
            raise requests.ConnectionError("Connection refused")
        return good(payload)

    model.handlers["/generate"] = fail
    result = go(model, Config((6000, 8000), (0.0, 0.5, 1.0), short_length=5000, distractors=3, logprob=False))
    assert len(result.trials) == 7
    assert result.ended is (Ended.INTERRUPTED if stop == "user" else Ended.FAULT)
    assert verdict(result) == (Verdict.PARTIAL, 130 if stop == "user" else 4)
    summary = summarise(result, Mode.IGNORE_EOS)
    data = render.report(result, summary, judge(result, summary), CONFIG, {}).to_json()
    assert data["partial"] is True
    assert len(json.loads(dump_json(data))["trials"]) == 7


def test_logprob_needle_grades_what_generation_cannot() -> None:
    """A model that says nothing useful but still favours the code: 0/n retrieved, a clear gain."""
    result = go(Model(lambda prompt, key: "mumble", seen=-30.0, unseen=-40.0))
    summary = summarise(result, Mode.IGNORE_EOS)
    assert summary.overall.found == 0
    assert all(c.gain.mean == pytest.approx(10.0) for c in summary.logprob_cells)
    blind = summarise(go(Model(seen=-40.0, unseen=-40.0)), Mode.IGNORE_EOS)
    assert all(c.gain.mean == pytest.approx(0.0, abs=1e-9) for c in blind.logprob_cells)


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ServerError, match=r"ids \[1, 2\], the forced code is \[1, 3\]"):
        code_logprobs([[None, 0, None], [-1.0, 1, None], [-1.0, 2, None]], [1, 3])


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_logprobs_that_are_not_finite_are_refused(bad: float | None) -> None:
    with pytest.raises(NotFiniteError, match="not finite"):
        code_logprobs([[-1.0, 1, None], [bad, 3, None]], [1, 3])


@pytest.mark.parametrize("rows", [None, [], [[-1.0, 3, None]]])
def test_missing_logprobs_are_refused(rows: list[Any] | None) -> None:
    with pytest.raises(ServerError, match="the forced code is"):
        code_logprobs(rows, [1, 3])


def test_server_that_adds_tokens_is_refused() -> None:
    model = Model()
    good = model.handlers["/generate"]

    def longer(payload: dict[str, Any]) -> Reply:
        reply = good(payload)
        reply.body["meta_info"]["prompt_tokens"] += 1
        return reply

    model.handlers["/generate"] = longer
    result = go(model)
    assert result.ended is Ended.FAULT
    assert re.search(r"counted \d+ prompt tokens, \d+ ids were sent", result.fault)


def test_report_holds_raw_answers_and_a_picture_can_be_drawn() -> None:
    result = go(Model())
    summary = summarise(result, Mode.IGNORE_EOS)
    report = render.report(result, summary, judge(result, summary), CONFIG, {})
    text = report.text()
    assert "May be claimed:" in text
    assert "3/3" in text
    assert all(t["text"] for t in report.to_json()["trials"])
    assert plot.heatmap_png(summary, "t").startswith(b"\x89PNG")
