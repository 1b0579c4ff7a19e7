"""Weights that the offloader moves to pinned memory take their own size there, also after post-load processing.

torch's caching host allocator rounds every pinned block up to a power of two, each parameter by itself. There is no GPU
here, so the CUDA runtime is a recorder (``pinned_kit``).
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from pinned_kit import OUT_OF_MEMORY, Runtime, pages, record, resident_bytes
from sglang.srt.model_loader import post_load
from sglang.srt.utils import offloader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

EXPERTS, ROWS, COLUMNS = 9, 128, 640
NBYTES = EXPERTS * ROWS * COLUMNS * 4  # 2.9 MB, rounded up: 4 MiB


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return record(monkeypatch)


def weight() -> torch.nn.Parameter:
    data = torch.arange(EXPERTS * ROWS * COLUMNS, dtype=torch.int32).view(EXPERTS, ROWS, COLUMNS)
    return torch.nn.Parameter(data, requires_grad=False)


def offloaded(param: torch.nn.Parameter) -> torch.Tensor:
    offloader._move_param_to_cpu(param, pin_memory=True)
    return param.data


def processed(param: torch.nn.Parameter) -> torch.Tensor:
    """What post-load processing puts on the host in the place of a weight that it replaced on the device.

    A tensor on "meta" cannot be copied, so the device is that of the tensor under another index.
    """
    device = torch.device("cpu", 0)
    return post_load._copy_data_to_device(param.data, device, pin_memory=True)


MOVES = pytest.mark.parametrize("move", [offloaded, processed])


@pytest.mark.red_on_stock
@MOVES
def test_a_moved_weight_pins_its_own_size(runtime: Runtime, move) -> None:
    expected = weight().data
    moved = move(weight())
    assert runtime.pinned == NBYTES
    assert runtime.registered == {moved.data_ptr(): NBYTES}
    assert resident_bytes(moved.data_ptr(), NBYTES) == pages(NBYTES)
    assert torch.equal(moved, expected)


@pytest.mark.red_on_stock
@MOVES
def test_strides_are_kept(runtime: Runtime, move) -> None:
    """Quantised layouts are column-major, or rows of a wider buffer."""
    for data in (weight().data.transpose(1, 2), torch.zeros(4, 512, 700, dtype=torch.bfloat16)[:, :, :640]):
        moved = move(torch.nn.Parameter(data, requires_grad=False))
        assert moved.stride() == data.stride()
        assert torch.equal(moved, data)
        span = 1 + sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
        assert runtime.pinned == span * data.element_size()
        del moved
        gc.collect()


@MOVES
def test_small_tensors_keep_torchs_allocator(runtime: Runtime, move) -> None:
    """A norm's weight is not worth a mapping; neither is an empty or a scalar tensor."""
    for data in (torch.ones(2560), torch.ones(0, 8), torch.tensor(3.0)):
        assert torch.equal(move(torch.nn.Parameter(data, requires_grad=False)), data)
    assert runtime.registered == {}


@pytest.mark.red_on_stock
def test_a_weight_that_is_let_go_is_unpinned(runtime: Runtime) -> None:
    param = weight()
    address = offloaded(param).data_ptr()
    param.data = torch.empty(0, dtype=param.dtype)
    gc.collect()
    assert runtime.unregistered == [address]
    assert resident_bytes(address, NBYTES) == 0


@pytest.mark.red_on_stock
def test_a_refused_pin_says_what_and_what_to_do(runtime: Runtime) -> None:
    runtime.rc = OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match=r"Cannot pin .* bytes.*offloaded weights.*out of memory.*Free host memory"):
        offloaded(weight())
    assert runtime.registered == {}


def test_without_pinned_memory_nothing_is_pinned(runtime: Runtime) -> None:
    param = weight()
    expected = param.data.clone()
    offloader._move_param_to_cpu(param, pin_memory=False)
    assert torch.equal(param.data, expected)
    assert runtime.pinned == 0
