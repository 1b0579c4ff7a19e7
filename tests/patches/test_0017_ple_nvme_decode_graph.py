"""Rows for a decode graph are read between load_batch and replay, and are the rows the eager forward reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ple_checkpoints
import pytest
import torch
from ple_checkpoints import loaded, ple_modules, refuse_row
from sglang.srt.mem_cache.ple_state_pool import NGramPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import set_forward_context
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.models.qwen4_exp import Qwen4ExpPLELayer, _prepare_ple_batch

EOS = 2
# Where the backend is missing, its model does not start: the fixture shows the fault.
pytestmark = pytest.mark.red_on_stock(setup=True)


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with loaded(ple_checkpoints.write(tmp_path_factory.mktemp("model")), "--ple-offload-backend", "nvme") as model:
        yield model


@pytest.fixture
def history() -> Iterator[torch.Tensor]:
    """Random committed histories in SGLang's real pool, one of them just past an end of text."""
    ngrams = NGramPool(size=8, context_len=2, eos_token_id=EOS, device="cpu")
    ngrams.context.copy_(torch.randint(3, 512, ngrams.context.shape, generator=torch.Generator().manual_seed(3)))
    ngrams.context[2] = torch.tensor([9, EOS])
    pool = SimpleNamespace(
        size=8,
        ple_window_cache=None,
        get_mamba_indices=lambda indices: indices,
        get_ngram_context=ngrams.get_context,
    )
    previous = set_forward_context(SimpleNamespace(attn_backend=SimpleNamespace(req_to_token_pool=pool)))
    yield ngrams.context
    set_forward_context(previous)


def batch(mode: ForwardMode, tokens: list[int], slots: list[int], draft: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode,
        _original_forward_mode=None,
        tbo_parent_token_range=None,
        spec_algorithm=None,
        spec_info=SimpleNamespace(draft_token_num=draft, topk=1) if mode.is_target_verify() else None,
        global_num_token_non_padded_cpu=None,
        extend_seq_lens_cpu=None,
        extend_seq_lens=None,
        input_ids=torch.tensor(tokens),
        req_pool_indices=torch.tensor(slots),
        out_cache_loc=torch.arange(1, len(tokens) + 1),
        ple_staged_rows=None,
    )


def eager(module: Any, live: SimpleNamespace) -> torch.Tensor:
    prepared = _prepare_ple_batch(live.input_ids, live, ngram_size=3, ngram_eos_token_id=EOS)
    return module(prepared, live)


def captured(module: Any, size: int, live: SimpleNamespace) -> torch.Tensor:
    """Return what a graph of `size` tokens computes when it replays now (on a CPU the recorded ops run again)."""
    prepared = _prepare_ple_batch(live.input_ids, live, ngram_size=3, ngram_eos_token_id=EOS)
    assert prepared.processed_tokens == size
    with model_capture_mode():
        return module(prepared, live)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_replay_reads_what_the_eager_forward_reads(model: Any, history: torch.Tensor, mode: ForwardMode) -> None:
    draft = 2 if mode.is_target_verify() else 1
    live = batch(mode, [5, EOS, 7, 8, 9, 11][: 3 * draft], [1, 2, 3], draft)
    padded = batch(mode, [0] * 4 * draft, [0] * 4, draft)
    for module in ple_modules(model).values():
        captured(module, 4 * draft, padded)
    model.replay_prepare(live, num_tokens=4 * draft)
    for module in ple_modules(model).values():
        rows = captured(module, 4 * draft, padded)
        assert torch.equal(rows[: 3 * draft].view(torch.int16), eager(module, live).view(torch.int16))
        assert not rows[3 * draft :].any()


