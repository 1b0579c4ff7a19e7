"""Triton kernels that set and await a flag in pinned host memory, for drivers without stream memory operations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_flag(address):
    """Store 1 at the int64 host `address`; what the stream did before is visible to the host by then."""
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.int64)), 1)


@triton.jit
def wait_flag(address, status, limit):
    """Wait until the int64 at host `address` is not zero, at most `limit` polls; reset it, store what it was."""
    pointer = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    value = tl.load(pointer, volatile=True)
    polls = 0
    while (value == 0) & (polls < limit):
        value = tl.load(pointer, volatile=True)
        polls += 1
    tl.store(pointer, value * 0)
    tl.store(status, value)
