"""The planted fault changes exactly one tensor, and bad requests are refused with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.perturb import perturb

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
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


def test_removes_nothing_that_was_there(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "broken.partial"
    other.mkdir()
    (other / "mine").write_text("kept")
    perturb(checkpoint, tmp_path / "broken", tensor=r"layers\.0\.in_proj")
    assert (other / "mine").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "broken.partial", "model"]


@pytest.mark.parametrize("kind", [OSError, safetensors.SafetensorError])
def test_a_write_that_fails_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def full(*_args: object, **_named: object) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(safetensors_torch, "save_file", full)
    with pytest.raises(EnvironmentFault, match=r"broken cannot be written: .*No space left"):
        perturb(checkpoint, tmp_path / "broken", tensor=r"layers\.0\.in_proj")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_refuses_an_existing_target(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        perturb(checkpoint, checkpoint, tensor="in_proj", relative=0.1)


def test_scale_touches_only_the_named_rows(checkpoint: Path, tmp_path: Path) -> None:
    record = perturb(checkpoint, tmp_path / "b", tensor=r"layers\.0\.out_proj", kind="scale", relative=1.0, rows=(3, 5))
    before, after = _all(checkpoint)[record["tensor"]], _all(tmp_path / "b")[record["tensor"]]
    assert torch.equal(after[3:5], before[3:5] * 2)
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[5:], before[5:])
    assert record["rows"] == [3, 5]


def test_roll_moves_rows_and_changes_none(checkpoint: Path, tmp_path: Path) -> None:
    record = perturb(checkpoint, tmp_path / "b", tensor=r"layers\.0\.out_proj", kind="roll")
    before, after = _all(checkpoint)[record["tensor"]], _all(tmp_path / "b")[record["tensor"]]
    assert torch.equal(after[1:], before[:-1])
    assert torch.equal(after[0], before[-1])


@pytest.mark.parametrize("rows", [(5, 5), (0, 9), (-1, 2)])
def test_rows_outside_the_tensor_are_refused(checkpoint: Path, tmp_path: Path, rows: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"which has 8"):
        perturb(checkpoint, tmp_path / "b", tensor=r"layers\.0\.out_proj", rows=rows)
    assert not (tmp_path / "b").exists()
