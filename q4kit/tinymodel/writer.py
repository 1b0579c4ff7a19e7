"""Write a checkpoint folder: all of it, or nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.tinymodel.options import Options, model_config, processor_configs
from q4kit.tinymodel.tensors import TensorPlan, plan_tensors
from q4kit.tinymodel.tokenizer import write_tokenizer

ARGS_FILE = "generation_args.json"
_RESERVE = 64 << 20
"""Bytes left free on the disk: file system metadata, tokenizer, configuration."""


@dataclass(frozen=True)
class Generated:
    """What was written."""

    path: Path
    parameters: int
    tensors: int
    nbytes: int
    files: int


def generate(
    out: Path, options: Options, *, force: bool = False, progress: Callable[[int, int], None] | None = None
) -> Generated:
    """Write the checkpoint that `options` describe to the folder `out`; `progress(bytes_done, bytes_total)`.

    The files are written to a temporary folder next to `out` which is renamed at the end, so that `out` is
    either complete or as it was. The same options give the same bytes (for the same tokenizers and
    transformers versions).

    Raises UsageError if `out` holds files and `force` is not given; EnvironmentFault if the disk is (or gets)
    full.
    """
    out = Path(os.path.abspath(out))
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder", remedy="give a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise UsageError(f"{out} is not empty", remedy="give another folder, or --force to replace it")
        if not (out / "config.json").is_file():
            raise UsageError(
                f"{out} does not look like a checkpoint (no config.json): --force would delete it",
                remedy="empty it yourself, or give another folder",
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        result = _write(partial, options, progress or (lambda done, total: None))
        partial.chmod(0o755)
        _replace(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if _is_disk_full(error):
            raise EnvironmentFault(
                f"the disk of {out.parent} is full; nothing was left behind",
                remedy="free space, or generate a smaller model (--layers, --experts, --table-rows)",
            ) from error
        raise
    return Generated(out, *result)


def _write(folder: Path, o: Options, progress: Callable[[int, int], None]) -> tuple[int, int, int, int]:
    """Write every file into `folder`; return parameters, tensors, bytes and files."""
    config = model_config(o, write_tokenizer(folder))
    plans = list(plan_tensors(config, o))
    total = sum(plan.nbytes for plan in plans)
    free = shutil.disk_usage(folder).free
    if total + _RESERVE > free:
        raise EnvironmentFault(
            f"the checkpoint needs {total / 1e9:.2f} GB, {folder.parent} has {free / 1e9:.2f} GB free",
            remedy="free space, or generate a smaller model (--layers, --experts, --table-rows)",
        )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": o.eos_token_id, "pad_token_id": 0})
    for name, content in processor_configs().items():
        _write_json(folder / name, content)
    _write_json(folder / ARGS_FILE, o.to_json())
    files = _write_tensors(folder, pack(plans, o.max_shard_size), total, progress)
    return sum(math.prod(plan.shape) for plan in plans), len(plans), total, files


def pack(plans: Iterable[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    """Return the tensors in order, cut into files of at most `max_bytes` (a larger tensor gets its own
    file).
    """
    files: list[list[TensorPlan]] = []
    room = 0
    for plan in plans:
        if not files or plan.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(plan)
        room -= plan.nbytes
    return files


def _write_tensors(
    folder: Path, files: list[list[TensorPlan]], total: int, progress: Callable[[int, int], None]
) -> int:
    """Write the safetensors files and their index; one file's tensors are in memory at a time."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    done = 0
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for number, plans in enumerate(files, 1):
            file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            made = pool.map(lambda plan: plan.make(), plans)
            save_file({p.name: t for p, t in zip(plans, made, strict=True)}, folder / file_name, {"format": "pt"})
            (folder / file_name).chmod(0o644)  # safetensors creates it readable by its owner alone
            weight_map.update((plan.name, file_name) for plan in plans)
            done += sum(plan.nbytes for plan in plans)
            progress(done, total)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    return len(files)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; an existing `out` is moved aside first and deleted last."""
    if not out.exists():
        partial.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    out.rename(old / "model")
    try:
        partial.rename(out)
    except BaseException:
        (old / "model").rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _is_disk_full(error: BaseException) -> bool:
    """Return whether `error` is ENOSPC or EDQUOT; safetensors reports it only as text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "os error 28" in str(error) or "No space left on device" in str(error)
