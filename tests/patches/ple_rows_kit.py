"""Tables, readers and faults shared by the tests of the on-disk PLE row reader (not a test file).

Nothing here imports sglang before it is called: on the stock pin a test must fail in its call, at the missing module.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

PREFIX = "model.language_model.layers.1.ple.ple_embedding"
ITEM = {"F8_E4M3": 1, "BF16": 2}


def api() -> ModuleType:
    """Return the reader package; ModuleNotFoundError on the stock pin, which has no on-disk reader."""
    return importlib.import_module("sglang.srt.layers.ple_rows")


def part(name: str) -> ModuleType:
    return importlib.import_module(f"sglang.srt.layers.ple_rows.{name}")


@dataclass(frozen=True)
class Blob:
    """One tensor to write: safetensors dtype name, shape and raw bytes."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def bf16(value: float) -> bytes:
    """Return the two bytes of ``value`` truncated to bfloat16."""
    return struct.pack("<f", value)[2:]


def scale(value: float = 0.0123) -> Blob:
    return Blob("BF16", [1], bf16(value))


def write_safetensors(path: Path, tensors: dict[str, Blob], *, pad: int = 0) -> None:
    """Write tensors in order; ``pad`` spaces in the header move the payload to any alignment."""
    header: dict[str, Any] = {}
    at = 0
    for name, blob in tensors.items():
        header[name] = {"dtype": blob.dtype, "shape": list(blob.shape), "data_offsets": [at, at + len(blob.data)]}
        at += len(blob.data)
    raw = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(b.data for b in tensors.values()))


def random_rows(rows: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    """Random bytes, so NaN codes are among them: equality has to be of bytes."""
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), dtype=np.uint8)


def write_checkpoint(
    folder: Path,
    table: np.ndarray,
    *,
    shards: int = 3,
    dtype: str = "F8_E4M3",
    files: int = 2,
    pad: int = 0,
    index: bool = True,
    scale_blob: Blob | None = None,
    scale_file: str | None = "last",
    prefix: str = PREFIX,
) -> dict[str, str]:
    """Write ``table`` (uint8 [rows, row bytes]) as a sharded checkpoint and return its weight map.

    ``scale_file``: "last" (beside the last shard), "alone" (a file without shards) or None (no scale).
    """
    folder.mkdir(parents=True, exist_ok=True)
    per = -(-len(table) // shards)
    parts = [table[i * per : (i + 1) * per] for i in range(shards)]
    parts = [p for p in parts if len(p)]
    contents: list[dict[str, Blob]] = [{} for _ in range(files)]
    for i, rows in enumerate(parts):
        # A tensor of another kind between shards: payloads do not follow each other.
        contents[i % files][f"model.other_{i}.weight"] = Blob("F32", [3], b"\1" * 12)
        contents[i % files][f"{prefix}.ngram_embedding.shard_{i}.weight"] = Blob(
            dtype, [len(rows), rows.shape[1] // ITEM[dtype]], rows.tobytes()
        )
    blob = scale() if scale_blob is None else scale_blob
    if scale_file == "last":
        contents[-1][f"{prefix}.ngram_embedding.weight_scale"] = blob
    elif scale_file == "alone":
        contents.append({f"{prefix}.ngram_embedding.weight_scale": blob})
    weight_map = {}
    for i, tensors in enumerate(contents):
        name = f"model-{i + 1:05d}-of-{len(contents):05d}.safetensors"
        write_safetensors(folder / name, tensors, pad=pad)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def write_flat(folder: Path, table: np.ndarray, *, dtype: str = "float8_e4m3fn", **changes: Any) -> Path:
    """Write ``table`` as a flat file with its ple.json and return the data file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "table.bin"
    data.write_bytes(table.tobytes())
    description = {
        "format": "ple-flat",
        "version": 1,
        "file": data.name,
        "rows": len(table),
        "dim": table.shape[1] // (1 if dtype == "float8_e4m3fn" else 2),
        "dtype": dtype,
        "weight_scale": 0.5,
    } | changes
    (folder / "ple.json").write_text(json.dumps({k: v for k, v in description.items() if v is not ...}))
    return data


def _native(name: str, direct_min_rows: int | None) -> Callable[..., Any]:
    def make(source: Any, vocab_range: tuple[int, int] | None = None, **options: Any) -> Any:
        options = {"direct_min_rows": direct_min_rows} | options
        reader = part("native").NativeRowReader(source, name, vocab_range, api().RowReaderOptions(**options))
        return reader

    return make


def _python(name: str) -> Callable[..., Any]:
    def make(source: Any, vocab_range: tuple[int, int] | None = None, **options: Any) -> Any:
        return getattr(part("python_readers"), name)(source, vocab_range, api().RowReaderOptions(**options))

    return make


READERS: dict[str, Callable[..., Any]] = {
    "auto": _native("auto", 0),
    "auto-mixed": _native("auto", 256),
    "io_uring-direct": _native("io_uring", 0),
    "io_uring-cached": _native("io_uring", None),
    "pread": _native("pread", None),
    "mmap": _native("mmap", None),
    "python-pread": _python("PythonPreadReader"),
    "python-mmap": _python("PythonMmapReader"),
}


def io_uring_error() -> str:
    """Return why the kernel refuses to set up a ring (a container's seccomp profile often does), or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    io_uring_setup, params = 425, ctypes.create_string_buffer(120)
    fd = libc.syscall(io_uring_setup, 1, params)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


def drop_cache(reader: Any) -> None:
    """Evict the table's files from the page cache; mapped pages have to be unmapped first."""
    reader.release_resident()
    for file in reader.source.files:
        fd = os.open(file.path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read(reader: Any, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the rows as uint8 [len(ids), row bytes], from a poisoned buffer."""
    wanted = np.asarray(ids, dtype=np.int64)
    out = np.full((len(wanted), reader.source.row_bytes), 0xA5, dtype=np.uint8)
    reader.read_rows(wanted, out)
    return out
