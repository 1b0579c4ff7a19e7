"""The planted fault changes exactly one tensor, and bad requests are refused with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from q4kit.errors import UsageError
from q4kit.perturb import perturb

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for part in range(2):
        tensors = {
            f"layers.{part}.{kind}.weight": torch.randn(8, 4, generator=generator).to(torch.bfloat16)
            for kind in ("in_proj", "out_proj")
        }
        safetensors_torch.save_file(tensors, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def _all(folder: Path) -> dict[str, object]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in safetensors_torch.load_file(f).items()}


def test_changes_one_tensor_and_keeps_the_rest(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "broken"
    record = perturb(checkpoint, target, tensor=r"layers\.1\.in_proj", relative=0.1)
    before, after = _all(checkpoint), _all(target)
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    assert differing == [record["tensor"]] == ["layers.1.in_proj.weight"]
    spread = before["layers.1.in_proj.weight"].float().std().item()
    assert 0.05 * spread < record["rms_change"] < 0.2 * spread
    assert (target / "config.json").read_text() == "{}"


@pytest.mark.parametrize(("tensor", "found"), [("in_proj", "2 tensors match"), ("absent", "0 tensors match")])
def test_refuses_anything_but_one_match(checkpoint: Path, tmp_path: Path, tensor: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        perturb(checkpoint, tmp_path / "broken", tensor=tensor, relative=0.1)
    assert not (tmp_path / "broken").exists()


def test_refuses_noise_that_rounding_swallows(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is lost in"):
        perturb(checkpoint, tmp_path / "broken", tensor=r"layers\.0\.in_proj", relative=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_refuses_an_existing_target(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        perturb(checkpoint, checkpoint, tensor="in_proj", relative=0.1)
