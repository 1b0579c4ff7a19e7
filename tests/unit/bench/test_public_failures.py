"""Each published measuring failure, played by a server of known truth, and the right value.

Sources are named where the failure was reported; the truth is set by the script of the stream.
"""

from __future__ import annotations

from typing import Any

import pytest

from q4kit.bench import render
from q4kit.bench.accounting import Counting, Expectation, Refusal, StreamSample
from q4kit.bench.prompts import exact_prompt
from q4kit.bench.runner import BenchConfig, BrokenStreamError, RunResult, one_chat, one_request, run_contexts
from q4kit.bench.summary import summarise
from q4kit.bench.texts import TextKind
from q4kit.report import Table
from tests.fakes.adversary import BREAK, DONE, Adversary, Reply, StreamScript, sse

PROMPT = list(range(1, 102))


def native(script: StreamScript, tokens: int, *, fake: Adversary | None = None) -> StreamSample:
    fake = fake or Adversary()
    fake.handlers["/generate"] = script.reply
    return one_request(fake.client(), PROMPT, tokens, Expectation(101, tokens), clock=fake.clock)


def chat(steps: list[tuple[float, bytes]], tokens: int) -> StreamSample:
    fake = Adversary()
    fake.handlers["/v1/chat/completions"] = lambda _: Reply(steps=steps)
    messages = [{"role": "user", "content": "hi"}]
    expect = Expectation(None, tokens, cache_report_optional=True)
    return one_chat(fake.client(), messages, tokens, expect, model="fake", clock=fake.clock)


