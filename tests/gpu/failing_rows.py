"""Reads of one row of a checkpoint's n-gram table that fail with EIO: which bytes the row is, and what fails them.

The shim (tests/server/eio_shim.c) stands in front of libc in the server, so it reaches the readers that call libc:
pread and its kind, not io_uring and not a mapping.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from q4kit.errors import EnvironmentFault
from q4kit.report import write_atomic

LAYER = "model.language_model.layers.1.ple.ple_embedding."
"""The first PLE layer of every preset."""
SOURCE = Path(__file__).resolve().parents[1] / "server" / "eio_shim.c"


def build_shim(directory: Path) -> Path:
    """Compile the shim into `directory` and return the library; EnvironmentFault without gcc, or where it fails."""
    if shutil.which("gcc") is None:
        raise EnvironmentFault("gcc is not on PATH", remedy="install it: the shim that fails reads is C")
    library = directory / "eio_shim.so"
    done = subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        raise EnvironmentFault(f"gcc cannot build {SOURCE}: {done.stderr[-1000:]}", remedy="install libc's headers")
    return library


def environment(library: Path, control: Path) -> dict[str, str]:
    """Return what a server needs in its environment for `control` to decide which of its reads fail."""
    return {"LD_PRELOAD": str(library), "Q4_EIO_CONTROL": str(control)}


@dataclass(frozen=True)
class Stored:
    """A tensor in its safetensors file; bytes begin <= x < end."""

    path: Path
    shape: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Row:
    """One row in its file, from its first byte to its last."""

    path: Path
    first: int
    last: int


def headers(model: Path) -> dict[str, Stored]:
    """Return where each tensor of a checkpoint is stored."""
    found = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            for name, entry in json.loads(file.read(size)).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    found[name] = Stored(path, entry["shape"], 8 + size + begin, 8 + size + end)
    return found


def load(stored: Stored) -> np.ndarray:
    """Return an int64 tensor of one dimension."""
    return np.fromfile(stored.path, dtype=np.int64, count=stored.shape[0], offset=stored.begin)


class Table:
    """The table of the first PLE layer, as hash head 0 (of two tokens) reads it."""

    def __init__(self, model: Path) -> None:
        self._tensors = headers(model)
        self._multipliers, sizes, offsets = (
            load(self._tensors[LAYER + name])
            for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        )
        self._size, self._offset = sizes[0], offsets[0]

    def rows(self, ids: list[int]) -> list[int]:
        """Return the row ids of tokens 1, 2, ... of a text without an end-of-text token; token 0 has none before it."""
        tokens = np.array(ids, dtype=np.int64)
        with np.errstate(over="ignore"):
            mixed = tokens[1:] * self._multipliers[0] ^ tokens[:-1] * self._multipliers[1]
        return [int(row) for row in mixed % self._size + self._offset]

    def row(self, ids: list[int], position: int) -> int:
        """Return the row id of the token at `position`, 1 or more."""
        return self.rows(ids[position - 1 : position + 1])[0]

    def place(self, row: int) -> Row:
        """Return where a row is stored."""
        rows = self._tensors[f"{LAYER}ngram_embedding.shard_0.weight"].shape[0]
        shard = self._tensors[f"{LAYER}ngram_embedding.shard_{row // rows}.weight"]
        row_bytes = (shard.end - shard.begin) // shard.shape[0]
        first = shard.begin + (row % rows) * row_bytes
        return Row(shard.path, first, first + row_bytes - 1)


def poison(control: Path, row: Row) -> None:
    """Have the reads that touch `row` fail from now on."""
    write_atomic(control, f"/{row.path.name} {row.first} {row.last}\n".encode())


def heal(control: Path) -> None:
    """Have no read fail from now on."""
    control.unlink(missing_ok=True)
