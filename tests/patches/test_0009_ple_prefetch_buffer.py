"""A breakable decode capture owns its PLE prefetch buffer and takes no prefill break.

Being inside a breakable graph means prefill to the stock pin. A decode capture under
``--cuda-graph-backend-decode breakable`` is inside one too: its prefetch buffer came from the eager slot, which the
next larger prefill replaces, so the captured gather writes freed memory; a draft verify (an extend mode) took the
eager breaks, which read a live batch that only the prefill runner publishes.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import enable_breakable_cuda_graph
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode, model_capture_mode
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope
from sglang.srt.models import qwen4_exp
from sglang.srt.models.qwen4_exp import Qwen4ExpPinnedHostEmbedding, Qwen4ExpPLELayer

EMBED = 64


@contextlib.contextmanager
def decode_capture(backend: str) -> Iterator[None]:
    """The flags under which DecodeCudaGraphRunner captures with ``backend``."""
    with model_capture_mode(), enable_breakable_cuda_graph() if backend == "breakable" else contextlib.nullcontext():
        assert get_is_capture_mode()
        yield


@contextlib.contextmanager
def prefill(backend: str) -> Iterator[None]:
    """The flags of one prefill forward: the breakable runner's replay, or no graph at all."""
    if backend == "breakable":
        with enable_breakable_cuda_graph(), prefill_graph_scope(full_graph=False):
            yield
    else:
        yield


@pytest.fixture
def ple() -> Qwen4ExpPLELayer:
    """The real layer's buffer logic on the real host embedding's allocator; neither is constructed (no device)."""
    embedding = Qwen4ExpPinnedHostEmbedding.__new__(Qwen4ExpPinnedHostEmbedding)
    torch.nn.Module.__init__(embedding)
    embedding.tp_size = 1
    layer = Qwen4ExpPLELayer.__new__(Qwen4ExpPLELayer)
    torch.nn.Module.__init__(layer)
    layer.ple_embed_dim = EMBED
    layer.ple_embedding = SimpleNamespace(ngram_embedding=embedding)
    layer._graph_prefetch_buffers = {}
    layer._eager_prefetch_buffer = None
    return layer


def buffer(ple: Qwen4ExpPLELayer, tokens: int) -> torch.Tensor:
    return ple._get_prefetch_buffer(tokens, torch.zeros(tokens, dtype=torch.long))


def captured_storage(ple: Qwen4ExpPLELayer, backend: str, tokens: int) -> weakref.ref[Any]:
    """A graph keeps the address alone, so only the layer can keep the storage."""
    with decode_capture(backend):
        captured = buffer(ple, tokens)
    assert captured.shape == (tokens, EMBED)
    owned = captured if captured._base is None else captured._base
    return weakref.ref(owned)


@pytest.mark.parametrize("prefill_backend", ["breakable", "disabled"])
@pytest.mark.parametrize("decode_backend", [pytest.param("breakable", marks=pytest.mark.red_on_stock), "full"])
def test_capture_survives_a_larger_prefill(ple: Qwen4ExpPLELayer, decode_backend: str, prefill_backend: str) -> None:
    captured = captured_storage(ple, decode_backend, 8)
    with prefill(prefill_backend):
        buffer(ple, 512)
    gc.collect()
    assert captured() is not None, "the captured buffer was freed by a larger prefill"


@pytest.mark.red_on_stock
def test_each_captured_size_keeps_its_address(ple: Qwen4ExpPLELayer) -> None:
    """Captures run from the largest batch down, warm-ups first: same size, same address; another size, another."""
    addresses = {}
    for tokens in (32, 8, 1):
        with decode_capture("breakable"):
            addresses[tokens] = [buffer(ple, tokens).data_ptr() for _ in range(3)]
    assert all(len(set(found)) == 1 for found in addresses.values())
    with prefill("breakable"):
        live = buffer(ple, 512)
    taken = {found[0] for found in addresses.values()}
    assert len(taken) == 3
    assert live.data_ptr() not in taken


@pytest.mark.red_on_stock
def test_prefill_rows_do_not_overwrite_a_captured_buffer(ple: Qwen4ExpPLELayer) -> None:
    with decode_capture("breakable"):
        captured = buffer(ple, 8)
    captured.fill_(1.0)
    with prefill("breakable"):
        buffer(ple, 4).fill_(2.0)
    assert torch.equal(captured, torch.ones_like(captured))


def test_prefill_breaks_share_one_growing_buffer(ple: Qwen4ExpPLELayer) -> None:
    """Live token counts differ at every replay: a buffer per count would never be freed."""
    with model_capture_mode(), prefill("breakable"):
        for tokens in (512, 100, 7):
            assert buffer(ple, tokens).shape == (tokens, EMBED)
        assert buffer(ple, 100).data_ptr() == buffer(ple, 512).data_ptr()
    assert ple._graph_prefetch_buffers == {}


@pytest.mark.red_on_stock
def test_breakable_verify_adds_ple_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify capture has no live batch to read: like under the full backend, the layer runs on its static batch."""
    static_batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    layer = SimpleNamespace(
        _ple_forward_batch=static_batch,
        _ple_batch=object(),
        ple=lambda residual, forward_batch, batch: residual + (1 if forward_batch is static_batch else 100),
    )
    monkeypatch.setattr(qwen4_exp, "_shards_rows_over_cp", lambda forward_batch: False)
    residual = torch.zeros(4, 8)
    with decode_capture("breakable"):
        added = qwen4_exp.Qwen4ExpLayerExtensionMixin._add_ple_embedding(layer, residual)
    assert torch.equal(added, torch.ones(4, 8))


@pytest.mark.red_on_stock
def test_breakable_verify_selects_sparse_blocks_in_the_graph() -> None:
    """The same for the QSA indexer."""
    static_batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    selected = torch.arange(8).view(4, 2)
    layer = SimpleNamespace(
        _qsa_prefill_topk_bridges=[],
        _compute_qsa_topk_indices_eager=lambda **kwargs: selected if kwargs["forward_batch"] is static_batch else None,
    )
    with decode_capture("breakable"):
        got = qwen4_exp.Qwen4ExpAttentionDecoderLayer._compute_qsa_topk_indices(
            layer, torch.zeros(4, 8), torch.arange(4), static_batch
        )
    assert got is selected
    assert layer._qsa_prefill_topk_bridges == []
