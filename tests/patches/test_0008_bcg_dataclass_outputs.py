"""Breakable decode graphs carry a LogitsProcessorOutput: every tensor field, in the rows the body returned.

On the stock pin the output-structure helpers of ``BreakableCudaGraphBackend`` refuse the type that every language
model's decode body returns, and rows are bounded by the graph key, which counts requests where a draft verify
returns one row per token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend as bcg

VOCAB, HIDDEN = 11, 5


def make_backend(*, debug_eager: bool = False) -> bcg.BreakableCudaGraphBackend:
    """The real backend without ``__init__`` (which wants a device), on a runner with the real default row hooks."""
    runner = SimpleNamespace(
        cuda_graph_output_rows=lambda output: BaseCudaGraphRunner.cuda_graph_output_rows(None, output),
        cuda_graph_output_capacity_rows=lambda output: BaseCudaGraphRunner.cuda_graph_output_capacity_rows(
            None, output
        ),
    )
    backend = bcg.BreakableCudaGraphBackend.__new__(bcg.BreakableCudaGraphBackend)
    backend._cuda_graph_runner = runner
    backend._graphs, backend._outputs, backend._capture_inputs = {}, {}, {}
    backend._pool = backend._capture_stream = backend._shared_output_buffer = None
    backend._device_module = SimpleNamespace(synchronize=lambda: None)
    backend._tp_group = SimpleNamespace(barrier=lambda: None)
    backend._debug_eager = debug_eager
    backend._precarve = SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None)
    return backend


@pytest.fixture
def no_cuda_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """``capture_one`` runs its real body; only the CUDA graph objects around it are left out."""
    monkeypatch.setattr(bcg, "BreakableCUDAGraph", lambda *a, **k: object())
    monkeypatch.setattr(bcg, "BreakableCUDAGraphCapture", lambda **k: contextlib.nullcontext())
    monkeypatch.setattr(bcg, "graph_pool_capture_scope", contextlib.nullcontext)
    monkeypatch.setattr(bcg.BreakableCudaGraphBackend, "deduped_cuda_graph", None, raising=False)


def verify_output(requests: int, tokens_per_request: int, **fields: Any) -> LogitsProcessorOutput:
    """What a draft verify returns: one row of logits and hidden states per token, all rows different."""
    rows = requests * tokens_per_request
    return LogitsProcessorOutput(
        next_token_logits=torch.arange(rows * VOCAB, dtype=torch.float32).view(rows, VOCAB),
        hidden_states=torch.arange(rows * HIDDEN, dtype=torch.bfloat16).view(rows, HIDDEN),
        **fields,
    )


def capture(backend: bcg.BreakableCudaGraphBackend, size: int, body: Callable[[], Any]) -> Any:
    backend.capture_one(ShapeKey(size=size), body)
    return backend._outputs[ShapeKey(size=size)]


@pytest.mark.red_on_stock
@pytest.mark.parametrize("debug_eager", [False, True])
def test_plain_decode_is_captured(no_cuda_capture: None, debug_eager: bool) -> None:
    backend = make_backend(debug_eager=debug_eager)
    body_output = verify_output(4, 1)
    stored = capture(backend, 4, lambda: body_output)
    assert type(stored) is LogitsProcessorOutput
    assert torch.equal(stored.next_token_logits, body_output.next_token_logits)
    assert torch.equal(stored.hidden_states, body_output.hidden_states)
    assert stored.hidden_states.dtype is torch.bfloat16
    others = {f.name for f in dataclasses.fields(stored)} - {"next_token_logits", "hidden_states"}
    assert all(getattr(stored, name) is None for name in others)


@pytest.mark.red_on_stock
@pytest.mark.parametrize("debug_eager", [False, True])
def test_draft_verify_keeps_every_token_row(no_cuda_capture: None, debug_eager: bool) -> None:
    """Graph keys 3 then 1, 4 draft tokens a request: 12 and 4 rows, not 3 and 1."""
    backend = make_backend(debug_eager=debug_eager)
    for requests in (3, 1):
        body_output = verify_output(requests, 4)
        stored = capture(backend, requests, lambda out=body_output: out)
        assert stored.next_token_logits.shape == (requests * 4, VOCAB)
        assert torch.equal(stored.next_token_logits, body_output.next_token_logits)
        assert torch.equal(stored.hidden_states, body_output.hidden_states)


@pytest.mark.red_on_stock
def test_pp_proxy_keeps_every_token_row(no_cuda_capture: None) -> None:
    """DecodeCudaGraphRunner.execute slices proxies to requests * tokens, so the backend must not stop at requests."""
    backend = make_backend()
    tensors = {"hidden_states": torch.arange(12.0).view(12, 1), "residual": torch.arange(12.0, 24.0).view(12, 1)}
    stored = capture(backend, 3, lambda: PPProxyTensors(dict(tensors)))
    for name, tensor in tensors.items():
        assert torch.equal(stored.tensors[name], tensor)


@pytest.mark.red_on_stock
def test_fields_with_different_rows(no_cuda_capture: None) -> None:
    """Draft extend returns logits per request (pruned) beside hidden states per token."""
    backend = make_backend()
    for requests in (3, 2):
        body_output = verify_output(requests, 4)
        body_output.next_token_logits = body_output.next_token_logits[:requests] + 0.5
        stored = capture(backend, requests, lambda out=body_output: out)
        assert torch.equal(stored.next_token_logits, body_output.next_token_logits)
        assert torch.equal(stored.hidden_states, body_output.hidden_states)


@pytest.mark.red_on_stock
@pytest.mark.parametrize("tokens_per_request", [1, 4])
def test_each_field_gets_a_buffer_of_its_own_rows(no_cuda_capture: None, tokens_per_request: int) -> None:
    """Logits per request beside hidden states per token: a vocabulary-wide row per token would be wasted."""
    backend = make_backend()
    output = verify_output(3, tokens_per_request)
    output.next_token_logits = output.next_token_logits[:3]
    capture(backend, 3, lambda: output)
    buffer = backend._shared_output_buffer
    assert buffer.next_token_logits.shape == (3, VOCAB)
    assert buffer.hidden_states.shape == (3 * tokens_per_request, HIDDEN)


@pytest.mark.red_on_stock
def test_attached_tensors_survive(no_cuda_capture: None) -> None:
    """The multi-layer draft extend attaches ``topk_p`` and ``topk_index`` and returns one output a step."""
    backend = make_backend()

    def body() -> list[LogitsProcessorOutput]:
        outputs = [verify_output(2, 4), verify_output(2, 4)]
        for step, output in enumerate(outputs):
            output.topk_p = torch.full((2, 1), 0.25 + step)
            output.topk_index = torch.full((2, 1), 7 + step)
        return outputs

    stored = capture(backend, 2, body)
    for got, expected in zip(stored, body(), strict=True):
        assert torch.equal(got.topk_p, expected.topk_p)
        assert torch.equal(got.topk_index, expected.topk_index)
        assert torch.equal(got.next_token_logits, expected.next_token_logits)


@pytest.mark.red_on_stock
def test_replays_write_into_what_was_returned(no_cuda_capture: None) -> None:
    """A graph retains addresses: the stored fields must be views of the buffer that the captured copy writes."""
    backend = make_backend()
    stored = capture(backend, 3, lambda: verify_output(3, 4))
    smaller = capture(backend, 1, lambda: verify_output(1, 4))
    buffer = backend._shared_output_buffer
    for output in (stored, smaller):
        for name in ("next_token_logits", "hidden_states"):
            assert getattr(output, name).data_ptr() == getattr(buffer, name).data_ptr()
    replayed = verify_output(3, 4)
    replayed.next_token_logits = -replayed.next_token_logits
    backend._copy_output_to_buffer(replayed, buffer, 12)
    assert torch.equal(stored.next_token_logits, replayed.next_token_logits)
    assert torch.equal(smaller.next_token_logits, replayed.next_token_logits[:4])


@pytest.mark.red_on_stock
@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("customized_info", {"a": [1]}, "dict"),
        ("next_token_top_logprobs_val", [[0.1]], "list"),
        ("hidden_states_token_indices", torch.tensor(3), "0-dim"),
        ("topk_p", 0.5, "float"),
    ],
)
def test_other_fields_are_refused_by_name(no_cuda_capture: None, field: str, value: Any, found: str) -> None:
    output = verify_output(2, 1)
    setattr(output, field, value)
    with pytest.raises(TypeError, match=rf"LogitsProcessorOutput\.{field}\b.*{found}"):
        capture(make_backend(), 2, lambda: output)


@pytest.mark.red_on_stock
def test_a_field_that_comes_and_goes_is_refused(no_cuda_capture: None) -> None:
    backend = make_backend()
    capture(backend, 3, lambda: verify_output(3, 1))
    with pytest.raises(ValueError, match="full_logits"):
        capture(backend, 2, lambda: verify_output(2, 1, full_logits=torch.zeros(2, VOCAB)))


@pytest.mark.red_on_stock
def test_more_rows_than_the_shared_buffer_are_refused(no_cuda_capture: None) -> None:
    backend = make_backend()
    capture(backend, 1, lambda: verify_output(1, 4))
    with pytest.raises(ValueError, match=r"LogitsProcessorOutput\.next_token_logits has 8 rows.* has 4"):
        capture(backend, 2, lambda: verify_output(2, 4))


@pytest.mark.red_on_stock
def test_the_field_that_does_not_fit_is_named(no_cuda_capture: None) -> None:
    """The other field of the output does fit."""
    backend = make_backend()
    capture(backend, 2, lambda: verify_output(2, 1))
    grown = verify_output(2, 1)
    grown.hidden_states = torch.zeros(6, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"LogitsProcessorOutput\.hidden_states has 6 rows.* has 2"):
        capture(backend, 1, lambda: grown)


def test_prefill_outputs_are_bounded_by_the_bucket_as_before(no_cuda_capture: None) -> None:
    """Prefill keys count tokens: a sharded body keeps its fewer rows, tuples keep their structure."""
    backend = make_backend()
    hidden, aux = torch.arange(8.0).view(8, 1), torch.arange(16.0).view(8, 2)
    stored_hidden, (stored_aux, nothing) = capture(backend, 8, lambda: (hidden, [aux, None]))
    assert torch.equal(stored_hidden, hidden)
    assert torch.equal(stored_aux, aux)
    assert nothing is None
    stored_hidden, _ = capture(backend, 6, lambda: (hidden[:3], [aux[:3], None]))
    assert torch.equal(stored_hidden, hidden[:3])
    assert backend._shared_output_buffer[0].shape[0] == 8


def test_unknown_outputs_are_still_refused(no_cuda_capture: None) -> None:
    with pytest.raises(TypeError, match=r"Unsupported BCG output type.*str"):
        capture(make_backend(), 2, lambda: "logits")
