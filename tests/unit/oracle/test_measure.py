"""Measuring, against answers that only a broken server gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_sglang import FakeServer, distribution
from oracle_runs import OPTIONS, Record

from q4kit.errors import NotComparableError, ServerError
from q4kit.oracle import measure
from q4kit.oracle.plan import Options
from q4kit.server.client import GREEDY, Client


def test_recorded_values_are_the_models_own(record: Record) -> None:
    found = record()
    assert found.complete
    for result in found.results:
        ids = found.prompts[result.item.prompt][: result.item.length]
        if result.item.leg == "decode":
            ids = ids + [position.token for position in result.positions]
        for position in result.positions:
            table = distribution(ids[: position.pos], 0.0, 0)
            assert position.token == ids[position.pos]
            assert position.logprob == float(table[position.token])
            assert position.top[0] == (int(table.argmax()), float(table.max()))


def test_the_decode_leg_is_teacher_forced_again(record: Record) -> None:
    decode = [result for result in record().results if result.item.leg == "decode"]
    assert decode
    assert all(position.again == position.logprob for result in decode for position in result.positions)


def test_every_request_states_every_sampling_parameter_and_follows_a_flush(record: Record, server: FakeServer) -> None:
    record()
    assert server.requests
    assert server.flushes == len(server.requests)
    for payload in server.requests:
        assert payload["sampling_params"].keys() == GREEDY.keys() | {"max_new_tokens"}
        assert payload["sampling_params"]["ignore_eos"] is True


def _first_generate(change) -> Any:
    return lambda payload, answer: change(answer["meta_info"])


SPOILED = {
    "NaN finish": (
        lambda meta: meta.update(finish_reason={"type": "stop", "matched": "NaN happened"}),
        "the model produced NaN logits",
    ),
    "abort": (
        lambda meta: meta.update(finish_reason={"type": "abort", "message": "out of memory"}),
        "the server aborted the request: out of memory",
    ),
    "null logprob": (
        lambda meta: meta["input_token_logprobs"][3].__setitem__(0, None),
        r"prefill/english: logprob None at position \d+ is not finite",
    ),
    "null in a top list": (
        lambda meta: meta["input_top_logprobs"][3][1].__setitem__(0, None),
        r"top logprob None at position \d+ is not finite",
    ),
    "positive logprob": (
        lambda meta: meta["input_token_logprobs"][3].__setitem__(0, 0.5),
        "is above 0: not a log-probability",
    ),
    "shifted ids": (
        lambda meta: meta["input_token_logprobs"][3].__setitem__(1, 500),
        r"misaligned at position \d+: token 500, expected \d+",
    ),
    "one position short": (lambda meta: meta["input_token_logprobs"].pop(), r"\d+ logprobs and \d+ top lists"),
    "no logprobs": (lambda meta: meta.update(input_token_logprobs=[]), "0 logprobs and"),
    "duplicate alternatives": (
        lambda meta: meta["input_top_logprobs"][2].__setitem__(1, meta["input_top_logprobs"][2][0]),
        "duplicate ids in the top list",
    ),
    "other prompt length": (lambda meta: meta.update(prompt_tokens=7), "the server counted 7 prompt tokens"),
    "no finish reason": (lambda meta: meta.update(finish_reason=None), "answer without a finish reason"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_broken_answer_stops_the_recording_by_name(name: str, client: Client, server: FakeServer) -> None:
    change, message = SPOILED[name]
    server.spoil = lambda payload, answer: change(answer["meta_info"])
    target = measure.new_recording(client, options=OPTIONS)
    with pytest.raises(ServerError, match=message):
        measure.run(client, target)
    assert not target.complete
    assert target.reason


def test_the_native_route_must_say_that_nothing_was_cached(client: Client, server: FakeServer) -> None:
    server.spoil = lambda payload, answer: answer["meta_info"].pop("cached_tokens")
    with pytest.raises(ServerError, match="the answer has no count of cached tokens, expected 0") as caught:
        measure.run(client, measure.new_recording(client, options=OPTIONS))
    assert "--backend openai" in caught.value.remedy


def test_a_prefix_cache_hit_is_refused(client: Client, server: FakeServer) -> None:
    server.spoil = lambda payload, answer: answer["meta_info"].update(cached_tokens=64)
    with pytest.raises(NotComparableError, match="64 prompt tokens came from the prefix cache, expected 0"):
        measure.run(client, measure.new_recording(client, options=OPTIONS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(output_token_logprobs=[]), r"decode/.*: empty answer"),
        (lambda meta: meta["output_token_logprobs"].pop(), r"decode/.*: 6 tokens and 7 top lists, 7 were asked"),
    ],
)
def test_a_short_generation_is_refused(client: Client, server: FakeServer, change, message: str) -> None:
    def spoil(payload: dict[str, Any], answer: dict[str, Any]) -> None:
        if payload["sampling_params"]["max_new_tokens"] > 1:
            change(answer["meta_info"])

    server.spoil = spoil
    with pytest.raises(ServerError, match=message):
        measure.run(client, measure.new_recording(client, options=OPTIONS))


def test_the_last_id_of_the_vocabulary_may_be_labelled_0_but_no_other() -> None:
    # SGLang 0.5.23 labels it so; the value is right.
    def meta(label: int) -> dict[str, Any]:
        return {
            "prompt_tokens": 3,
            "cached_tokens": 0,
            "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, label, None]],
            "input_top_logprobs": [None, [[-1.0, 6, None]], [[-2.0, 511, None]]],
        }

    class Stub(Client):
        def flush_cache(self, wait_s: float = 10.0) -> None: ...

        def generate(self, payload: Any) -> dict[str, Any]:
            return {"meta_info": meta(self.label)}

    stub = Stub("http://127.0.0.1:9")
    item = measure.Item("prefill/x", "prefill", "x", 3, 1, 0)
    native = measure._Native(stub, top=2, vocab=512)
    stub.label = 0
    assert native.prefill(item, [5, 6, 511]).positions[1].token == 511
    with pytest.raises(ServerError, match="token 0, expected 510"):
        native.prefill(item, [5, 6, 510])


def test_a_server_that_dies_midway_leaves_a_marked_partial_recording(client: Client, server: FakeServer) -> None:
    server.fail_after = 4
    target = measure.new_recording(client, options=OPTIONS)
    with pytest.raises(ServerError, match=r"no connection|Connection"):
        measure.run(client, target)
    assert len(target.results) == 4
    assert not target.complete


def test_ctrl_c_leaves_a_marked_partial_recording(client: Client) -> None:
    target = measure.new_recording(client, options=OPTIONS)

    def stop(done: int, total: int, name: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.run(client, target, progress=stop)
    assert (len(target.results), target.complete, target.reason) == (2, False, "interrupted")


def test_another_tokenizer_is_refused_before_anything_is_measured(
    record: Record, client: Client, server: FakeServer
) -> None:
    reference = record()
    server.token_shift, server.requests = 1, []
    with pytest.raises(NotComparableError, match="different tokenizer"):
        measure.like(client, reference)
    assert server.requests == []


def test_a_candidate_measures_the_items_of_its_reference_not_a_new_plan(record: Record, client: Client) -> None:
    reference = record()
    del reference.results[3:]
    target = measure.like(client, reference)
    measure.run(client, target)
    assert [result.item for result in target.results] == [result.item for result in reference.results]


def test_progress_counts_every_item(client: Client) -> None:
    seen: list[tuple[int, int]] = []
    target = measure.new_recording(client, options=OPTIONS)
    measure.run(client, target, progress=lambda done, total, name: seen.append((done, total)))
    assert seen == [(index, len(target.results)) for index in range(len(target.results) + 1)]


def test_the_openai_route_gives_the_same_prefill_values(record: Record, client: Client) -> None:
    native = record(options=Options(scored=60, decode=False, top=5, max_prompt_tokens=100))
    target = measure.new_recording(
        client, options=Options(scored=60, decode=False, top=5, max_prompt_tokens=100), backend="openai"
    )
    measure.run(client, target)
    left, right = (
        [position.logprob for result in each.results for position in result.positions] for each in (native, target)
    )
    assert left == right


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.__setitem__(-3, math.nan), "not JSON|not finite"),
        (lambda values: values.__setitem__(-3, None), "is not finite"),
        (lambda values: values.__delitem__(slice(4)), "echoed logprobs for 100 prompt tokens"),
    ],
)
def test_broken_openai_answers_are_refused(client: Client, server: FakeServer, change, message: str) -> None:
    server.spoil = lambda payload, answer: change(answer["choices"][0]["logprobs"]["token_logprobs"])
    with pytest.raises(ServerError, match=message):
        measure.run(client, measure.new_recording(client, options=OPTIONS, backend="openai"))


def test_an_openai_cache_hit_is_refused(client: Client, server: FakeServer) -> None:
    server.spoil = lambda payload, answer: answer["usage"].update(prompt_tokens_details={"cached_tokens": 9})
    with pytest.raises(NotComparableError, match="9 prompt tokens came from the prefix cache"):
        measure.run(client, measure.new_recording(client, options=OPTIONS, backend="openai"))


def test_an_unknown_backend_is_refused(client: Client) -> None:
    with pytest.raises(Exception, match="unknown backend 'vllm'"):
        measure.new_recording(client, options=OPTIONS, backend="vllm")