def chat_event(
    *, content: str = "", reasoning: str = "", count: int | None = None, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    delta = {"content": content, "reasoning_content": reasoning or None}
    event: dict[str, Any] = {"choices": [{"delta": delta, "finish_reason": finish, **more}]}
    if count is not None:
        event["usage"] = {"completion_tokens": count, "prompt_tokens": 9}
    return event


def test_chunks_under_speculation_are_not_tokens() -> None:
    """llama-benchy 11: 5.51 reported, 25.16 true. Here 50 chunks of 4 tokens, one every 0.1 s: 40 tok/s."""
    sample = native(StreamScript([4] * 50), 200)
    assert sample.decode_rate == pytest.approx(40.0)
    assert sample.chunk_sizes == {4: 50}


@pytest.mark.parametrize(("first", "total"), [(4, 200), (4, 50)])
def test_first_chunk_of_k_tokens_is_not_decoding(first: int, total: int) -> None:
    """(N - 1) / time would read 1.5 % (N = 200) and 6.5 % (N = 50) too fast with k = 4."""
    sample = native(StreamScript([first] + [1] * (total - first), gap=0.1), total)
    assert sample.decode_rate == pytest.approx(10.0)
    assert sample.first_chunk_tokens == first
    assert sample.decode_s is not None
    biased = (total - 1) / sample.decode_s
    assert biased / 10.0 - 1 == pytest.approx((first - 1) / (total - first))


def test_tpot_is_per_token_not_per_verify_step() -> None:
    """sglang 12064: 8.72 ms an inter-token latency that was one verify step; the truth is step / accepted tokens."""
    sample = native(StreamScript([1] + [3] * 33, gap=0.0087), 100)
    assert sample.tpot_s == pytest.approx(0.0087 / 3)


def test_rate_is_the_average_so_no_peak_can_lie_below_it() -> None:
    """sglang 33193: a "peak" of 111 beside an average of 415. Uneven chunks still give tokens over time."""
    sample = native(StreamScript([1, 8, 1, 8, 1, 8], gap=0.05), 27)
    assert sample.decode_rate == pytest.approx(26 / 0.25)


def test_buffering_parser_does_not_invent_the_requested_length() -> None:
    """sglang 36272: 16 tokens without a chunk, then the count falls back to max_tokens. The server's count stands."""
    steps = [
        (0.5, sse(chat_event(content="a", count=1))),
        (1.6, sse(chat_event(content="b" * 40, count=17))),
        (0.1, sse(chat_event(content="c", count=18, finish="stop"), DONE)),
    ]
    sample = chat(steps, 512)
    assert sample.completion_tokens == 18
    assert sample.refusals == (Refusal.EARLY_STOP,)
    assert sample.decode_rate is None


def test_buffered_tokens_are_spread_over_their_time_when_complete() -> None:
    steps = [
        (0.5, sse(chat_event(content="a", count=1))),
        (1.6, sse(chat_event(content="b", count=17))),
        (0.1, sse(chat_event(content="c", count=18, finish="length"), DONE)),
    ]
    sample = chat(steps, 18)
    assert sample.decode_rate == pytest.approx(17 / 1.7)


def test_ttft_is_the_first_reasoning_delta_not_the_first_content() -> None:
    """club-3090 1096: reasoning charged to prefill, "decode collapsed to 5 tok/s"."""
    steps = [
        (0.0, sse({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})),
        (0.4, sse(chat_event(reasoning="hm", count=1))),
        *[(0.1, sse(chat_event(reasoning="hm", count=n))) for n in range(2, 11)],
        (0.1, sse(chat_event(content="yes", count=11, finish="length"), DONE)),
    ]
    sample = chat(steps, 11)
    assert sample.ttft_s == pytest.approx(0.4)
    assert sample.first_kind == "reasoning"
    assert sample.decode_rate == pytest.approx(10.0)


def test_role_announcement_is_not_a_token() -> None:
    """A chat route may answer at once with a role and no token; that is not time to first token."""
    steps = [
        (0.01, sse({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})),
        (2.0, sse(chat_event(content="a", count=1))),
        (0.1, sse(chat_event(content="b", count=2, finish="length"), DONE)),
    ]
    assert chat(steps, 2).ttft_s == pytest.approx(2.01)


def test_same_prompt_from_the_prefix_cache_is_refused() -> None:
    """LLMKube 1268, omlx 3770: prefill "sped up" from repeat to repeat."""
    sample = native(StreamScript([1] * 20, ttft=0.01, cached=64), 20)
    assert sample.refusals == (Refusal.CACHED_PREFIX,)
    assert sample.prefill_rate is None
    assert "cached_tokens 64, expected 0" in sample.details[0]


def test_server_that_does_not_say_what_was_cached_is_refused() -> None:
    sample = native(StreamScript([1] * 20, cached=None), 20)
    assert sample.refusals == (Refusal.CACHE_UNKNOWN,)


def test_cache_hit_that_the_chat_route_does_report_is_refused() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    steps = [
        (0.1, sse(chat_event(content="a", count=1))),
        (0.1, sse({**chat_event(content="b", finish="length"), "usage": usage}, DONE)),
    ]
    assert chat(steps, 2).refusals == (Refusal.CACHED_PREFIX,)


def test_short_answer_is_refused_not_averaged() -> None:
    """omlx 3770: 46-token answers compared with 200-token ones."""
    sample = native(StreamScript([1] * 46, finish={"type": "stop", "matched": 2}), 200)
    assert sample.refusals == (Refusal.EARLY_STOP,)
    assert "stop:2 after 46 of 200" in sample.details[0]


def test_prompt_with_template_tokens_is_refused() -> None:
    """tt-inference-server 4127, inference-perf 566: a template or a BOS adds tokens to the "same" length."""
    sample = native(StreamScript([1] * 20, prompt_extra=13), 20)
    assert sample.refusals == (Refusal.PROMPT_LENGTH,)
    assert "server counted 114, asked for 101" in sample.details[0]


def test_tokens_are_not_counted_by_tokenising_chunks_again() -> None:
    """inference-perf 566: each chunk was tokenised again with a BOS in front, so every token counted as two and the
    inter-token latency came out halved. The server's count stands, and the tokenizer is not asked."""
    fake = Adversary()
    fake.handlers["/tokenize"] = lambda p: Reply({"tokens": [1, *fake.tokenizer.encode(p["prompt"])]})
    assert len(fake.client().tokenize("x")) == 2
    asked = len(fake.payloads("/tokenize"))
    sample = native(StreamScript([1] * 20, gap=0.1), 20, fake=fake)
    assert sample.completion_tokens == 20
    assert sample.tpot_s == pytest.approx(0.1)
    assert len(fake.payloads("/tokenize")) == asked


def test_a_tokenizer_is_asked_for_no_special_tokens_and_a_bos_in_spite_of_it_is_no_longer_prompt() -> None:
    """inference-perf 566, seen from the prompt: ids are cut to the length asked for, a BOS among them included."""
    fake = Adversary()
    fake.handlers["/tokenize"] = lambda p: Reply({"tokens": [1, *fake.tokenizer.encode(p["prompt"])]})
    prompt = exact_prompt(fake.client().tokenize, TextKind.PROSE, "seed", 101)
    assert len(prompt.ids) == 101
    assert prompt.ids.count(1) == 1
    assert all(payload["add_special_tokens"] is False for payload in fake.payloads("/tokenize"))


def test_repeated_text_hides_what_a_table_on_disk_costs_and_the_kinds_stay_apart() -> None:
    """llama.cpp 28136: 700 tok/s of prefill on one repeated sentence, about 300 on real text, as the rows of the n-gram
    table came from disk. A server that takes 1 ms a distinct trigram shows it; no figure mixes the two kinds."""
    fake = Adversary()

    def generate(payload: dict[str, Any]) -> Reply:
        ids = payload["input_ids"]
        rows = len(set(zip(ids, ids[1:], ids[2:], strict=False)))
        return StreamScript([1] * 8, ttft=0.1 + 1e-3 * rows).reply(payload)

    fake.handlers["/generate"] = generate
    config = BenchConfig((1701,), tuple(TextKind), tokens=8, repeats=2, warmup=False, resend=False)
    result = run_contexts(fake.client(), config, RunResult(), sleep=fake.clock.sleep, clock=fake.clock)
    points = {point.kind: summarise(point) for point in result.points}
    assert list(points) == list(TextKind)
    rates = {kind: point.prefill.mean for kind, point in points.items() if point.prefill is not None}
    assert rates[TextKind.FILLER] > 3 * rates[TextKind.WORDS]
    assert rates[TextKind.FILLER] > 2 * rates[TextKind.PROSE]
    # The lengths are equal, the kind stands in every row, and so does the state of the page cache.
    assert {repeat.sample.prompt_tokens for point in result.points for repeat in point.repeats} == {1701}
    table = render.report(result, config, {}).blocks[0]
    assert isinstance(table, Table)
    assert [row[table.columns.index("text")] for row in table.rows] == ["filler", "prose", "words"] * 2
    assert "page cache" in table.columns


def test_accept_length_is_the_requests_own() -> None:
    """Accept length of the server's life mixes earlier traffic in; only the request's meta counts."""
    fake = Adversary()
    fake.info["internal_states"] = [{"avg_spec_accept_length": 1.1}]
    sample = native(StreamScript([1] + [3] * 33, spec_accept_length=2.94), 100, fake=fake)
    assert sample.accept_length == 2.94


def test_nan_that_looks_like_a_stop_is_named() -> None:
    """SGLang reports NaN logits as finish reason `stop` with matched text "NaN happened"."""
    sample = native(StreamScript([1] * 7, finish={"type": "stop", "matched": "NaN happened"}), 20)
    assert sample.refusals == (Refusal.NAN,)
    # The client refuses the closing event, so the tokens before it are what is known.
    assert sample.completion_tokens == 6
    assert sample.decode_rate is None


def test_missing_usage_is_refused_not_replaced_by_chunks() -> None:
    steps = [(0.1, sse(chat_event(content="a"))) for _ in range(9)]
    steps.append((0.1, sse(chat_event(content="b", finish="length"), DONE)))
    sample = chat(steps, 10)
    assert sample.refusals == (Refusal.NO_COUNT,)
    assert sample.completion_tokens is None
    assert sample.counting is Counting.NONE


def test_usage_only_at_the_end_gives_no_decode_rate() -> None:
    """The tokens in the first chunk are then unknown: any rate would be a guess."""
    steps = [(0.1, sse(chat_event(content="a"))) for _ in range(9)]
    final = {"choices": [], "usage": {"completion_tokens": 36, "prompt_tokens": 9}}
    steps.append((0.1, sse(chat_event(content="b", finish="length"), final, DONE)))
    sample = chat(steps, 36)
    assert sample.refusals == (Refusal.NO_RUNNING_COUNT,)
    assert sample.completion_tokens == 36
    assert sample.decode_rate is None
    assert sample.counting is Counting.USAGE_AT_END


def test_closing_event_after_the_last_token_does_not_stretch_decoding() -> None:
    sample = native(StreamScript([1] * 11, gap=0.1, tail_wait=5.0), 11)
    assert sample.decode_rate == pytest.approx(10.0)


def test_all_tokens_in_one_chunk_have_no_rate() -> None:
    sample = native(StreamScript([20]), 20)
    assert sample.refusals == (Refusal.ONE_CHUNK,)


def test_count_that_disagrees_with_the_ids_is_refused() -> None:
    def lying(payload: dict[str, Any]) -> Reply:
        meta = {"prompt_tokens": 101, "cached_tokens": 0, "completion_tokens": 4, "finish_reason": None}
        last = {**meta, "completion_tokens": 8, "finish_reason": {"type": "length"}}
        first = {"text": "a", "output_ids": [1, 2], "meta_info": meta}
        second = {"text": "ab", "output_ids": [3, 4], "meta_info": last}
        return Reply(steps=[(0.1, sse(first)), (0.1, sse(second, DONE))])

    fake = Adversary()
    fake.handlers["/generate"] = lying
    sample = one_request(fake.client(), PROMPT, 8, Expectation(101, 8), clock=fake.clock)
    assert sample.refusals == (Refusal.COUNT_MISMATCH,)
    assert "server says 4 tokens, 2 ids arrived" in sample.details[0]


def test_disconnect_in_mid_stream_keeps_what_arrived() -> None:
    with pytest.raises(BrokenStreamError) as caught:
        native(StreamScript([1] * 7, finish=None), 20)
    assert caught.value.sample.completion_tokens == 7
    assert caught.value.sample.refusals == (Refusal.DISCONNECTED,)
    assert caught.value.sample.decode_rate is None
    assert caught.value.exit_code == 4


def test_stream_without_done_is_a_disconnect() -> None:
    fake = Adversary()
    event = {"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": None}}
    fake.handlers["/generate"] = lambda _: Reply(steps=[(0.1, sse(event))])
    with pytest.raises(BrokenStreamError, match=r"without \[DONE\]") as caught:
        one_request(fake.client(), PROMPT, 8, Expectation(101, 8), clock=fake.clock)
    assert caught.value.sample.refusals[0] is Refusal.DISCONNECTED


