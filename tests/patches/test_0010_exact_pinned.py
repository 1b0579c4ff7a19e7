"""Pinned host memory takes its own size: the PLE table and the paged experts' host store.

torch's caching host allocator rounds every pinned block up to a power of two (a 47.7 GiB table occupies 64 GiB). There
is no GPU here, so the CUDA runtime is a recorder and torch's pinned allocation is the same rounding in pageable memory;
the mappings, their residency and their lifetime are real. ``tests/gpu/pinned_exact.py`` measures RSS on a GPU.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pinned_kit import OUT_OF_MEMORY, Runtime, pages, record, resident_bytes
from sglang.srt.layers.moe.paged_experts.store import HostExpertStore
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.models.qwen4_exp_ple_table import allocate_ple_host_table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

ROWS, ROW_BYTES = 40_000, 160
NBYTES = ROWS * ROW_BYTES  # 6.4 MB, rounded up: 8 MiB


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return record(monkeypatch)


def ple_table(dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return allocate_ple_host_table((ROWS, ROW_BYTES // dtype.itemsize), dtype)


def expert_layer(**tensors: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(**tensors)


@pytest.mark.red_on_stock
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_ple_table_pins_its_own_size(runtime: Runtime, dtype: torch.dtype) -> None:
    table = ple_table(dtype)
    assert runtime.pinned == NBYTES
    assert runtime.registered == {table.data_ptr(): NBYTES}
    assert resident_bytes(table.data_ptr(), NBYTES) == pages(NBYTES)
    assert (table.dtype, table.device.type, table.is_contiguous()) == (dtype, "cpu", True)
    table[-1].fill_(1.5)
    assert table[-1].float().eq(1.5).all()
    assert torch.nn.Parameter(table, requires_grad=False).data_ptr() == table.data_ptr()


@pytest.mark.red_on_stock
def test_expert_store_pins_its_own_size(runtime: Runtime) -> None:
    """E experts in the layout of the layer's K-slot tables; GPTQ without act-order has empty tensors."""
    layer = expert_layer(
        w13=torch.zeros(2, 96, 70, dtype=torch.int32),
        scales=torch.zeros(2, 5, 96, dtype=torch.bfloat16),
        g_idx=torch.zeros(2, 0, dtype=torch.int32),
    )
    store = HostExpertStore(layer, ["w13", "scales", "g_idx"], num_experts=9)
    assert runtime.pinned == 9 * (96 * 70 * 4 + 5 * 96 * 2)
    assert {name: tuple(host.shape) for name, host in store.host.items()} == {
        "w13": (9, 96, 70),
        "scales": (9, 5, 96),
        "g_idx": (9, 0),
    }
    store.host["w13"][8].fill_(7)
    store.page_in(layer, [(8, 1)])
    assert layer.w13[1].eq(7).all()
    assert layer.w13[0].eq(0).all()


def test_staging_store_stays_pageable(runtime: Runtime) -> None:
    layer = expert_layer(w13=torch.zeros(2, 96, 70))
    HostExpertStore(layer, ["w13"], num_experts=9, pin=False)
    assert runtime.pinned == 0


@pytest.mark.red_on_stock
def test_last_view_unpins_then_unmaps(runtime: Runtime) -> None:
    table = ple_table()
    address, view = table.data_ptr(), table[3:5]
    del table
    gc.collect()
    assert runtime.registered == {address: NBYTES}
    view.fill_(1.0)
    del view
    gc.collect()
    assert runtime.unregistered == [address]
    assert runtime.registered == {}
    assert resident_bytes(address, NBYTES) == 0


@pytest.mark.red_on_stock
@pytest.mark.parametrize(
    "allocate",
    [
        ple_table,
        lambda: HostExpertStore(expert_layer(w2=torch.zeros(1, 1 << 20, dtype=torch.uint8)), ["w2"], num_experts=5),
    ],
    ids=["PLE table", "paged experts"],
)
def test_a_refused_pin_says_what_and_what_to_do(
    runtime: Runtime, request: pytest.FixtureRequest, allocate: Callable[[], Any]
) -> None:
    runtime.rc = OUT_OF_MEMORY
    owner = request.node.callspec.id
    with pytest.raises(RuntimeError, match=rf"Cannot pin .* bytes.*{owner}.*out of memory.*Free host memory"):
        allocate()
    assert runtime.registered == {}


@pytest.mark.red_on_stock
def test_a_failed_mapping_says_what_and_what_to_do(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(common, "alloc_mmap", no_memory)
    with pytest.raises(RuntimeError, match=rf"{NBYTES} bytes.*PLE table.*Cannot allocate memory"):
        ple_table()


def test_other_devices_keep_torchs_allocator(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets the host address; where that need not be the device's (ROCm), nothing changes."""
    monkeypatch.setattr(common, "is_cuda", lambda: False, raising=False)
    ple_table()
    assert runtime.registered == {}
    assert runtime.torch_pinned == 8 << 20
