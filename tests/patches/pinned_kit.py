"""A recording CUDA runtime: what host memory is pinned, in which sizes, and when it is let go.

There is no GPU here, so torch's pinned allocations are pageable memory counted with torch's own rounding to a power of
two; mappings, their residency and their lifetime are real.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host import common

INVALID_VALUE, OUT_OF_MEMORY = 1, 2


def pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Runtime:
    """Records what is pinned: registered ranges, and bytes that torch's own allocator would take."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self.torch_pinned = 0
        self.rc = 0

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802 (the runtime's name)
        # Like the driver: every page must be mapped and resident, and no range may be pinned twice.
        assert resident_bytes(ptr, size) >= size
        assert ptr not in self.registered
        if self.rc == 0:
            self.registered[ptr] = size
        return self.rc

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        assert resident_bytes(ptr, self.registered[ptr]), "unregistered after the memory was unmapped"
        del self.registered[ptr]
        self.unregistered.append(ptr)
        return 0

    def cudaGetErrorString(self, rc: int) -> str:  # noqa: N802
        return {OUT_OF_MEMORY: "out of memory"}.get(rc, "invalid argument")

    @property
    def pinned(self) -> int:
        return self.torch_pinned + sum(self.registered.values())


def resident_bytes(ptr: int, size: int) -> int:
    """Rss of the mappings that ``[ptr, ptr + size)`` lies in, bytes; 0 when it is not mapped."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(x, 16) for x in header.groups())
            inside = start < ptr + size and ptr < end
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def record(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Put a recorder in the place of the CUDA runtime and of torch's pinned allocator."""
    fake = Runtime()

    def counting(allocate: Any) -> Any:
        def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            nbytes = tensor.untyped_storage().nbytes()
            if pin_memory and nbytes:
                fake.torch_pinned += 1 << (nbytes - 1).bit_length()
            return tensor

        return allocated

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(common, "is_cuda", lambda: True, raising=False)
    monkeypatch.delenv("SGLANG_HUGEPAGE_SIZE", raising=False)
    return fake
