"""Flags shared by a GPU, this process and a watchdog process: no wait outlives its deadline, whatever happens here.

A graph that waits on a flag can only be released by a write to it. This process may be blocked in a CUDA call that
holds the interpreter lock, so the one that keeps the deadline is another process, forked before CUDA starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from types import TracebackType
from typing import Self

from tests.gpu.step_chain import FAILED

PAGE = 4096
_POLL_S = 0.005
_STRIDE = 8
"""int64 words between two fields: each has a cache line of its own."""
_FIELDS = ("ids_ready", "rows_ready", "deadline_ns", "fired", "stop", "served")


class Flags:
    """Six int64 words in shared memory.

    ids_ready: the graph sets 1, the host takes it back. rows_ready: the host sets READY or FAILED, the graph takes it
    back. deadline_ns: CLOCK_MONOTONIC at which the watchdog sets rows_ready to FAILED, 0 for none. fired: how often it
    did. stop: ends a serving thread. served: steps that it served.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE)
        self._words = (ctypes.c_int64 * (PAGE // 8)).from_buffer(self._memory)
        self.base = ctypes.addressof(self._words)

    def address(self, field: str) -> int:
        """Return the host address of a field."""
        return self.base + 8 * _STRIDE * _FIELDS.index(field)

    def get(self, field: str) -> int:
        return self._words[_STRIDE * _FIELDS.index(field)]

    def set(self, field: str, value: int) -> None:
        self._words[_STRIDE * _FIELDS.index(field)] = value

    def clear(self) -> None:
        for field in _FIELDS:
            self.set(field, 0)

    def arm(self, seconds: float) -> None:
        """Let the watchdog fail the running wait after `seconds`."""
        self.set("deadline_ns", time.monotonic_ns() + int(seconds * 1e9))

    def disarm(self) -> int:
        """Call the deadline off; return how often the watchdog has fired so far."""
        self.set("deadline_ns", 0)
        return self.get("fired")


class Watchdog:
    """The watching process; a context manager. Enter it before anything starts CUDA or a thread.

    After `limit_s` it fails every wait for two seconds and then kills its parent: the script never hangs.
    """

    def __init__(self, flags: Flags, limit_s: float) -> None:
        self._flags = flags
        self._limit_s = limit_s
        self.pid = 0

    def __enter__(self) -> Self:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._watch(parent)
            finally:
                os._exit(0)
        return self

    def _watch(self, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        flags, end = self._flags, time.monotonic() + self._limit_s
        while time.monotonic() < end:
            if os.getppid() != parent:
                return
            deadline = flags.get("deadline_ns")
            if deadline and time.monotonic_ns() >= deadline:
                flags.set("deadline_ns", 0)
                flags.set("fired", flags.get("fired") + 1)
                flags.set("rows_ready", FAILED)
            time.sleep(_POLL_S)
        for _ in range(2000):
            flags.set("rows_ready", FAILED)
            flags.set("stop", 1)
            time.sleep(0.001)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
