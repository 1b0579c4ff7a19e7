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
from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, MambaAttnBackendBase
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import set_forward_context
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.models.qwen4_exp import Qwen4ExpPLELayer, _commit_ple_batch, _prepare_ple_batch
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

EOS = 2
# Where the backend is missing, its model does not start: the fixture shows the fault.
pytestmark = pytest.mark.red_on_stock(setup=True)


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with loaded(ple_checkpoints.write(tmp_path_factory.mktemp("model")), "--ple-offload-backend", "nvme") as model:
        yield model


@pytest.fixture
def pool(model: Any) -> Iterator[HybridReqToTokenPool]:
    """SGLang's real pool with random committed histories, one of them just past an end of text.

    It has no linear attention layer: the states of those are committed by Triton kernels, the histories are not.
    """
    text = model_config_of(runtime_context.get_server_args()).hf_text_config
    pool = HybridReqToTokenPool(
        size=8,
        mamba_size=8,
        mamba_spec_state_size=8,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=text.mamba2_cache_params,
        mamba_layer_ids=[],
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=3,
        short_conv_layer_ids=text.short_conv_layer_ids,
        short_conv_state_shape=text.short_conv_state_shape,
        ngram_context_len=text.ngram_context_len,
        ngram_eos_token_id=EOS,
    )
    pool.req_index_to_mamba_index_mapping.copy_(torch.arange(len(pool.req_index_to_mamba_index_mapping)))
    context = pool.ngram_pool.context
    context.copy_(torch.randint(3, 512, context.shape, generator=torch.Generator().manual_seed(3)))
    context[2] = torch.tensor([9, EOS])
    previous = set_forward_context(SimpleNamespace(attn_backend=SimpleNamespace(req_to_token_pool=pool)))
    yield pool
    set_forward_context(previous)


@pytest.fixture
def history(pool: HybridReqToTokenPool) -> torch.Tensor:
    return pool.ngram_pool.context


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


def replayed(model: Any, live: SimpleNamespace) -> list[torch.Tensor]:
    """Return the rows of every PLE layer that a graph captured for `live` computes for it."""
    modules, size = list(ple_modules(model).values()), len(live.input_ids)
    for module in modules:
        captured(module, size, live)
    model.replay_prepare(live, num_tokens=size)
    return [captured(module, size, live).clone() for module in modules]


def commit(model: Any, pool: HybridReqToTokenPool, verify: SimpleNamespace, accepted: list[int]) -> None:
    """What a speculative worker does after a verify: keep the first `accepted[i]` tokens of request i.

    SGLang's own commit, from the lengths that the sampler accepted to the pools.
    """
    runner = SimpleNamespace(
        model=model,
        model_config=model_config_of(runtime_context.get_server_args()),
        server_args=runtime_context.get_server_args(),
        device="cpu",
        is_draft_worker=False,
        req_to_token_pool=pool,
        token_to_kv_pool=None,
    )
    linear = MambaAttnBackendBase(runner)
    linear.forward_metadata = SimpleNamespace(mamba_cache_indices=pool.get_mamba_indices(verify.req_pool_indices))
    runner.attn_backend = HybridLinearAttnBackend(TorchNativeAttnBackend(runner), linear, [3])
    width = verify.spec_info.draft_token_num
    steps = torch.arange(len(accepted) * width).view(-1, width)
    lengths = torch.tensor(accepted)
    commit_mamba_states_after_verify(
        SimpleNamespace(model_runner=runner),
        SimpleNamespace(**vars(verify), mamba_track_indices=None),
        lengths,
        steps.where(torch.arange(width) < lengths.unsqueeze(1), -1),
        width,
    )


def test_history_is_only_what_was_committed(model: Any, pool: HybridReqToTokenPool, history: torch.Tensor) -> None:
    slots = [1, 2, 3]
    live = batch(ForwardMode.DECODE, [5, 5, 5], slots)
    first, before = replayed(model, live), history.clone()
    drafts = batch(ForwardMode.TARGET_VERIFY, [10, 11, 12, 20, 21, 22, 30, 31, 32], slots, draft=3)
    replayed(model, drafts)
    _commit_ple_batch(_prepare_ple_batch(drafts.input_ids, drafts, ngram_size=3, ngram_eos_token_id=EOS), drafts)
    assert torch.equal(history, before), "a verify reads rows of drafts, but commits none"
    for rows, expected in zip(replayed(model, live), first, strict=True):
        assert torch.equal(rows, expected)
    commit(model, pool, drafts, [1, 2, 3])
    kept = [[int(before[1, 1]), 10], [20, 21], [31, 32]]
    assert history[slots].tolist() == kept, "rejected: 11, 12 and 22"
    assert torch.equal(history[4:], before[4:])
    contexts = torch.tensor([[*context, 5] for context in kept])
    for module, rows in zip(ple_modules(model).values(), replayed(model, live), strict=True):
        ids = module.hash_contexts_on_host(contexts)
        assert torch.equal(rows, module.ngram_embedding(ids, torch.arange(3)).flatten(start_dim=-2))


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
