"""Made-up machines and checkpoint folders for the tests of serving."""

from __future__ import annotations

import json
import struct
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from q4kit.serving.facts import GIB, Disk, Gpu, Machine
from q4kit.serving.shape import PUBLISHED

NVME = Disk("ext4", "nvme0n1p2", False, 500 * GIB)
GOOD = Machine(
    gpu=Gpu("RTX 4090", "580.95.05", 24564, 24210),
    ram_total=128 * GIB,
    ram_available=122 * GIB,
    model_disk=NVME,
    run_disk=NVME,
    series="applied",
    systemd="",
    port=30000,
    port_free=True,
    compilers=("c++", "ninja", "nvcc"),
)
"""A machine of the class 24gb-128ram."""

QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int2": {"quant_method": "auto-round", "bits": 2, "group_size": 128},
}


def machine(**change: Any) -> Machine:
    """Return GOOD with changes."""
    return replace(GOOD, **change)


def config(expert_format: str = "nvfp4") -> dict[str, Any]:
    """Return a config.json of the published sizes."""
    data = tomllib.loads(PUBLISHED.read_text())
    body: dict[str, Any] = {"model_type": "qwen4_exp", "text_config": data["text_config"] | {"split_ngram_parts": 2}}
    quantization = QUANTIZATION[expert_format]
    return body | ({"quantization_config": quantization} if quantization else {})


def write_weights(path: Path, tensors: dict[str, int]) -> None:
    """Write a safetensors file of uint8 tensors of the given sizes."""
    header, offset = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))


TABLE = "model.language_model.layers.1.ple.ple_embedding"


def make_checkpoint(folder: Path, expert_format: str = "nvfp4") -> Path:
    """Return a folder that is a complete checkpoint of the published sizes in everything but its payloads."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(expert_format)))
    files = {
        "model-1.safetensors": {"lm_head.weight": 10, f"{TABLE}.ngram_embedding.shard_0.weight": 4},
        "model-2.safetensors": {"norm.weight": 6, f"{TABLE}.ngram_embedding.shard_1.weight": 4},
    }
    for name, tensors in files.items():
        write_weights(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder
