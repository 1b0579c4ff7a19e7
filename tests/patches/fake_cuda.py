"""Device placement without a GPU: tensors that claim to be on "cuda:0" and refuse to be mixed with host tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CUDA = torch.device("cuda:0")
HOST = torch.device("cpu")
_DATA = torch.Tensor.data


class _DataFollowsDevice:
    """`tensor.data = other` moves a real tensor to other's device; FakeTensor alone would keep its old claim."""

    def __get__(self, tensor: FakeTensor | None, owner: type | None = None) -> object:
        return self if tensor is None else _DATA.__get__(tensor)

    def __set__(self, tensor: FakeTensor, value: torch.Tensor) -> None:
        _DATA.__set__(tensor, value)
        if isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """New tensors are fake; `torch.device("cuda:0")` works as a device argument and as a default device."""
    FakeTensor.data = _DataFollowsDevice()  # type: ignore[assignment]
    # A fake storage has no address: its identity tells views of it from other storages, as an address would.
    torch.UntypedStorage.data_ptr = lambda storage: storage._cdata  # type: ignore[method-assign]
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        del FakeTensor.data, torch.UntypedStorage.data_ptr
