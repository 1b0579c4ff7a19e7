"""The host's side of a step that waits for its rows: take the ids, read the rows, set the flag."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.gpu.step_chain import FAILED, READY, FlagGate
from tests.gpu.step_watchdog import Flags

ReadRows = Callable[[np.ndarray, np.ndarray], None]
"""(ids int64 [heads], out uint8 [heads, row bytes])."""

NATIVE_SOURCE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
static inline std::atomic<int64_t>& at(int64_t* p) { return *reinterpret_cast<std::atomic<int64_t>*>(p); }
extern "C" void serve(int64_t* ids_ready, int64_t* rows_ready, int64_t* stop, int64_t* served, const int64_t* ids,
                      uint8_t* rows, const uint8_t* table, int64_t heads, int64_t row_bytes) {
  while (!at(stop).load(std::memory_order_relaxed)) {
    if (!at(ids_ready).load(std::memory_order_acquire)) { __builtin_ia32_pause(); continue; }
    at(ids_ready).store(0, std::memory_order_relaxed);
    for (int64_t h = 0; h < heads; h++) std::memcpy(rows + h * row_bytes, table + ids[h] * row_bytes, row_bytes);
    at(served).fetch_add(1, std::memory_order_relaxed);
    at(rows_ready).store(1, std::memory_order_release);
  }
}
"""


class HostServer:
    """Serves step after step from the calling thread; a step is released by it or by the watchdog, never by both."""

    def __init__(self, flags: Flags, ids: np.ndarray, rows: np.ndarray, read: ReadRows, timeout_s: float) -> None:
        self._flags, self._ids, self._rows, self._read = flags, ids, rows, read
        self._timeout_s = timeout_s
        self._gate = FlagGate()
        self.failed: list[int] = []
        """Steps that were released without rows."""

    def serve(self, step: int, pause_s: float = 0.0) -> None:
        """Wait for the ids of `step`, read its rows, release it. `pause_s` seconds between ids and rows, for tests."""
        flags = self._flags
        fired = flags.get("fired")
        flags.arm(self._timeout_s)
        while not flags.get("ids_ready"):
            if flags.get("fired") != fired or flags.get("stop"):
                raise TimeoutError(f"step {step}: no row ids after {self._timeout_s} s")
            time.sleep(0)
        flags.set("ids_ready", 0)
        if pause_s:
            time.sleep(pause_s)
        try:
            self._read(self._ids, self._rows)
            value = READY
        except OSError:
            value = FAILED
        if flags.disarm() != fired:
            # The watchdog released the step: a flag set now would release the next one, on these rows.
            self._gate.claim(step)
            self.failed.append(step)
            return
        if value == FAILED:
            self.failed.append(step)
        if self._gate.claim(step):
            flags.set("rows_ready", value)


class ServingThread:
    """Serves from a Python thread, as a reader thread of a server would."""

    def __init__(self, server: HostServer, flags: Flags, steps: int) -> None:
        self._flags = flags
        self._thread = threading.Thread(target=self._run, args=(server, steps), daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self, server: HostServer, steps: int) -> None:
        try:
            for step in range(steps):
                server.serve(step)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(timeout=60)
        if self.error is not None:
            raise self.error


class NativeThread:
    """Serves warm rows from a C++ loop that polls the flag without the interpreter lock."""

    def __init__(self, library: Path, flags: Flags, ids: np.ndarray, rows: np.ndarray, table: np.ndarray) -> None:
        self._flags = flags
        serve = ctypes.CDLL(str(library)).serve
        serve.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 2
        words = [flags.address(name) for name in ("ids_ready", "rows_ready", "stop", "served")]
        arrays = [array.ctypes.data for array in (ids, rows, table)]
        self._thread = threading.Thread(target=serve, args=(*words, *arrays, len(ids), rows.shape[1]), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._flags.set("stop", 1)
        self._thread.join(timeout=60)
        self._flags.set("stop", 0)


def build_native(folder: Path) -> Path | None:
    """Compile the C++ loop; None where there is no g++."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    source, library = folder / "serve.cpp", folder / "serve.so"
    source.write_text(NATIVE_SOURCE)
    subprocess.run(
        [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=120
    )
    return library
