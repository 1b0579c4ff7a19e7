"""Plants a known fault in a copy of a checkpoint, so that an instrument can be shown to see it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from q4kit.errors import UsageError


def perturb(source: Path, target: Path, *, tensor: str, relative: float, seed: int = 0) -> dict[str, Any]:
    """Copy checkpoint `source` to `target` with Gaussian noise added to one tensor; return what was changed.

    tensor: regular expression that must match exactly one tensor name of the checkpoint's safetensors files.
    relative: standard deviation of the noise, as a share of the tensor's own standard deviation.
    The result holds name, file, dtype, shape and the root-mean-square change. The target must not exist.
    """
    import torch  # only here: the tools must run where torch is not installed
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    if target.exists():
        raise UsageError(f"{target} exists", remedy="remove it or name another target")
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UsageError(f"no *.safetensors in {source}", remedy="name a checkpoint folder")
    pattern = re.compile(tensor)
    hits: list[tuple[str, Path]] = []
    for file in files:
        with safe_open(file, framework="pt") as handle:
            hits += [(name, file) for name in handle.keys() if pattern.search(name)]  # noqa: SIM118 (not a dict)
    if len(hits) != 1:
        some = ", ".join(name for name, _ in hits[:5])
        raise UsageError(
            f"{len(hits)} tensors match {tensor!r}{': ' + some if some else ''}; exactly one is needed",
            remedy="give a longer regular expression",
        )
    name, file = hits[0]
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    before = tensors[name].float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(before.shape, generator=generator) * before.std() * relative
    after = (before + noise).to(tensors[name].dtype)
    changed = (after.float() - before).pow(2).mean().sqrt().item()
    if changed == 0.0:
        shutil.rmtree(partial)
        raise UsageError(f"noise of {relative} is lost in {tensors[name].dtype}", remedy="use a larger --relative")
    tensors[name] = after
    save_file(tensors, partial / file.name, metadata=metadata)
    record = {
        "source": source.name,
        "tensor": name,
        "file": file.name,
        "dtype": str(after.dtype).removeprefix("torch."),
        "shape": list(after.shape),
        "relative": relative,
        "seed": seed,
        "rms_change": changed,
    }
    (partial / "perturbation.json").write_text(json.dumps(record, indent=2) + "\n")
    partial.rename(target)
    return record
