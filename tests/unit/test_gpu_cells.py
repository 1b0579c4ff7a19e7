"""The GPU matrix covers what it claims to cover, and turns a cell into the arguments SGLang gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.cells import CELLS, Cell, uncovered_pairs
from tests.gpu.inputs import fingerprint, with_modules
from tests.gpu.matrix import kept, update_fault


def test_every_pair_of_settings_is_served_by_a_patched_cell() -> None:
    assert uncovered_pairs() == []


def test_a_missing_pair_is_named() -> None:
    kept = tuple(cell for cell in CELLS if not (cell.budget == "half" and cell.graph == "eager"))
    assert ("budget=half", "graph=eager") in uncovered_pairs(kept)


def test_names_are_unique_and_the_reference_is_resident_and_eager() -> None:
    names = [cell.name for cell in CELLS]
    assert len(names) == len(set(names))
    (reference,) = [cell for cell in CELLS if cell.expect == "reference"]
    assert (reference.budget, reference.graph, reference.ple, reference.tree) == ("0", "eager", "resident", "patched")


def test_a_cell_becomes_server_arguments() -> None:
    cell = Cell("x", "patched", "mid", "half", "breakable", "pinned", extra=("--foo",))
    assert cell.server_args({("mid", "half"): 3}) == [
        "--cuda-graph-backend-decode=breakable",
        "--cuda-graph-backend-prefill=breakable",
        "--ple-offload-embedding",
        "--cpu-offload-gb=3",
        "--foo",
    ]
    assert "--cpu-offload-gb" not in " ".join(cell.server_args({("mid", "half"): 0}))


def test_an_in_place_cell_is_the_offload_cell_with_the_flag() -> None:
    cells = {cell.name: cell for cell in CELLS}
    budgets = {("mid", "half"): 2}
    in_place, copied = (cells[name].server_args(budgets) for name in ("half-full-in-place", "half-full-pinned"))
    assert in_place == [*copied, "--cpu-offload-experts-in-place"]


def test_weights_are_updated_where_the_server_can_be_asked() -> None:
    asked = {cell.name for cell in CELLS if cell.updates_weights}
    assert {"reference", "half-full-pinned", "half-full-in-place", "all-breakable-pinned"} <= asked
    assert not asked & {"nvme-full", "half-full-nvme", "paged-experts", "stock-full-pinned"}


def scored(*logprobs: float) -> list[dict[str, Any]]:
    return [{"prompt": list(logprobs), "ids": [1]}]


@pytest.mark.parametrize(
    ("floor", "update", "fault"),
    [
        (0.0, None, None),
        (0.0, {"success": True, "run": scored(-1.0, -2.0)}, None),
        (0.1, {"success": True, "run": scored(-1.0, -2.2)}, None),
        (0.1, {"success": True, "run": scored(-1.0, -2.3)}, "moved by 0.3"),
        (0.0, {"success": True, "run": scored(-1.0, -2.0001)}, "moved by 0.0001"),
        (0.0, {"success": False, "message": "no", "run": scored(-1.0, -2.0)}, "weight update refused: no"),
    ],
)
def test_an_update_to_the_same_weights_must_not_move_the_answers(
    floor: float, update: dict[str, Any] | None, fault: str | None
) -> None:
    result: dict[str, Any] = {"runs": [scored(-1.0, -2.0), scored(-1.0, -2.0 - floor)]}
    found = update_fault(result | ({"update": update} if update else {}))
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


def test_a_cell_is_kept_for_its_own_inputs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "reference.json"
    assert kept(record, "a") is None
    others: list[dict[str, Any]] = [{"cell": {"inputs": "a"}, "runs": []}, {"cell": {}, "runs": []}]
    for stored in others:
        record.write_text(json.dumps(stored))
        assert kept(record, "b") is None
        assert not record.exists()
        assert json.loads((tmp_path / "reference.json.old").read_text()) == stored
        assert "reference: measured with another tree" in capsys.readouterr().err
    record.write_text(json.dumps({"cell": {"inputs": "a"}}))
    assert kept(record, "a") == {"cell": {"inputs": "a"}}


def test_inputs_are_contents_and_options_not_places(tmp_path: Path) -> None:
    def tree(name: str, text: str) -> Path:
        (tmp_path / name / "sglang").mkdir(parents=True)
        (tmp_path / name / "sglang" / "a.py").write_text(text)
        return tmp_path / name

    def checkpoint(name: str, weights: bytes) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "w.safetensors").write_bytes(weights)
        return tmp_path / name

    one, same, other = tree("one", "x"), tree("same", "x"), tree("other", "y")
    first, second = checkpoint("first", b"1"), checkpoint("second", b"2")
    found = fingerprint([one, first], ["--half-gb", "1"])
    assert found == fingerprint([same, first], ["--half-gb", "1"])
    assert len(
        {
            found,
            fingerprint([other, first], ["--half-gb", "1"]),
            fingerprint([one, second], ["--half-gb", "1"]),
            fingerprint([one, first], ["--half-gb", "2"]),
            fingerprint([one, tmp_path / "none"], ["--half-gb", "1"]),
        }
    ) == 5  # fmt: skip


def test_a_script_stands_for_the_modules_that_it_imports(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json\nfrom tests.gpu.one import x\nfrom tests.gpu import two\n")
    (tmp_path / "one.py").write_text("def late():\n    from tests.gpu.three import y\n")
    (tmp_path / "two.py").write_text("from tests.gpu.one import x\n")
    (tmp_path / "three.py").write_text("from tests.gpu.script import main\n")
    (tmp_path / "other.py").write_text("")
    names = [path.name for path in with_modules(tmp_path / "script.py")]
    assert names == ["script.py", "one.py", "three.py", "two.py"]
    assert with_modules(tmp_path / "none.py") == [tmp_path / "none.py"]
