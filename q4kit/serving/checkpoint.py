"""Is a checkpoint on disk complete? Reads config, index and safetensors headers; never a payload."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TABLE_PART = re.compile(r"(.+)\.ngram_embedding\.shard_(\d+)\.weight$")
_HEADER_LIMIT = 100_000_000


@dataclass
class Checkpoint:
    """What was found in a checkpoint folder. `problems`: (what is wrong, remedy)."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    files: int = 0
    nbytes: int = 0
    tensors: int = 0
    table_parts: dict[str, int] = field(default_factory=dict)
    """Tensors of each n-gram table, by its prefix."""
    has_chat_template: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.problems

    @property
    def expert_format(self) -> str:
        """Return the budget's name of the experts' storage format, or "unknown: ..."."""
        return expert_format(self.config)


def inspect(path: Path, table_dir: Path | None = None) -> Checkpoint:
    """Return what is in the folder `path`; with `table_dir` the n-gram table is expected there instead."""
    found = Checkpoint(path)
    if not path.is_dir():
        found.problems.append((f"{path} is not a folder", "download the checkpoint, or correct --model"))
        return found
    config = _json(path / "config.json", found)
    if config is None:
        return found
    found.config = _with_quantization(config, found)
    names = _tensors(found)
    _check_table(found, names, table_dir)
    tokenizer = path / "tokenizer_config.json"
    if not (path / "tokenizer.json").is_file() and not (path / "vocab.json").is_file():
        found.problems.append(("no tokenizer.json or vocab.json", "download the tokenizer files of the checkpoint"))
    template = (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file()
    found.has_chat_template = template or "chat_template" in (_read(tokenizer) or "")
    return found


def _with_quantization(config: dict[str, Any], found: Checkpoint) -> dict[str, Any]:
    """Return `config` with what ModelOpt's hf_quant_config.json says, where the config itself says nothing.

    SGLang looks there too. The file is {"quantization": {"quant_algo": ...}} or flat.
    """
    path = found.path / "hf_quant_config.json"
    text = config.get("text_config") or {}
    if config.get("quantization_config") or text.get("quantization_config") or not path.is_file():
        return config
    declared = _json(path, found)
    if declared is None:
        return config
    nested = declared.get("quantization")
    return config | {
        "quantization_config": {"quant_method": "modelopt"} | (nested if isinstance(nested, dict) else declared)
    }


def expert_format(config: Mapping[str, Any]) -> str:
    """Return the format of the routed experts that a `config.json` declares."""
    text = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if not quantization:
        dtype = str(text.get("dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return "bf16" if dtype in ("bfloat16", "float16", "float32") else f"unknown: dtype {dtype}"
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "").lower()
    declared = json.dumps(quantization).lower()
    if "nvfp4" in declared:
        return "nvfp4"
    if method == "fp8" or quantization.get("quant_algo") == "FP8":
        return "fp8"
    bits = quantization.get("bits") or _group_bits(quantization)
    by_bits = {2: "int2", 4: "int4", 8: "fp8"}
    if method in ("auto-round", "auto_round", "gptq", "awq", "compressed-tensors") and bits in by_bits:
        return by_bits[bits]
    return f"unknown: {method or 'no quant_method'}, {bits or '?'} bits"


def method(config: Mapping[str, Any]) -> str:
    """Return the quantization method that a `config.json` names, "" for none."""
    return str((config.get("quantization_config") or {}).get("quant_method") or "").lower()


def _group_bits(quantization: Mapping[str, Any]) -> int | None:
    for group in (quantization.get("config_groups") or {}).values():
        bits = (group.get("weights") or {}).get("num_bits")
        if bits:
            return int(bits)
    return None


def _tensors(found: Checkpoint) -> set[str]:
    """Return all tensor names of the weight files, checking each file against its own header and the index."""
    index_path = found.path / "model.safetensors.index.json"
    wanted: dict[str, str] = {}
    if index_path.is_file():
        index = _json(index_path, found)
        weight_map = (index or {}).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            found.problems.append((f"{index_path.name} has no weight_map", "download it again"))
            return set()
        wanted = {str(k): str(v) for k, v in weight_map.items()}
        files = sorted(set(wanted.values()))
    elif (found.path / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        found.problems.append(
            ("neither model.safetensors.index.json nor model.safetensors", "download the weight files")
        )
        return set()
    names: set[str] = set()
    for name in files:
        held = _file(found, name)
        if held is None:
            continue
        missing = [t for t, f in wanted.items() if f == name and t not in held]
        if missing:
            found.problems.append(
                (f"{name} lacks {len(missing)} tensors of the index, e.g. {missing[0]}", "download it again")
            )
        names |= held
    found.tensors = len(names)
    return names


def _file(found: Checkpoint, name: str) -> set[str] | None:
    """Return the tensors that one weight file holds, None when it cannot be used (the problem is recorded)."""
    path = found.path / name
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= min(size - 8, _HEADER_LIMIT):
                found.problems.append((f"{name}: {size} bytes, no safetensors header", "download it again"))
                return None
            header = json.loads(stream.read(length))
        ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
    except FileNotFoundError:
        found.problems.append((f"{name} is missing", "download it"))
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found.problems.append((f"{name}: its header cannot be read ({error})", "download it again"))
        return None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        found.problems.append((f"{name}: {size} bytes, its header says {expected}", "download it again"))
        return None
    found.files += 1
    found.nbytes += size
    return {k for k in header if k != "__metadata__"}


def _check_table(found: Checkpoint, names: set[str], table_dir: Path | None) -> None:
    parts: dict[str, set[int]] = {}
    for name in names:
        match = _TABLE_PART.match(name)
        if match:
            parts.setdefault(match[1], set()).add(int(match[2]))
    found.table_parts = {prefix: len(numbers) for prefix, numbers in parts.items()}
    text = found.config.get("text_config") or found.config
    layers = text.get("ple_layer_ids") or []
    if table_dir is not None:
        folders = [table_dir] if len(layers) <= 1 else [table_dir / f"layers.{i - 1}" for i in layers]
        for folder in folders:
            _check_flat(found, folder)
        return
    if len(parts) < len(set(layers)) and not any("is missing" in what for what, _ in found.problems):
        found.problems.append(
            (f"n-gram tables of {len(parts)} layers, the config names {len(set(layers))}", "download the missing files")
        )
    declared = text.get("split_ngram_parts")
    for prefix, numbers in parts.items():
        count = int(declared) if declared else max(numbers) + 1
        gone = sorted(set(range(count)) - numbers)
        if gone:
            found.problems.append(
                (
                    f"{prefix}: {len(gone)} of {count} table parts are missing, e.g. shard_{gone[0]}",
                    "download the missing files",
                )
            )


def _check_flat(found: Checkpoint, folder: Path) -> None:
    description = _json(folder / "ple.json", found)
    if description is None:
        return
    data = folder / str(description.get("file"))
    width = {"float8_e4m3fn": 1, "bfloat16": 2}.get(str(description.get("dtype")), 0)
    try:
        expected = int(description["rows"]) * int(description["dim"]) * width
        size = os.stat(data).st_size
    except (OSError, KeyError, TypeError, ValueError) as error:
        found.problems.append((f"{folder}: no usable flat table ({error})", "tools/ple_table.py export"))
        return
    if size != expected or not expected:
        found.problems.append(
            (f"{data}: {size} bytes, its ple.json says {expected}", "tools/ple_table.py export it again")
        )


def _json(path: Path, found: Checkpoint) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.problems.append((f"{path.name} is missing in {path.parent}", "download it, or correct the path"))
        return None
    except (OSError, ValueError) as error:
        found.problems.append((f"{path.name} cannot be read: {error}", "download it again"))
        return None
    if not isinstance(data, dict):
        found.problems.append((f"{path.name} holds no object", "download it again"))
        return None
    return data


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
