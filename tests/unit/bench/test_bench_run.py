"""The run as a whole on the fake server: prompts, partial results, exit codes, reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from q4kit.bench import render
from q4kit.bench.domains import questions
from q4kit.bench.machine import PageCache, Snapshot, evict, page_cache_state, residency, warm
from q4kit.bench.plot import bars, speed_png
from q4kit.bench.prompts import exact_prompt
from q4kit.bench.room import Room, room
from q4kit.bench.runner import Api, BenchConfig, Ended, RunResult, run_contexts, run_domains
from q4kit.bench.summary import summarise, summarise_domains
from q4kit.bench.texts import TextKind, build
from q4kit.errors import UsageError
from q4kit.report import dump_json
from q4kit.stats.intervals import t_interval
from tests.fakes.adversary import Adversary, Reply, StreamScript, sse


def still(_: Any = ()) -> Snapshot:
    return Snapshot(gpus=[], disk_read_bytes=0, major_faults=0, load_1min=0.0, table_resident=None)


def run(fake: Adversary, config: BenchConfig) -> RunResult:
    return run_contexts(fake.client(), config, RunResult(), look=still, sleep=fake.clock.sleep, clock=fake.clock)


def steady(tokens: int = 20, gap: float = 0.1, **more: Any) -> StreamScript:
    return StreamScript([1] * tokens, gap=gap, **more)


def test_known_speed_is_measured_exactly() -> None:
    fake = Adversary()
    fake.handlers["/generate"] = steady(ttft=0.5).reply
    result = run(fake, BenchConfig((101, 421), tokens=20, repeats=5))
    assert result.ended is Ended.COMPLETE
    first, second = (summarise(p) for p in result.points)
    assert first.decode is not None
    assert first.prefill is not None
    assert second.prefill is not None
    assert (first.decode.mean, first.decode.sd) == pytest.approx((10.0, 0.0))
    assert first.prefill.mean == pytest.approx(202.0)
    assert second.prefill.mean == pytest.approx(842.0)
    assert (first.pp_name, first.tg_name) == ("pp101", "tg20@d101")
    assert render.exit_code(result) == 0


def test_every_repeat_sends_another_prompt_with_no_common_prefix() -> None:
    fake = Adversary()
    fake.handlers["/generate"] = steady().reply
    run(fake, BenchConfig((101,), tokens=20, repeats=4, resend=False))
    prompts = [tuple(p["input_ids"]) for p in fake.payloads("/generate")]
    assert len(prompts) == 5
    # "Entry " is common, then 64 random bits differ: less than any cache page.
    assert len({p[:16] for p in prompts}) == 5


def test_same_seed_sends_the_same_prompts() -> None:
    sent = []
    for _ in range(2):
        fake = Adversary()
        fake.handlers["/generate"] = steady().reply
        run(fake, BenchConfig((101,), tokens=20, repeats=2, seed=9))
        sent.append([p["input_ids"] for p in fake.payloads("/generate")])
    assert sent[0] == sent[1]


def test_cache_is_flushed_before_every_repeat_and_sampling_is_explicit() -> None:
    fake = Adversary()
    fake.handlers["/generate"] = steady().reply
    run(fake, BenchConfig((101,), tokens=20, repeats=3, warmup=False, resend=False))
    paths = [p for p, _ in fake.transport.seen if p in ("/generate", "/flush_cache")]
    assert paths == ["/flush_cache", "/generate"] * 3
    params = fake.payloads("/generate")[0]["sampling_params"]
    assert params["temperature"] == 0.0
    assert params["ignore_eos"] is True
    assert params["max_new_tokens"] == 20
    assert {"top_p", "top_k", "min_p", "repetition_penalty"} <= params.keys()


def test_deliberate_resend_shows_the_cached_figure_apart() -> None:
    fake = Adversary()
    calls = []

    def generate(payload: dict[str, Any]) -> Reply:
        calls.append(payload)
        again = len(calls) > 1 and payload["input_ids"] == calls[-2]["input_ids"]
        return steady(ttft=0.01 if again else 0.5, cached=64 if again else 0).reply(payload)

    fake.handlers["/generate"] = generate
    result = run(fake, BenchConfig((101,), tokens=20, repeats=2))
    found = summarise(result.points[0])
    assert found.cached_resend_tokens == 64
    assert found.cached_resend_ttft_s == pytest.approx(0.01)
    assert found.ttft is not None
    assert found.ttft.mean == pytest.approx(0.5)


def test_server_gone_keeps_the_repeats_before_and_the_tokens_so_far() -> None:
    fake = Adversary()
    calls = 0

    def generate(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += 1
        return steady(finish=None if calls == 3 else {"type": "length"}).reply(payload)

    fake.handlers["/generate"] = generate
    result = run(fake, BenchConfig((101,), tokens=20, repeats=5, warmup=False))
    assert result.ended is Ended.FAULT
    assert render.exit_code(result) == 4
    assert [r.sample.valid for r in result.points[0].repeats] == [True, True, False]
    assert result.points[0].repeats[2].sample.completion_tokens == 20
    text = render.report(result, BenchConfig((101,)), {}).text()
    assert "PARTIAL" in text
    assert "2 of 3 requests valid" in text


def test_ctrl_c_keeps_what_was_measured() -> None:
    fake = Adversary()
    calls = 0

    def generate(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return steady().reply(payload)

    fake.handlers["/generate"] = generate
    result = run(fake, BenchConfig((101, 421), tokens=20, repeats=5, warmup=False))
    assert result.ended is Ended.INTERRUPTED
    assert render.exit_code(result) == 130
    data = render.report(result, BenchConfig((101, 421)), {}).to_json()
    assert data["partial"] is True
    assert len(data["points"][0]["samples"]) == 2
    assert json.loads(dump_json(data))["verdict"] == "PARTIAL"


def test_refused_repeats_are_in_no_mean() -> None:
    fake = Adversary()
    calls = 0

    def generate(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += 1
        return steady(ttft=0.01 if calls == 2 else 0.5, cached=64 if calls == 2 else 0).reply(payload)

    fake.handlers["/generate"] = generate
    result = run(fake, BenchConfig((101,), tokens=20, repeats=3, warmup=False, resend=False))
    found = summarise(result.points[0])
    assert (found.measured, found.valid, found.refusals) == (3, 2, {"CACHED_PREFIX": 1})
    assert found.prefill is not None
    assert found.prefill.mean == pytest.approx(202.0)
    assert render.exit_code(result) == 3


def test_nan_is_a_negative_verdict() -> None:
    fake = Adversary()
    fake.handlers["/generate"] = steady(finish={"type": "stop", "matched": "NaN happened"}).reply
    result = run(fake, BenchConfig((101,), tokens=20, repeats=2, warmup=False, resend=False))
    assert render.exit_code(result) == 1


def test_context_that_cannot_fit_is_refused_before_anything_is_sent() -> None:
    fake = Adversary()
    fake.info["context_length"] = 4096
    with pytest.raises(
        UsageError, match=r"context 10001 \+ 20 tokens does not fit: the server's context_length is 4096"
    ) as caught:
        run(fake, BenchConfig((101, 10001), tokens=20))
    assert fake.payloads("/generate") == []
    assert "the longest context that fits is 4074" in caught.value.remedy


@pytest.mark.parametrize(
    ("info", "new", "expected"),
    [
        ({"context_length": 4096}, 20, Room(4074, "context_length", 4096)),
        ({"context_length": 4096, "max_total_num_tokens": 2048}, 20, Room(2026, "max_total_num_tokens", 2048)),
        # An answer of a few tokens could be longer than this, but the server refuses such a prompt whole.
        ({"context_length": 4096, "max_req_input_len": 4090}, 2, Room(4089, "max_req_input_len", 4090)),
        ({"context_length": None, "max_total_num_tokens": "auto"}, 20, None),
    ],
)
def test_the_room_of_a_server_is_that_of_its_scheduler(info: dict[str, Any], new: int, expected: Room | None) -> None:
    assert room(info, new) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokens": 1}, "at least 2 tokens"),
        ({"repeats": 0}, "repeats must be at least 1, found 0"),
        ({"page_cache": "hot"}, "as-is, cold or warm, found 'hot'"),
        ({"page_cache": "cold"}, "needs the table's files"),
    ],
)
def test_bad_configuration_names_value_and_expectation(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchConfig(**config)


@pytest.mark.parametrize("kind", list(TextKind))
@pytest.mark.parametrize("length", [1, 101, 1701])
def test_prompts_have_the_exact_length(kind: TextKind, length: int) -> None:
    assert len(exact_prompt(Adversary().client().tokenize, kind, "s", length).ids) == length


def test_unique_words_never_repeat() -> None:
    words = build(TextKind.WORDS, "s", 200_000).split()[2:]
    assert len(words) == len(set(words))


def test_filler_repeats_and_prose_does_not() -> None:
    def sentences(kind: TextKind) -> list[str]:
        return [s.strip() for s in build(kind, "s", 50_000).split(". ")[1:-1]]

    assert len(set(sentences(TextKind.FILLER))) == 1
    prose = sentences(TextKind.PROSE)
    assert len(set(prose)) > 0.99 * len(prose)


def test_domains_are_ten_questions_each_and_all_different() -> None:
    chosen = questions()
    assert [sum(q.domain == d for q in chosen) for d in ("chat", "stem", "maths", "code")] == [10] * 4
    assert len({q.text for q in chosen}) == 40


def test_domain_table_has_the_published_definitions() -> None:
    """Duration sums latencies, rate is tokens over duration, TTFT a median, overall TPOT a mean of medians."""
    fake = Adversary()
    calls = 0

    def generate(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += 1
        slow = calls > 10
        return steady(11, gap=0.2 if slow else 0.1, ttft=2.0 if slow else 1.0, spec_accept_length=2.5).reply(payload)

    fake.handlers["/generate"] = generate
    chosen = questions(("chat",)) + questions(("code",))[:5]
    result = run_domains(fake.client(), chosen, 11, RunResult(), clock=fake.clock)
    chat, code, overall = summarise_domains(result.answers)
    assert (chat.output_tokens, chat.duration_s) == (110, pytest.approx(20.0))
    assert chat.output_rate == pytest.approx(5.5)
    assert code.median_tpot_s == pytest.approx(0.2)
    assert overall.median_ttft_s == pytest.approx(1.0)
    assert overall.median_tpot_s == pytest.approx(0.15)
    assert overall.accept_length == pytest.approx(2.5)
    assert chat.input_tokens == sum(len(p["input_ids"]) for p in fake.payloads("/generate")[:10])


def test_domain_run_by_the_chat_route_asks_for_running_usage() -> None:
    fake = Adversary()
    fake.handlers["/v1/chat/completions"] = lambda p: Reply({"error": {"message": "too long"}}, None, 400)
    result = run_domains(fake.client(), questions(("code",)), 11, RunResult(), api=Api.CHAT, clock=fake.clock)
    sent = fake.payloads("/v1/chat/completions")
    assert sent[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert result.ended is Ended.FAULT
    assert "HTTP 400: too long" in result.fault


@pytest.mark.parametrize(("details", "warned"), [({}, True), ({"prompt_tokens_details": {"cached_tokens": 0}}, False)])
def test_a_chat_route_that_reports_no_cached_tokens_is_said_so(details: dict[str, Any], warned: bool) -> None:
    fake = Adversary()

    def answer(payload: dict[str, Any]) -> Reply:
        prompt = len(fake.client().tokenize_chat(payload["messages"]))
        events = [
            {
                "choices": [{"delta": {"content": "x"}, "finish_reason": "length" if n == 3 else None}],
                "usage": {"completion_tokens": n, "prompt_tokens": prompt, **details},
            }
            for n in (1, 2, 3)
        ]
        return Reply(steps=[*((0.1, sse(event)) for event in events), (0.0, sse("[DONE]"))])

    fake.handlers["/v1/chat/completions"] = answer
    result = run_domains(fake.client(), questions(("code",))[:2], 3, RunResult(), api=Api.CHAT, clock=fake.clock)
    report = render.report(result, BenchConfig(), {})
    assert (render.exit_code(result), report.verdict) == (0, "MEASURED")
    assert any("did not say for 2 of 2 answers" in line for line in report.warnings) == warned


def test_page_cache_states_of_a_real_file(tmp_path: Path) -> None:
    table = tmp_path / "table.bin"
    table.write_bytes(bytes(8 << 20))
    assert warm([table]) == 1.0
    assert page_cache_state(residency([table])) is PageCache.WARM
    left = evict([table])
    assert left is not None
    assert page_cache_state(left) in (PageCache.COLD, PageCache.WARM)  # tmpfs cannot evict, and says so
    assert page_cache_state(None) is PageCache.UNKNOWN


def test_gpu_is_watched_while_the_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi that idles at the single look and works while it is being watched."""
    tool = tmp_path / "nvidia-smi"
    row = "GPU X, 600.1, {sm}, 9000, 2600, {w}, 70.00, 61, {gen}, 5, 16, 16, 100, 24000, 0x0000000000000004"
    idle, busy = row.format(sm=300, w="9.50", gen=1), row.format(sm=2550, w="69.90", gen=5)
    watching = f"echo '{busy}'; echo '{busy[:20]}'; sleep 30 & wait"
    tool.write_text(f"#!/bin/sh\ncase \"$*\" in *-lms*) {watching};; *) echo '{idle}';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = Adversary()

    def generate(payload: dict[str, Any]) -> Reply:
        time.sleep(0.5)
        return steady().reply(payload)

    fake.handlers["/generate"] = generate
    config = BenchConfig((101,), tokens=20, repeats=1, warmup=False, resend=False)
    result = run_contexts(fake.client(), config, RunResult(), sleep=fake.clock.sleep, clock=fake.clock)
    repeat = result.points[0].repeats[0]
    assert repeat.before.gpus[0]["clocks.sm"] == "300"
    assert repeat.load["clocks.sm"] == [2550.0, 2550.0]
    assert repeat.load["pcie.link.gen.current"] == [5.0, 5.0]
    assert repeat.load["throttle_reasons"] == ["0x0000000000000004"]
    text = render.report(result, config, {}).text()
    assert "2550 .. 2550" in text
    assert "0x0000000000000004" in text


def noisy_prefill() -> RunResult:
    """Return three repeats whose TTFT differ by a factor of 3: an sd of 58 % for pp101, decode steady."""
    fake = Adversary()
    ttft = iter((0.17, 0.35, 0.51))
    fake.handlers["/generate"] = lambda payload: steady(ttft=next(ttft)).reply(payload)
    return run(fake, BenchConfig((101,), tokens=20, repeats=3, warmup=False, resend=False))


def test_noisy_prefill_is_warned_about_as_noisy_decode_is() -> None:
    report = render.report(noisy_prefill(), BenchConfig((101,)), {})
    assert [w.split(":")[0] for w in report.warnings] == ["pp101 (filler) spreads by 58%"]


def test_interval_of_a_rate_or_a_time_ends_at_0_and_says_that_it_is_cut() -> None:
    result = noisy_prefill()
    found = summarise(result.points[0])
    assert found.prefill is not None
    assert found.ttft is not None
    assert found.decode is not None
    rates = [101 / t for t in (0.17, 0.35, 0.51)]
    uncut = t_interval(rates)
    assert uncut.low < 0
    assert (found.prefill.mean, found.prefill.high) == pytest.approx((uncut.mean, uncut.high))
    assert (found.prefill.low, found.prefill.cut) == (0.0, True)
    assert (found.ttft.low, found.ttft.cut) == (0.0, True)
    assert not found.decode.cut
    data = render.report(result, BenchConfig((101,)), {}).to_json()
    assert data["points"][0]["summary"]["prefill"]["cut"] is True
    text = render.report(result, BenchConfig((101,)), {}).text()
    assert f"0 (cut) .. {uncut.high:.4g}" in text
    assert "-" not in text.split("pp101 ")[1].split("\n")[0]


def test_one_sample_has_no_interval_to_cut() -> None:
    fake = Adversary()
    fake.handlers["/generate"] = steady().reply
    result = run(fake, BenchConfig((101,), tokens=20, repeats=1, warmup=False, resend=False))
    found = summarise(result.points[0])
    assert found.prefill is not None
    assert not found.prefill.cut
    assert found.prefill.to_json()["low"] is None


def test_error_bars_of_a_plot_are_the_intervals() -> None:
    """A cut interval is not symmetric, and no bar may go below 0."""
    found = summarise(noisy_prefill().points[0])
    assert found.prefill is not None
    below, above = bars([found.prefill])
    assert below == [pytest.approx(found.prefill.mean)]
    assert above == [pytest.approx(found.prefill.high - found.prefill.mean)]
    assert bars([t_interval([1.0])]) == ([0.0], [0.0])
    assert speed_png([found], "t").startswith(b"\x89PNG")


def test_drift_is_reported_as_a_warning() -> None:
    fake = Adversary()
    calls = 0

    def generate(payload: dict[str, Any]) -> Reply:
        nonlocal calls
        calls += 1
        return steady(gap=0.1 * 1.02**calls).reply(payload)

    fake.handlers["/generate"] = generate
    result = run(fake, BenchConfig((101,), tokens=20, repeats=6, warmup=False, resend=False))
    report = render.report(result, BenchConfig((101,)), {})
    assert any("drifts -2." in w or "drifts -1." in w for w in report.warnings)
