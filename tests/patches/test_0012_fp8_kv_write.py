"""Writing KV in fp8 leaves the caller's K and V alone, divides only by a scale that is not 1, and saturates.

Attention reads the same K and V after the write, so the pools' in-place division changed its input; the Triton backend
cloned both to survive it. Saturation to +-448 holds on the stock pin (torch's cast does it): a regression test.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolFP4
from sglang.srt.model_executor import runner
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, HEAD_DIM, TOKENS = 2, 16, 4
FP8_MAX = 448.0
LOC = torch.arange(1, 1 + TOKENS)


class Launches(TorchDispatchMode):
    """Names every operator that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def make_pool(cls: type[MHATokenToKVPool] = MHATokenToKVPool) -> MHATokenToKVPool:
    """The real write path on CPU buffers; only construction, which sizes device memory, is left out."""
    pool = cls.__new__(cls)
    pool.dtype = torch.float8_e4m3fn
    pool.store_dtype = torch.uint8
    pool.size, pool.page_size, pool.start_layer = 8, 1, 0
    pool.head_num, pool.head_dim, pool.v_head_dim = HEADS, HEAD_DIM, HEAD_DIM
    pool.row_dim = pool.v_row_dim = HEADS * HEAD_DIM
    pool.use_hnd = False
    pool.quant_method = memory_pool.UnquantizedKVCacheMethod.__new__(memory_pool.UnquantizedKVCacheMethod)
    pool.kv_cache_layout = "nhd"
    pool.alt_stream = None
    pool.device_module = torch.cpu
    pool.k_buffer = [torch.zeros(9, HEADS, HEAD_DIM, dtype=torch.uint8)]
    pool.v_buffer = [torch.zeros(9, HEADS, HEAD_DIM, dtype=torch.uint8)]
    pool._check_physical_write_loc = lambda *args: None
    return pool


def stored(pool: MHATokenToKVPool) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(buffer[0][LOC].view(torch.float8_e4m3fn).float() for buffer in (pool.k_buffer, pool.v_buffer))


def make_layer(k_scale: float | None = None, v_scale: float | None = None) -> SimpleNamespace:
    """The scales that RadixAttention has once ``kv_cache.py`` has loaded them."""
    scales: dict[str, Any] = {}
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        scales[name] = None if value is None else torch.nn.Parameter(torch.tensor(value), requires_grad=False)
        scales[f"{name}_float"] = value
    return SimpleNamespace(layer_id=0, **scales)


@pytest.fixture
def kv() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator).bfloat16() * 8 for _ in range(2))
    return k, v


def write(pool: MHATokenToKVPool, layer: SimpleNamespace, k: torch.Tensor, v: torch.Tensor, as_float: bool) -> None:
    scales = (layer.k_scale_float, layer.v_scale_float) if as_float else (layer.k_scale, layer.v_scale)
    pool.set_kv_buffer(layer, LOC, k, v, *scales)


