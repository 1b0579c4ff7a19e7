"""What torch itself cannot do without a CUDA driver, and SGLang asks for without checking."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def install() -> None:
    """Install all shims; nothing happens where CUDA works."""
    if torch.cuda.is_available():
        return
    # ScheduleBatch.prepare_for_decode pins the GDN track mask without asking is_pin_memory_available().
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    # Qwen4ExpPLELayer makes a stream when its table is offloaded, and takes None for "no prefetch".
    torch.cuda.Stream = _NoStream  # type: ignore[misc, assignment]
    _make_pinned_table_pageable()


def _pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor as it is: page-locking only matters to a DMA engine."""
    return tensor


class _NoStream:
    """Constructing a stream gives None. A class, so that isinstance checks against torch.cuda.Stream still
    work.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return None


def _make_pinned_table_pageable() -> None:
    """Let `--ple-offload-backend pinned` allocate its table in pageable memory.

    `allocate_ple_host_table` calls `torch.empty(pin_memory=True)`, which needs a driver. Only that argument
    is dropped, and only inside this one function, so it also holds for a patched tree that allocates in
    another way. The host copy is what the backend is about; whether its pages are locked cannot be seen
    without a device.
    """
    from sglang.srt.models import qwen4_exp_ple_table as table

    original = table.allocate_ple_host_table

    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        with _pageable_empty():
            return original(*args, **kwargs)

    table.allocate_ple_host_table = allocate


@contextmanager
def _pageable_empty() -> Iterator[None]:
    """Make `torch.empty` ignore `pin_memory` for the duration of the block."""
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        result: torch.Tensor = original(*args, **kwargs)
        return result

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = original