def test_chunk_split_inside_a_utf8_character() -> None:
    """A network chunk may end inside a character; the event is complete only when its last byte is there."""
    body = sse(
        {"text": "ä", "output_ids": [7], "meta_info": _meta(1)},
        {"text": "äö", "output_ids": [7, 8], "meta_info": _meta(2)},
        {"text": "äöü", "output_ids": [7, 8, 9], "meta_info": {**_meta(3), "finish_reason": {"type": "length"}}},
        DONE,
    )
    cut = body.index("ö".encode()) + 1
    fake = Adversary()
    fake.handlers["/generate"] = lambda _: Reply(steps=[(0.5, body[:cut]), (0.25, body[cut:])])
    sample = one_request(fake.client(), PROMPT, 3, Expectation(101, 3), clock=fake.clock)
    assert sample.refusals == ()
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.decode_rate == pytest.approx(2 / 0.25)


def test_slow_first_token_is_prefill_not_decode() -> None:
    sample = native(StreamScript([1] * 11, ttft=30.0, gap=0.1), 11)
    assert sample.decode_rate == pytest.approx(10.0)
    assert sample.prefill_rate == pytest.approx(101 / 30.0)


def test_error_inside_the_stream_is_a_fault() -> None:
    fake = Adversary()
    good = {"text": "a", "output_ids": [1], "meta_info": _meta(1)}
    steps = [(0.1, sse(good)), (0.1, sse({"error": {"message": "out of memory"}}))]
    fake.handlers["/generate"] = lambda _: Reply(steps=steps)
    with pytest.raises(BrokenStreamError, match="out of memory") as caught:
        one_request(fake.client(), PROMPT, 3, Expectation(101, 3), clock=fake.clock)
    assert caught.value.sample.completion_tokens == 1


def test_cut_connection_marker_really_cuts() -> None:
    """The fake itself: BREAK must reach the client as a transport fault, not as data."""
    fake = Adversary()
    fake.handlers["/generate"] = lambda _: Reply(steps=[(0.0, BREAK)])
    with pytest.raises(BrokenStreamError):
        one_request(fake.client(), PROMPT, 3, Expectation(101, 3), clock=fake.clock)


def _meta(count: int) -> dict[str, Any]:
    return {"prompt_tokens": 101, "cached_tokens": 0, "completion_tokens": count, "finish_reason": None}