@pytest.mark.red_on_stock
@pytest.mark.parametrize("as_float", [True, False], ids=["float scale", "tensor scale"])
def test_caller_keeps_its_kv(kv: tuple[torch.Tensor, torch.Tensor], as_float: bool) -> None:
    k, v = (t.clone() for t in kv)
    pool = make_pool()
    write(pool, make_layer(2.0, 4.0), k, v, as_float)
    assert torch.equal(k, kv[0])
    assert torch.equal(v, kv[1])
    for got, source, scale in zip(stored(pool), kv, (2.0, 4.0), strict=True):
        assert torch.equal(got, (source / scale).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scale", [0.37, 3.0])
def test_stored_bytes_are_those_of_the_division_in_place(kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> None:
    """Any scale, also a one-element vector, which must not promote K to float32 before the cast."""
    for tensor_scale in (torch.tensor(scale), torch.tensor([scale])):
        pool, layer = make_pool(), make_layer(scale, scale)
        layer.k_scale = layer.v_scale = tensor_scale
        write(pool, layer, kv[0].clone(), kv[1].clone(), as_float=False)
        for got, source in zip(stored(pool), kv, strict=True):
            assert torch.equal(got, source.clone().div_(tensor_scale).to(torch.float8_e4m3fn).float())


@pytest.mark.red_on_stock
@pytest.mark.parametrize("as_float", [True, False], ids=["float scale", "tensor scale"])
def test_unit_scale_launches_no_division(kv: tuple[torch.Tensor, torch.Tensor], as_float: bool) -> None:
    """A tensor scale is known to be 1 from the layer's host copy."""
    pool, layer = make_pool(), make_layer(1.0, 1.0)
    with Launches() as launches:
        write(pool, layer, *kv, as_float)
    assert [name for name in launches.names if name.startswith(("div", "mul", "clone"))] == []
    for got, source in zip(stored(pool), kv, strict=True):
        assert torch.equal(got, source.to(torch.float8_e4m3fn).float())


def test_a_captured_write_divides_by_a_tensor_that_may_change(
    monkeypatch: pytest.MonkeyPatch, kv: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A graph outlives the value that the host knows: an online weight update writes into the same scale tensor."""
    monkeypatch.setattr(runner, "get_is_capture_mode", lambda: True)
    pool, layer = make_pool(), make_layer(1.0, 1.0)
    with Launches() as launches:
        write(pool, layer, *(t.clone() for t in kv), as_float=False)
    assert len([name for name in launches.names if name.startswith("div")]) == 2
    assert torch.equal(stored(pool)[0], kv[0].to(torch.float8_e4m3fn).float())


@pytest.fixture
def prefix_valid(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The eager fallback of ``set_kv_buffer_prefix_valid``, up to its Triton store, whose inputs are recorded."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(memory_pool, "_is_cuda", True)
    monkeypatch.setattr(memory_pool, "_set_kv_buffer_prefix_valid_impl", lambda k, v, *a, **kw: seen.append((k, v)))
    return seen


@pytest.mark.red_on_stock
def test_prefix_valid_write_keeps_the_callers_kv(
    kv: tuple[torch.Tensor, torch.Tensor], prefix_valid: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    k, v = (t.clone() for t in kv)
    layer = make_layer(2.0, 4.0)
    scales = torch.tensor([2.0]), torch.tensor([4.0])  # not scalars, so the fused kernel does not take them
    make_pool().set_kv_buffer_prefix_valid(layer, LOC[None], torch.tensor([TOKENS]), k, v, *scales)
    assert torch.equal(k, kv[0])
    assert torch.equal(v, kv[1])
    ((written_k, written_v),) = prefix_valid
    assert torch.equal(written_k.view(torch.float8_e4m3fn).float(), (kv[0] / 2).to(torch.float8_e4m3fn).float())
    assert torch.equal(written_v.view(torch.float8_e4m3fn).float(), (kv[1] / 4).to(torch.float8_e4m3fn).float())


@pytest.mark.red_on_stock
def test_fp4_write_keeps_the_callers_kv(monkeypatch: pytest.MonkeyPatch, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil

    quantized: list[torch.Tensor] = []

    def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized.append(tensor)
        return tensor.to(torch.uint8), torch.zeros(TOKENS, HEADS, dtype=torch.uint8)

    monkeypatch.setattr(FP4MXBlock16KVQuantizeUtil, "batched_quantize", staticmethod(quantize))
    pool = make_pool(MHATokenToKVPoolFP4)
    pool.k_scale_buffer = [torch.zeros(9, HEADS, dtype=torch.uint8)]
    pool.v_scale_buffer = [torch.zeros(9, HEADS, dtype=torch.uint8)]
    k, v = (t.clone() for t in kv)
    write(pool, make_layer(2.0, 4.0), k, v, as_float=True)
    assert torch.equal(k, kv[0])
    assert torch.equal(v, kv[1])
    assert torch.equal(quantized[0], kv[0] / 2)
    assert torch.equal(quantized[1], kv[1] / 4)


class Written(Exception):  # noqa: N818 (ends the forward at the write, before the Triton kernel)
    pass


@pytest.mark.red_on_stock
def test_triton_extend_does_not_clone(monkeypatch: pytest.MonkeyPatch, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The pool gets the layer's own K and V; the attention kernel reads them unchanged after the real write."""
    layer = make_layer(2.0, 4.0)
    layer.qk_head_dim = layer.v_head_dim = HEAD_DIM
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    backend.dcp_size, backend.use_mla, backend.token_to_kv_pool = 1, False, make_pool()
    backend.forward_metadata = SimpleNamespace(swa_out_cache_loc=None)
    monkeypatch.setattr(backend, "_can_run_dense_fp8_chunked_mha", lambda *args: False)
    batch = SimpleNamespace(out_cache_loc=LOC, out_cache_loc_is_physical=True, swa_out_cache_loc=None)
    k, v = (t.clone() for t in kv)
    written: list[torch.Tensor] = []
    real_write = backend.token_to_kv_pool.set_kv_buffer

    def write_then_stop(layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor, *scales: Any, **kwargs: Any) -> None:
        written.extend((k, v))
        real_write(layer, LOC, k, v, *scales, **kwargs)
        raise Written

    backend.token_to_kv_pool.set_kv_buffer = write_then_stop
    with pytest.raises(Written):
        backend.forward_extend(torch.zeros(TOKENS, HEADS * HEAD_DIM), k, v, layer, batch)
    assert written[0].data_ptr() == k.data_ptr()
    assert written[1].data_ptr() == v.data_ptr()
    assert torch.equal(k, kv[0])
    assert torch.equal(v, kv[1])


@pytest.mark.parametrize("scale", [None, 1.0, 0.5, 2.0])
def test_overflow_saturates(scale: float | None) -> None:
    """pytorch 178817, ao 4364, ml_dtypes 400: a cast of more than 464, where rounding leaves the range, gave NaN or
    448, by version. bfloat16 has no 465 (it is 464 there), hence the other types."""
    values = torch.tensor([448.0, 464.0, 465.0, 466.0, 480.0, 1000.0, 1e4, float("inf")], dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pool, scaled = make_pool(), (values * (scale or 1.0)).to(dtype)
        k = scaled.repeat(TOKENS * HEADS * HEAD_DIM // len(values)).view(TOKENS, HEADS, HEAD_DIM)
        write(pool, make_layer(scale, scale), k.clone(), -k, as_float=True)
        got_k, got_v = stored(pool)
        assert got_k.eq(FP8_MAX).all(), dtype
        assert got_v.eq(-FP8_MAX).all(), dtype


def test_nan_stays_nan() -> None:
    """As in upstream's ``saturate_to_fp8_range``: a NaN is not folded onto a bound."""
    pool = make_pool()
    k = torch.full((TOKENS, HEADS, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
    pool.set_kv_buffer(make_layer(), LOC, k, k.clone())
    assert stored(pool)[0].isnan().all()