def test_history_is_only_what_was_committed(model: Any, history: torch.Tensor) -> None:
    module = ple_modules(model)[1]
    live = batch(ForwardMode.DECODE, [5], [1])
    captured(ple_modules(model)[1], 1, live), captured(ple_modules(model)[2], 1, live)
    model.replay_prepare(live, num_tokens=1)
    first = captured(module, 1, live).clone()
    # A verify of rejected drafts reads rows, but leaves the history alone.
    drafts = batch(ForwardMode.TARGET_VERIFY, [6, 7], [1], draft=2)
    captured(module, 2, drafts), captured(ple_modules(model)[2], 2, drafts)
    model.replay_prepare(drafts, num_tokens=2)
    model.replay_prepare(live, num_tokens=1)
    assert torch.equal(captured(module, 1, live), first)
    history[1] = torch.tensor([100, 101])
    model.replay_prepare(live, num_tokens=1)
    assert not torch.equal(captured(module, 1, live), first)


def test_a_failed_read_fails_its_request_and_leaves_no_stale_rows(
    model: Any, history: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ple_modules(model)[1]
    live = batch(ForwardMode.DECODE, [5, 6], [1, 2])
    for each in ple_modules(model).values():
        captured(each, 2, live)
    model.replay_prepare(live, num_tokens=2)
    before = captured(module, 2, live).clone()
    assert before[1].any()
    embedding = module.ngram_embedding
    prepared = _prepare_ple_batch(live.input_ids, live, ngram_size=3, ngram_eos_token_id=EOS)
    poisoned = int(module.compute_ngram_ids(prepared)[1, 4])
    refuse_row(embedding.reader, poisoned, monkeypatch)
    model.replay_prepare(live, num_tokens=2)
    after = captured(module, 2, live)
    assert torch.equal(after[0], before[0])
    assert not after[1].any()
    assert list(model.take_failed_requests()) == [1]


def test_an_unknown_graph_is_refused(model: Any, history: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="no PLE rows buffer for a graph of 4 tokens"):
        model.replay_prepare(batch(ForwardMode.DECODE, [5], [1]), num_tokens=4)


def test_capture_starts_no_read(model: Any, history: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ple_modules(model)[1]
    monkeypatch.setattr(module.ngram_embedding, "reader", None)
    layer = Qwen4ExpPLELayer.__new__(Qwen4ExpPLELayer)
    torch.nn.Module.__init__(layer)
    layer.ple_embedding, layer._staged_rows = module, None
    live = batch(ForwardMode.DECODE, [5], [1])
    prepared = _prepare_ple_batch(live.input_ids, live, ngram_size=3, ngram_eos_token_id=EOS)
    with model_capture_mode():
        layer.start_prefetch(prepared, live)
    assert layer._staged_rows is None


@pytest.mark.parametrize(("ragged", "tokens"), [(False, 12), (True, 7)])
def test_the_runner_prepares_between_load_and_replay(ragged: bool, tokens: int) -> None:
    calls: list[Any] = []
    runner = DecodeCudaGraphRunner.__new__(DecodeCudaGraphRunner)
    runner.bs, runner.captured_req_width, runner.raw_num_token, runner.is_dllm = 4, 3, 9, False
    runner.ragged_verify_mode = ragged
    runner._replay_graph_key = SimpleNamespace(size=7 if ragged else 4)
    runner.model_runner = SimpleNamespace(
        device_timer=None,
        model=SimpleNamespace(replay_prepare=lambda batch, num_tokens: calls.append(("prepare", batch, num_tokens))),
    )
    output = SimpleNamespace()
    runner.backend = SimpleNamespace(
        replay_session=contextlib.nullcontext, replay=lambda key, batch: calls.append("replay") or output
    )
    live = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    with (
        mock.patch.object(DecodeCudaGraphRunner, "model_context", return_value=contextlib.nullcontext()),
        mock.patch.object(DecodeCudaGraphRunner, "load_batch", side_effect=lambda *args: calls.append("load")),
        mock.patch.object(DecodeCudaGraphRunner, "_resolve_shared_read_ends", return_value=None),
        mock.patch.object(DecodeCudaGraphRunner, "_replay_attn_backend", return_value=None),
        contextlib.suppress(AssertionError),  # the stub output is neither logits nor a PP proxy
    ):
        runner.execute(live)
    assert calls == ["load", ("prepare", live, tokens), "replay"]
