"""Tiny Qwen4-Exp checkpoints with a known PLE table, and SGLang's real modules loaded from them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen4
import torch
from qwen4_modules import runtime
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sglang.srt import runtime_context

SHARD = ".ngram_embedding.shard_"
SCALE = 0.0078125
"""Power of two, as a per-tensor scale of an fp8 table often is; bf16 holds it exactly."""


def write(directory: Path, dtype: torch.dtype = torch.bfloat16, **text_overrides: Any) -> Path:
    """Write a checkpoint whose PLE tables hold random bytes of `dtype` (fp8: NaN codes too); return the directory."""
    tiny_qwen4.write_checkpoint(directory, **text_overrides)
    if dtype == torch.float8_e4m3fn:
        config = json.loads((directory / "config.json").read_text())
        config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
        (directory / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(1)
        edit(directory, lambda tensors: tensors.update(_fp8_tables(tensors, generator)))
    return directory


def _fp8_tables(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random fp8 shards in place of the bf16 ones, and one scale a table."""
    new = {}
    for name, shard in tensors.items():
        if SHARD in name:
            codes = torch.randint(0, 256, shard.shape, dtype=torch.uint8, generator=generator)
            new[name] = codes.view(torch.float8_e4m3fn)
            new[name[: name.index(".shard_")] + ".weight_scale"] = torch.tensor([SCALE], dtype=torch.bfloat16)
    return new


def edit(directory: Path, change: Any) -> None:
    """Apply `change` to the dict of tensors of the checkpoint's only file."""
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def grow(directory: Path, rows: dict[int, int]) -> None:
    """Give the table of PLE layer `i` `rows[i]` rows, all of them zero and holes in the only file."""
    shards = {name: tensor for name, tensor in tensors(directory) if SHARD in name}
    (path,) = directory.glob("*.safetensors")
    save_file({name: tensor for name, tensor in tensors(directory) if name not in shards}, path)
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, payload = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    end = len(payload)
    for name, shard in shards.items():
        layer = int(name.split(".layers.")[1].split(".")[0])
        parts = sum(f".layers.{layer}." in other for other in shards)
        shape = [rows[layer] // parts, shard.shape[1]]
        begin, end = end, end + shape[0] * shape[1] * shard.element_size()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    os.truncate(path, 8 + len(text) + end)


def tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the weight loader yields: every tensor under its checkpoint name."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def table(directory: Path, layer: int) -> torch.Tensor:
    """Return the stored table of PLE layer `layer` (0-based), `[rows, dim]`, read by the safetensors library."""
    shards = {
        int(name.split(SHARD)[1].split(".")[0]): tensor
        for name, tensor in tensors(directory)
        if SHARD in name and f".layers.{layer}." in name
    }
    return torch.cat([shards[index].view(torch.uint8) for index in sorted(shards)]).view(shards[0].dtype)


@contextmanager
def loaded(directory: Path, *flags: str) -> Iterator[Any]:
    """Build the model as the loader does for `flags` and load the checkpoint into it."""
    with runtime(directory, *flags) as active:
        text = active.model_config.hf_text_config
        offload = runtime_context.get_exec().offload
        text.ple_offload_embedding = bool(offload.ple_offload_embedding)
        text.ple_offload_backend = offload.ple_offload_backend
        text.ple_offload_reader = getattr(offload, "ple_offload_reader", "auto")
        text.ple_offload_graph_sync = getattr(offload, "ple_offload_graph_sync", "gate")
        text.ple_offload_dir = offload.ple_offload_dir
        model = active.build_model()
        model.load_weights(tensors(directory))
        yield model


def ple_modules(model: Any) -> dict[int, Any]:
    """Return the n-gram embedding module of every PLE layer, by layer index."""
    from sglang.srt.models.qwen4_exp import Qwen4ExpNGramEmbedding

    return {
        int(name.split("layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if isinstance(module, Qwen4ExpNGramEmbedding)
    }


def refuse_row(reader: Any, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every read of `reader` that asks for `row` fail with EIO, as a bad block does."""
    read = reader.read_rows

    def faulty(ids: torch.Tensor, out: torch.Tensor) -> None:
        if row in ids.tolist():
            raise OSError(5, "Input/output error", "shard_0")
        read(ids, out)

    monkeypatch.setattr(reader, "read_rows", faulty)
