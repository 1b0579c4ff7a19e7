"""A checkpoint one of whose table rows cannot be read: the shim that fails the read, and which bytes a row is."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from q4kit.server.client import Client


def compile_shim(directory: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the EIO shim")
    library = directory / "eio_shim.so"
    source = Path(__file__).with_name("eio_shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@dataclass
class Disk:
    """The served server, its checkpoint, and the file that makes a byte range of it fail."""

    client: Client
    model: Path
    control: Path

    def poison(self, ids: list[int], position: int) -> Path:
        """Make the row of hash head 0 for token `position` of `ids` unreadable; return its file."""
        layer = "model.language_model.layers.1.ple.ple_embedding."
        tensors = headers(self.model)
        multipliers, sizes, offsets = (
            load(tensors[layer + name])
            for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
        )
        newest, before = np.int64(ids[position]), np.int64(ids[position - 1])
        with np.errstate(over="ignore"):
            row = int((newest * multipliers[0] ^ before * multipliers[1]) % sizes[0] + offsets[0])
        shard_rows = tensors[f"{layer}ngram_embedding.shard_0.weight"].shape[0]
        shard = tensors[f"{layer}ngram_embedding.shard_{row // shard_rows}.weight"]
        row_bytes = (shard.end - shard.begin) // shard.shape[0]
        first = shard.begin + (row % shard_rows) * row_bytes
        self.control.write_text(f"/{shard.path.name} {first} {first + row_bytes - 1}\n")
        return shard.path

    def heal(self) -> None:
        self.control.unlink(missing_ok=True)


@dataclass(frozen=True)
class Stored:
    path: Path
    shape: list[int]
    begin: int
    end: int


def headers(model: Path) -> dict[str, Stored]:
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
    return np.fromfile(stored.path, dtype=np.int64, count=stored.shape[0], offset=stored.begin)
