"""Plants a known fault in a copy of a checkpoint, so that an instrument can be shown to see it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

from q4kit.errors import EnvironmentFault, UsageError

Kind = Literal["noise", "scale", "roll"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def perturb(
    source: Path,
    target: Path,
    *,
    tensor: str,
    relative: float = 0.05,
    seed: int = 0,
    kind: Kind = "noise",
    rows: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Copy checkpoint `source` to `target` with one tensor damaged; return what was changed.

    tensor: regular expression that must match exactly one tensor name of the checkpoint's safetensors files.
    kind: "noise" adds Gaussian noise, "scale" multiplies by 1 + relative, "roll" moves every row one row on.
    relative: of "noise" the standard deviation as a share of the tensor's own; of "scale" the share added.
    rows: (first, last + 1) along the first dimension; everything else stays. Of a stacked expert weight a row is
        one expert.
    The result holds name, file, dtype, shape and the root-mean-square change. The target must not exist; a
    failure leaves nothing of it.
    """
    import torch  # only here: the tools must run where torch is not installed
    from safetensors import SafetensorError, safe_open
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
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    before = tensors[name].float()
    first, last = (0, before.shape[0]) if rows is None else rows
    if not 0 <= first < last <= before.shape[0]:
        raise UsageError(
            f"rows {first}:{last} of {name}, which has {before.shape[0]}", remedy="give FIRST:LAST+1 inside the tensor"
        )
    damaged = before.clone()
    if kind == "noise":
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(before.shape, generator=generator) * before.std() * relative
        damaged[first:last] += noise[first:last]
    elif kind == "scale":
        damaged[first:last] *= 1 + relative
    else:
        damaged[first:last] = before[first:last].roll(1, dims=0)
    after = damaged.to(tensors[name].dtype)
    changed = (after.float() - before).pow(2).mean().sqrt().item()
    if changed == 0.0:
        lost = "roll of equal rows" if kind == "roll" else f"{kind} of {relative}"
        raise UsageError(f"{lost} is lost in {tensors[name].dtype}", remedy="use a larger --relative, or other rows")
    tensors[name] = after
    record = {
        "source": source.name,
        "tensor": name,
        "file": file.name,
        "dtype": str(after.dtype).removeprefix("torch."),
        "shape": list(after.shape),
        "kind": kind,
        "rows": [first, last],
        "relative": None if kind == "roll" else relative,
        "seed": seed if kind == "noise" else None,
        "rms_change": changed,
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            whole = Path(scratch) / target.name
            shutil.copytree(source, whole)
            save_file(tensors, whole / file.name, metadata=metadata)
            (whole / "perturbation.json").write_text(json.dumps(record, indent=2) + "\n")
            whole.rename(target)
    except (OSError, SafetensorError) as error:
        said = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # the first of the files
        raise EnvironmentFault(
            f"{target} cannot be written: {said}", remedy="a folder on a disk with room for a copy of the checkpoint"
        ) from error
    return record
