"""The QSA indexer asks the device for nothing on its own: no ``positions.max().item()`` per layer and forward.

The RoPE cache is reserved at load from the context length; the indexer checked it again in every layer of every eager
forward, which stops the host until the GPU has caught up, and could have grown, and so moved, a cache whose address
captured graphs hold.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention import qsa_indexer as kernels
from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.utils import common

HEADS, HEAD_DIM, ROTARY_DIM, HIDDEN = 4, 64, 32, 16
ORIGINAL_LENGTH, CONTEXT_LENGTH = 64, 4096
BASE = 10_000


class Syncs:
    """Counts the calls that make the host wait for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name: str, real: Any) -> Any:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(tensor, *args, **kwargs)

        return counted


@pytest.fixture
def indexer() -> QSAIndexer:
    """A real indexer with its real RoPE; only the projection that needs a quant method is a plain matrix."""
    layer = QSAIndexer.__new__(QSAIndexer)
    torch.nn.Module.__init__(layer)
    layer.layer_id, layer.index_n_heads, layer.index_kv_heads, layer.index_head_dim = 0, HEADS, 1, HEAD_DIM
    layer._rope_axis_map_cache = None
    layer.rotary_emb = MRotaryEmbedding(
        HEAD_DIM, ROTARY_DIM, ORIGINAL_LENGTH, BASE, True, torch.float32, mrope_section=[8, 4, 4]
    )
    weight = torch.randn((HEADS + 1) * HEAD_DIM, HIDDEN, generator=torch.Generator().manual_seed(0))
    layer.index_qk_proj = lambda hidden: (hidden @ weight.T, None)
    layer.q_layernorm = layer.k_layernorm = torch.nn.Identity()
    return layer


def reserve(monkeypatch: pytest.MonkeyPatch, layer: QSAIndexer) -> None:
    """What ModelRunner does after loading, for a context longer than the config's own length."""
    monkeypatch.setattr(common, "get_model", lambda: SimpleNamespace(context_length=CONTEXT_LENGTH))
    monkeypatch.setattr(
        common, "get_spec", lambda: SimpleNamespace(speculative_num_steps=0, speculative_num_draft_tokens=0)
    )
    common.reserve_rope_cache_for_long_sequences(torch.nn.ModuleList([layer]), model_config=SimpleNamespace())


def rotated(positions: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """RoPE from its definition, float64: pairs (i, i + half), axis by MRoPE section."""
    half = ROTARY_DIM // 2
    frequencies = BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    if positions.ndim == 2:
        axis = torch.tensor([0] * 8 + [1] * 4 + [2] * 4)
        angles = positions[axis].T.double() * frequencies
    else:
        angles = positions[:, None].double() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = tensor[..., :half].double(), tensor[..., half:ROTARY_DIM].double()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, tensor[..., ROTARY_DIM:].double()], -1)


def position_cases() -> dict[str, torch.Tensor]:
    last = CONTEXT_LENGTH - 1
    text = torch.tensor([0, 1, ORIGINAL_LENGTH - 1, ORIGINAL_LENGTH, 1000, last])
    image = torch.stack([text, text.flip(0), torch.full_like(text, last)])
    return {"text": text, "image": image}


@pytest.mark.red_on_stock
@pytest.mark.parametrize("case", ["text", "image"])
def test_rope_does_not_ask_the_device(monkeypatch: pytest.MonkeyPatch, indexer: QSAIndexer, case: str) -> None:
    reserve(monkeypatch, indexer)
    positions = position_cases()[case]
    tensor = torch.randn(positions.shape[-1], HEADS, HEAD_DIM)
    syncs = Syncs(monkeypatch)
    indexer.apply_rope(positions, tensor)
    assert syncs.calls == []


@pytest.mark.red_on_stock
def test_compressed_keys_do_not_ask_the_device(monkeypatch: pytest.MonkeyPatch, indexer: QSAIndexer) -> None:
    reserve(monkeypatch, indexer)
    syncs = Syncs(monkeypatch)
    indexer.normalize_compressed_keys(torch.randn(3, HEAD_DIM), torch.tensor([0, 512, CONTEXT_LENGTH - 1]))
    assert syncs.calls == []


@pytest.mark.red_on_stock
@pytest.mark.parametrize("fused", [False, True])
def test_projection_does_not_ask_the_device(monkeypatch: pytest.MonkeyPatch, indexer: QSAIndexer, fused: bool) -> None:
    """Both paths of ``project_qk``; the fused kernel itself is Triton, so only its call is observed."""
    reserve(monkeypatch, indexer)
    seen: list[Any] = []
    pool = SimpleNamespace(
        qsa_compressed_dtype=torch.float32,
        qsa_rope_position_buffer=None,
        get_qsa_key_state_buffer=lambda layer_id: torch.zeros(8, 1, HEAD_DIM),
    )
    if fused:
        monkeypatch.setattr(indexer, "_use_fused_prep", lambda tensor: True)
        monkeypatch.setattr(indexer, "_rope_axis_map", lambda device: None)
        norm = SimpleNamespace(weight=torch.zeros(HEAD_DIM), variance_epsilon=1e-6)
        monkeypatch.delattr(indexer, "q_layernorm")  # a registered module, which only a module may replace
        monkeypatch.setitem(indexer.__dict__, "q_layernorm", norm)
        monkeypatch.setattr(kernels, "qsa_index_q_norm_rope_store", lambda *a, **k: seen.append(a[1]) or a[0])
    positions = position_cases()["text"]
    hidden = torch.randn(positions.numel(), HIDDEN)
    syncs = Syncs(monkeypatch)
    indexer.project_qk(hidden, positions, pool=pool, cache_loc=torch.arange(positions.numel()))
    assert syncs.calls == []
    assert len(seen) == int(fused)


@pytest.mark.red_on_stock
def test_the_cache_never_moves_after_load(monkeypatch: pytest.MonkeyPatch, indexer: QSAIndexer) -> None:
    """Captured graphs hold its address; a position past the reservation must not replace it under them."""
    reserve(monkeypatch, indexer)
    cache = indexer.rotary_emb.cos_sin_cache
    past = torch.tensor([cache.shape[0]])
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        indexer.apply_rope(past, torch.randn(1, HEADS, HEAD_DIM))
    assert indexer.rotary_emb.cos_sin_cache is cache


@pytest.mark.parametrize("case", ["text", "image"])
def test_positions_past_the_original_cache_are_right(
    monkeypatch: pytest.MonkeyPatch, indexer: QSAIndexer, case: str
) -> None:
    assert indexer.rotary_emb.cos_sin_cache.shape[0] == ORIGINAL_LENGTH
    reserve(monkeypatch, indexer)
    assert indexer.rotary_emb.cos_sin_cache.shape[0] >= CONTEXT_LENGTH
    positions = position_cases()[case]
    tensor = torch.randn(positions.shape[-1], HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    got = indexer.apply_rope(positions, tensor)
    # float32 angles near 4096 carry about 2.4e-4 rad of rounding.
    torch.testing.assert_close(got.double(), rotated(positions, tensor), atol=2e-3, rtol=0)
