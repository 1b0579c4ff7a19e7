"""A published number against a measurement: conditions first, then the equivalence test."""

from __future__ import annotations

from typing import Any

import pytest

from q4kit.bench.verify import Verdict, config_for, judge, parse_flag, report, samples
from q4kit.claims.ledger import Claim, parse
from q4kit.errors import UsageError


def claim(**changes: Any) -> Claim:
    entry = {
        "id": "c", "owner": "theirs", "statement": "s", "value": 57.1, "high": 58.2, "unit": "tok/s", "metric": "tg",
        "source": "a card", "base": "elsewhere", "gpu": "NVIDIA RTX PRO 4000 Blackwell",
        "flags": ["--kv-cache-dtype=fp8_e4m3", "--language-model-only"],
        "conditions": {"context": 10001, "tokens": 200, "text": "filler", "model": "M", "sglang": "0.5.23"}, **changes,
    }  # fmt: skip
    return parse({"schema": 1, "claim": [entry]}).claims["c"]


def measurement(rates: list[float], **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "partial": False,
        "points": [
            {"context": 10001, "kind": "filler", "tokens": 200, "samples": [sample(r) for r in rates]},
            {"context": 101, "kind": "filler", "tokens": 200, "samples": [sample(99.0)]},
            {"context": 10001, "kind": "words", "tokens": 200, "samples": [sample(11.0)]},
        ],
        "answers": [],
        "provenance": {
            "device": {"name": "RTX PRO 4000 Blackwell"},
            "model": {"name": "M"},
            "sglang": {"version": "0.5.23"},
            "server_args": {"kv_cache_dtype": "fp8_e4m3", "language_model_only": True},
        },
    }
    return {**data, **changes}


def sample(rate: float, **changes: Any) -> dict[str, Any]:
    return {"refusals": [], "decode_rate": rate, "prefill_rate": rate * 40, "ttft_s": 4.0, "tpot_s": 1 / rate,
            "page_cache": "warm", **changes}  # fmt: skip


GOOD = [57.5, 57.6, 57.4, 57.7, 57.3]


def test_same_conditions_same_speed_agrees() -> None:
    answer = judge(claim(), measurement(GOOD))
    assert answer.verdict is Verdict.AGREES
    assert answer.exit_code == 0
    assert answer.sample == tuple(GOOD)


@pytest.mark.parametrize(
    ("rates", "verdict", "code"),
    [
        ([62.0, 62.1, 61.9, 62.0], Verdict.FASTER, 0),
        ([40.0, 40.1, 39.9, 40.0], Verdict.SLOWER, 1),
        ([50.0, 65.0, 57.0], Verdict.INCONCLUSIVE, 3),
        ([57.6], Verdict.INCONCLUSIVE, 3),
    ],
)
def test_other_speeds(rates: list[float], verdict: Verdict, code: int) -> None:
    answer = judge(claim(), measurement(rates))
    assert (answer.verdict, answer.exit_code) == (verdict, code)


def test_inconclusive_says_how_many_more() -> None:
    answer = judge(claim(), measurement([56.0, 59.5, 57.0]))
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert answer.test is not None
    assert f"run {answer.test.more_repeats} more" in answer.evidence


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("device", "name"), "NVIDIA H200", "gpu"),
        (("device", "name"), "NVIDIA RTX PRO 4000 Blackwell SFF", "gpu"),
        (("model", "name"), "N", "model"),
        (("sglang", "version"), "0.5.22", "sglang"),
        (("server_args", "kv_cache_dtype"), "auto", "--kv-cache-dtype"),
        (("server_args", "language_model_only"), False, "--language-model-only"),
    ],
)
def test_each_differing_condition_is_named(path: tuple[str, str], value: Any, name: str) -> None:
    """vllm 38182: numbers withdrawn because baseline and test differed in server flags."""
    data = measurement(GOOD)
    data["provenance"][path[0]][path[1]] = value
    answer = judge(claim(), data)
    assert answer.verdict is Verdict.NOT_COMPARABLE
    assert [m.name for m in answer.mismatches] == [name]
    assert answer.evidence == f"differs in {name}"
    assert answer.exit_code == 3


def test_what_the_measurement_does_not_know_is_a_difference() -> None:
    data = measurement(GOOD, provenance={})
    names = {m.name for m in judge(claim(), data).mismatches}
    assert names == {"gpu", "model", "sglang", "--kv-cache-dtype", "--language-model-only"}


def test_allowed_differences_are_listed_with_the_verdict() -> None:
    data = measurement(GOOD)
    data["provenance"]["device"]["name"] = "NVIDIA H200"
    answer = judge(claim(), data, vary=["gpu"])
    assert answer.verdict is Verdict.AGREES
    assert [m.name for m in answer.varied] == ["gpu"]
    assert "verdict under changed conditions: gpu" in report(claim(), answer).text()


def test_other_contexts_and_texts_are_not_mixed_in() -> None:
    assert samples(claim(), measurement(GOOD)) == tuple(GOOD)
    data = measurement(GOOD)
    del data["points"][0]
    answer = judge(claim(), data)
    assert answer.verdict is Verdict.NOT_COMPARABLE
    assert answer.mismatches[0].expected == "context 10001, tokens 200, text filler"


