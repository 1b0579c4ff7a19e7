"""Ways to read rows, all behind `read(ids, out)`: the readers under test and two that need no patch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]


class Contender(Protocol):
    """One way to read rows of one flat table."""

    def read(self, ids: Ids, out: Rows) -> None: ...

    def release(self) -> None:
        """Unmap the table's pages, which could not be evicted otherwise."""

    def requests(self) -> int | None:
        """Return the reads issued so far, or None where they are not counted."""

    def close(self) -> None: ...


class Memmap:
    """numpy's memmap with MADV_RANDOM, indexed by the row ids."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        whole: Any = np.memmap(path, dtype=np.uint8, mode="r")
        self._map = whole.reshape(-1, row_bytes)
        self._mmap: mmap.mmap = whole._mmap
        self._mmap.madvise(mmap.MADV_RANDOM)

    def read(self, ids: Ids, out: Rows) -> None:
        # The gather itself, as a caller would write it; its result is the array that the index returns.
        self._last = self._map[ids]

    def release(self) -> None:
        self._mmap.madvise(mmap.MADV_DONTNEED)

    def requests(self) -> int | None:
        return None

    def close(self) -> None:
        del self._map


class SixteenThreads:
    """A pool of 16 threads and one pread a row."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._row_bytes = row_bytes
        self._pool = ThreadPoolExecutor(16)

    def read(self, ids: Ids, out: Rows) -> None:
        size, fd = self._row_bytes, self._fd

        def one(pair: tuple[int, int]) -> None:
            out[pair[0]] = np.frombuffer(os.pread(fd, size, pair[1] * size), dtype=np.uint8)

        for _ in self._pool.map(one, enumerate(ids.tolist())):
            pass

    def release(self) -> None:
        pass

    def requests(self) -> int | None:
        return None

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


class Reader:
    """A reader of the patched SGLang."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def read(self, ids: Ids, out: Rows) -> None:
        self.reader.read_rows(ids, out)

    def release(self) -> None:
        self.reader.release_resident()

    def requests(self) -> int | None:
        return int(self.reader.stats.requests)

    def close(self) -> None:
        self.reader.close()


BASELINES: dict[str, Callable[[Path, int], Contender]] = {"memmap": Memmap, "threads-16": SixteenThreads}
