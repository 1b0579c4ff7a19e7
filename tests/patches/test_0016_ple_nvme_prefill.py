"""Prefill rows are read ahead of their forward, by n-gram ids hashed on the host."""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import ple_checkpoints
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ple_checkpoints import loaded, ple_modules
from sglang.srt.mem_cache.ple_state_pool import NGramPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import set_forward_context
from sglang.srt.models import qwen4_exp
from sglang.srt.models.qwen4_exp import Qwen4ExpPLELayer, _commit_ple_batch, _prepare_ple_batch

EOS, HISTORY = 2, 2
# Where the backend is missing, its model does not start: the fixture shows the fault.
pytestmark = pytest.mark.red_on_stock(setup=True)


class Pool:
    """SGLang's real n-gram history, one slot a request, behind the two methods a forward uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ngrams = NGramPool(size=size, context_len=HISTORY, eos_token_id=EOS, device="cpu")
        self.ple_window_cache = None
        self.get_ngram_context = self.ngrams.get_context
        self.set_ngram_context = self.ngrams.set_context

    def get_mamba_indices(self, req_indices: torch.Tensor) -> torch.Tensor:
        return req_indices


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with loaded(ple_checkpoints.write(tmp_path_factory.mktemp("model")), "--ple-offload-backend", "nvme") as model:
        yield model


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8)
    previous = set_forward_context(SimpleNamespace(attn_backend=SimpleNamespace(req_to_token_pool=pool)))
    yield pool
    set_forward_context(previous)


def extend_batch(spans: list[tuple[list[int], int, int]]) -> SimpleNamespace:
    """Return an extend batch of (tokens of the request, prefix length, extend length)."""
    reqs = [
        SimpleNamespace(full_untruncated_fill_ids=array("q", ids), multimodal_inputs=None, input_embeds=None)
        for ids, _, _ in spans
    ]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=reqs,
        prefix_lens=[prefix for _, prefix, _ in spans],
        extend_lens=[length for _, _, length in spans],
        mix_running_indices=None,
    )


def forward_batch(batch: SimpleNamespace) -> SimpleNamespace:
    """Return what the forward of `batch` sees; request i has history slot i + 1."""
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        _original_forward_mode=None,
        tbo_parent_token_range=None,
        spec_algorithm=None,
        spec_info=None,
        global_num_token_non_padded_cpu=None,
        extend_seq_lens_cpu=batch.extend_lens,
        extend_seq_lens=torch.tensor(batch.extend_lens),
        req_pool_indices=torch.arange(1, len(batch.reqs) + 1),
        out_cache_loc=None,
        mamba_track_indices=None,
        mamba_track_mask=None,
        ple_staged_rows=None,
    )


def device_batch(batch: SimpleNamespace) -> tuple[Any, SimpleNamespace]:
    forward = forward_batch(batch)
    tokens = [
        token
        for req, prefix, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        for token in req.full_untruncated_fill_ids[prefix : prefix + length]
    ]
    ids = torch.tensor(tokens)
    return _prepare_ple_batch(ids, forward, ngram_size=HISTORY + 1, ngram_eos_token_id=EOS), forward


TOKENS = st.lists(st.one_of(st.just(EOS), st.integers(0, 511)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(prompts=st.lists(TOKENS, min_size=1, max_size=3), data=st.data())
def test_host_ids_equal_the_device_path_chunk_by_chunk(
    model: Any, prompts: list[list[int]], data: st.DataObject
) -> None:
    pool = Pool(8)
    previous = set_forward_context(SimpleNamespace(attn_backend=SimpleNamespace(req_to_token_pool=pool)))
    try:
        done = [0] * len(prompts)
        while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
            # Requests that are through keep one row, so that request i keeps slot i + 1.
            spans = []
            for ids, at in zip(prompts, done, strict=True):
                length = data.draw(st.integers(1, len(ids) - at)) if at < len(ids) else 0
                spans.append((ids, at, length))
            if any(length == 0 for _, _, length in spans):
                live = [i for i, (_, _, length) in enumerate(spans) if length]
                if len(live) < len(spans):
                    spans = [spans[i] for i in live]
                    prompts, done = [prompts[i] for i in live], [done[i] for i in live]
                    slots = torch.tensor([i + 1 for i in live])
                    pool.ngrams.context[1 : len(live) + 1] = pool.ngrams.context[slots].clone()
            batch = extend_batch(spans)
            live_batch, forward = device_batch(batch)
            contexts, seq_ids = qwen4_exp.extend_windows(batch, HISTORY + 1, EOS)
            assert torch.equal(seq_ids, live_batch.req_indices)
            for module in ple_modules(model).values():
                assert torch.equal(module.hash_contexts_on_host(contexts), module.compute_ngram_ids(live_batch))
            _commit_ple_batch(live_batch, forward)
            done = [at + length for (_, at, length) in spans]
    finally:
        set_forward_context(previous)


@pytest.mark.parametrize("reason", ["multimodal", "embeds", "device-token", "decode", "mixed", "empty"])
def test_batches_the_host_does_not_know_are_left_to_the_forward(model: Any, reason: str) -> None:
    batch = extend_batch([([5, 6, 7], 0, 3)])
    assert model.stage_ple_rows(batch) is not None
    if reason == "multimodal":
        batch.reqs[0].multimodal_inputs = object()
    elif reason == "embeds":
        batch.reqs[0].input_embeds = [[0.0]]
    elif reason == "device-token":
        batch.extend_lens = [4]
    elif reason == "mixed":
        batch.mix_running_indices = torch.tensor([1])
    elif reason == "empty":
        batch.extend_lens = [0]
    else:
        batch.forward_mode = ForwardMode.DECODE
    assert model.stage_ple_rows(batch) is None


def test_a_mixed_batch_takes_the_ids_of_the_device(model: Any, pool: Pool) -> None:
    """A decode row joins a chunk while its last step, which accepts two drafts, is in flight: the host still has it two
    tokens back, and a window built there is of other rows than the forward hashes to."""
    known, committed = [5, 6, 7, 8], [5, 6, 7, 8, 9, 10]
    batch = extend_batch([([20, 21, 22], 0, 3), (known, 3, 1)])
    batch.mix_running_indices = torch.tensor([2])
    staged = model.stage_ple_rows(batch)
    # The device: the committed history of the tail, and the tail's newest token.
    live_spans = extend_batch([([20, 21, 22], 0, 3), (committed, 5, 1)])
    pool.ngrams.context[2] = torch.tensor(committed[3:5])
    live, forward = device_batch(live_spans)
    forward.ple_staged_rows = staged
    for module in ple_modules(model).values():
        served = module(live, forward)
        expected = module.ngram_embedding(module.compute_ngram_ids(live), live.req_indices).flatten(-2)
        assert torch.equal(served.view(torch.int16), expected.view(torch.int16))


def test_a_request_without_tokens_takes_no_rows(model: Any) -> None:
    batch = extend_batch([([5, 6, 7], 3, 0), ([8, 9], 0, 2)])
    contexts, seq_ids = qwen4_exp.extend_windows(batch, HISTORY + 1, EOS)
    assert contexts.tolist() == [[EOS, EOS, 8], [EOS, 8, 9]]
    assert seq_ids.tolist() == [1, 1]


def ple_nvme() -> Any:
    return importlib.import_module("sglang.srt.models.qwen4_exp_ple_nvme")


class CountedBlocks:
    """`torch` with the host blocks that `empty` makes counted, and the most rows that were alive at once."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.peak = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        assert dtype == torch.uint8
        assert not pin_memory
        block = np.empty(shape, dtype=np.uint8)  # alive as long as the tensor's storage
        self.blocks.append((shape[0], weakref.ref(block)))
        self.peak = max(self.peak, sum(rows for rows, alive in self.blocks if alive() is not None))
        return torch.from_numpy(block)

    def empty_like(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self.empty(tuple(like.shape), like.dtype)


@pytest.mark.parametrize(("largest_chunk", "biggest_block"), [(1000, 1000), (900, 1800), (None, 1280)])
def test_staging_grows_in_few_steps_and_never_holds_two_blocks(
    monkeypatch: pytest.MonkeyPatch, largest_chunk: int | None, biggest_block: int
) -> None:
    """Up to the largest chunk, where one is set; the decode rows of a mixed batch may exceed it."""
    counted = CountedBlocks()
    monkeypatch.setattr(ple_nvme(), "torch", counted)
    stager = ple_nvme().PleRowStager(lambda ids, out, seqs: {}, 4, largest_chunk, torch.device("cpu"))
    batches = []  # a batch outlives its forward by two steps, and its staged rows with it
    for rows in range(10, 1001, 10):
        for _ in range(stager.NUM_SLOTS):
            batches.append(stager.submit(torch.zeros((rows, 1), dtype=torch.int64), torch.zeros(rows)))
            with batches[-1].wait() as (staged, _):
                assert staged.shape == (rows, 1, 4)
            del staged
    sizes = [rows for rows, _ in counted.blocks]
    assert max(sizes) == biggest_block
    assert len(sizes) <= stager.NUM_SLOTS * 9  # 10, 20, 40, ..., 1280: not a block for each of the 100 sizes
    assert counted.peak == stager.NUM_SLOTS * biggest_block


def test_the_device_block_goes_before_a_bigger_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CountedBlocks()
    monkeypatch.setattr(ple_nvme(), "torch", counted)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    slot = ple_nvme()._Slot(4, None, torch.device("cpu"))
    events = SimpleNamespace(wait_event=lambda event: None, record=lambda stream: None)
    slot.copied = slot.consumed = events
    for rows in (10, 20, 30):
        slot.host = torch.empty((rows, 4), dtype=torch.uint8)
        on_device = slot.upload(rows, events)
        assert on_device.shape == (rows, 4)
        del on_device
    assert [rows for rows, _ in counted.blocks] == [10, 20, 30]
    assert counted.peak == 30


def test_rows_are_consumed_once(model: Any) -> None:
    """Their slot may hold another forward's rows afterwards."""
    embedding = ple_modules(model)[1].ngram_embedding
    staged = embedding.stage(torch.zeros((1, 16), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    embedding.consume(staged)
    with pytest.raises(RuntimeError, match="consumed before"):
        embedding.consume(staged)


class Gated:
    """The real reader, each batch held until `release` is set; `entered` says that a read began."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.entered, self.release = reader, threading.Event(), threading.Event()

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self.entered.set()
        assert self.release.wait(30)
        self.reader.read_rows(ids, out)


def test_the_read_runs_before_and_beside_the_forward(model: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ple_modules(model)[1]
    gated = Gated(module.ngram_embedding.reader)
    monkeypatch.setattr(module.ngram_embedding, "reader", gated)
    batch = extend_batch([([5, 6, 7, EOS, 9], 0, 5)])
    staged = model.stage_ple_rows(batch)
    assert gated.entered.wait(30), "the read waits for the forward"
    live, forward = device_batch(batch)
    forward.ple_staged_rows = staged
    gated.release.set()
    values = module(live, forward)
    forward.ple_staged_rows = None
    assert torch.equal(values.view(torch.int16), module(live, forward).view(torch.int16))


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_capture_waits_for_the_reader_thread(
    model: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """CUDA calls of another thread invalidate a capture, so an eager break of one leaves no read running."""
    module = ple_modules(model)[1]
    gated = Gated(module.ngram_embedding.reader)
    monkeypatch.setattr(module.ngram_embedding, "reader", gated)
    layer = Qwen4ExpPLELayer.__new__(Qwen4ExpPLELayer)
    torch.nn.Module.__init__(layer)
    layer.ple_embedding, layer._staged_rows = module, None
    live, forward = device_batch(extend_batch([([5, 6, 7], 0, 3)]))

    def eager_break() -> None:
        if capturing:
            qwen4_exp._current_capture_var.set(object())
        layer.start_prefetch(live, forward)

    forward_thread = threading.Thread(target=eager_break)
    forward_thread.start()
    assert gated.entered.wait(30)
    forward_thread.join(0.5)
    assert forward_thread.is_alive() == capturing
    gated.release.set()
    forward_thread.join(30)
    layer._staged_rows.finish()


def test_the_reader_thread_lets_go_of_the_ids_before_the_rows_are_there(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned ids freed later record an event on a stream that may be capturing: the next boot step dies of it."""
    embedding = ple_modules(model)[1].ngram_embedding
    gated = Gated(embedding.reader)
    monkeypatch.setattr(embedding, "reader", gated)
    ids = torch.zeros((4, 16), dtype=torch.int64)
    staged = embedding.stage(ids, torch.zeros(4, dtype=torch.int64))
    assert gated.entered.wait(30)
    linger = threading.Event()
    # Called by the reader thread between the result and the end of its work item.
    staged._future.add_done_callback(lambda _: linger.wait(30))
    gated.release.set()
    staged.finish()
    alive = weakref.ref(ids)
    del ids
    held = alive() is not None
    linger.set()
    assert not held, "the reader thread still holds the ids of rows that are there"


def test_rows_of_two_forwards_in_flight_stay_apart(model: Any) -> None:
    embedding = ple_modules(model)[2].ngram_embedding
    batches = [torch.arange(n * 160, n * 160 + 160).reshape(10, 16) for n in range(5)]
    seq_ids = torch.zeros(10, dtype=torch.int64)
    alone = [embedding(ids, seq_ids).clone() for ids in batches]
    in_flight = [embedding.stage(batches[0], seq_ids)]
    for n in range(5):
        if n + 1 < 5:
            in_flight.append(embedding.stage(batches[n + 1], seq_ids))
        assert torch.equal(embedding.consume(in_flight[n]).view(torch.int16), alone[n].view(torch.int16))


def test_a_failed_read_ahead_is_reported_by_its_own_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = ple_modules(model)[1].ngram_embedding

    def fail(ids: torch.Tensor, out: torch.Tensor) -> None:
        raise OSError(5, "Input/output error", "shard_0")

    seq_ids = torch.tensor([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(embedding.reader, "read_rows", fail)
        failed = embedding.stage(torch.zeros((2, 16), dtype=torch.int64), seq_ids)
        failed._future.result()
    healthy = embedding.stage(torch.zeros((2, 16), dtype=torch.int64), seq_ids)
    healthy._future.result()
    assert model.take_failed_requests() == {}
    embedding.consume(failed)
    assert sorted(model.take_failed_requests()) == [0, 1]
    embedding.consume(healthy)
    assert model.take_failed_requests() == {}


def test_rows_of_another_token_count_are_refused(model: Any, pool: Pool) -> None:
    module = ple_modules(model)[1]
    live, forward = device_batch(extend_batch([([5, 6, 7], 0, 3)]))
    forward.ple_staged_rows = model.stage_ple_rows(extend_batch([([5, 6], 0, 2)]))
    with pytest.raises(RuntimeError, match="2 tokens were staged for a forward of 3 tokens"):
        module(live, forward)