def test_refused_samples_do_not_count() -> None:
    data = measurement(GOOD)
    data["points"][0]["samples"].append(sample(500.0, refusals=["CACHED_PREFIX"]))
    assert samples(claim(), data) == tuple(GOOD)


def test_partial_run_is_not_comparable_unless_allowed() -> None:
    data = measurement(GOOD, partial=True)
    assert judge(claim(), data).evidence == "differs in partial"
    assert judge(claim(), data, vary=["partial"]).verdict is Verdict.AGREES


def test_page_cache_state_is_a_condition() -> None:
    cold = claim(conditions={"context": 10001, "tokens": 200, "text": "filler", "page_cache": "cold"})
    answer = judge(cold, measurement(GOOD))
    assert [(m.name, m.expected, m.found) for m in answer.mismatches] == [("page_cache", "cold", "warm")]


def test_latency_claims_turn_around_and_scale() -> None:
    ttft = claim(metric="ttft", unit="ms", value=4000, high=4000)
    assert judge(ttft, measurement(GOOD)).verdict is Verdict.AGREES
    slow = claim(metric="ttft", unit="ms", value=1000, high=1000)
    assert judge(slow, measurement(GOOD)).verdict is Verdict.SLOWER


def test_domain_claims_read_the_domain_answers() -> None:
    answers = [
        {"domain": d, "refusals": [], "completion_tokens": 512, "latency_s": 20.0, "accept_length": 2.5 + i / 100,
         "ttft_s": 0.9 if i < 7 else 9.0, "tpot_s": 0.04 if d == "chat" else 0.06}
        for d in ("chat", "code") for i in range(10)
    ]  # fmt: skip
    data = measurement(GOOD, answers=answers)
    del data["provenance"]["server_args"], data["provenance"]["device"]
    plain = {"gpu": "", "flags": []}
    chat = claim(metric="accept_length", unit="tokens", value=2.545, high=2.545, conditions={"domain": "chat"}, **plain)
    assert samples(chat, data) == tuple(2.5 + i / 100 for i in range(10))
    assert judge(chat, data).verdict is Verdict.AGREES
    whole = claim(metric="throughput", value=25.6, high=25.6, conditions={"domain": "overall"}, **plain)
    assert samples(whole, data) == (25.6,) * 20
    assert judge(whole, data).verdict is Verdict.AGREES
    # The published TPOT is a mean of medians, so it is compared as one.
    tpot = claim(metric="tpot", unit="ms", value=50, high=50, conditions={"domain": "overall"}, **plain)
    assert judge(tpot, data).verdict is Verdict.AGREES
    # A slow tail that would quadruple the mean does not move the median.
    ttft = claim(metric="ttft", unit="ms", value=900, high=900, conditions={"domain": "overall"}, **plain)
    answer = judge(ttft, data)
    assert answer.test is not None
    assert answer.test.difference == pytest.approx(0.0)


def test_few_answers_of_a_domain_decide_nothing() -> None:
    answer = {"domain": "chat", "refusals": [], "completion_tokens": 512, "latency_s": 20.0, "accept_length": 2.5,
              "ttft_s": 0.9, "tpot_s": 0.04}  # fmt: skip
    one = claim(metric="tpot", unit="ms", value=40, high=40, conditions={"domain": "chat"}, gpu="", flags=[])
    assert judge(one, measurement(GOOD, answers=[answer] * 4)).verdict is Verdict.INCONCLUSIVE
    assert judge(one, measurement(GOOD, answers=[answer] * 5)).verdict is Verdict.AGREES


def test_margin_of_the_claim_and_of_the_caller() -> None:
    sixty = [60.4, 60.5, 60.6, 60.5]
    assert judge(claim(), measurement(sixty)).verdict is Verdict.FASTER
    assert judge(claim(margin=0.05), measurement(sixty)).verdict is Verdict.AGREES
    assert judge(claim(margin=0.05), measurement(sixty), margin=0.01).verdict is Verdict.FASTER


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--kv-cache-dtype=fp8_e4m3", ("kv_cache_dtype", "fp8_e4m3")),
        ("--disable-radix-cache", ("disable_radix_cache", True)),
    ],
)
def test_flags_are_server_arguments(flag: str, expected: tuple[str, Any]) -> None:
    assert parse_flag(flag) == expected


def test_claim_without_a_metric_cannot_be_verified() -> None:
    with pytest.raises(UsageError, match="no metric that the bench measures"):
        judge(claim(metric=""), measurement(GOOD))


def test_config_measures_what_is_claimed() -> None:
    config, domain = config_for(claim(), 7)
    assert domain is None
    assert (config.contexts, config.tokens, config.repeats) == ((10001,), 200, 7)
    config, domain = config_for(claim(conditions={"domain": "chat", "tokens": 512}), 7)
    assert config.contexts == ()
    assert domain is not None
    assert (domain.names, domain.tokens) == (("chat",), 512)
