"""The list of planted faults, and what the table makes of the two rules."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from gate_runs import recording

from q4kit import series as series_package
from q4kit import tinymodel
from q4kit.errors import EnvironmentFault, UsageError
from q4kit.gate import faults
from q4kit.oracle import floor as floors
from q4kit.oracle import judge
from q4kit.oracle import recording as recordings

TOOL = Path(__file__).resolve().parents[3] / "tools" / "oracle_faults.py"
FLOOR = floors.build([recording(0), recording(9)])


def found(shift: float) -> faults.Found:
    return faults.Found(faults.Fault("f", "a fault"), judge.compare(recording(0), recording(1, shift=shift), FLOOR))


def test_the_list_of_this_repository_is_read() -> None:
    listed = faults.read_faults(faults.FOLDER / "faults.toml")
    assert len({fault.name for fault in listed}) == len(listed) >= 3
    for fault in listed:
        assert (fault.patch is None) != (fault.tensor == "")
        assert fault.patch is None or fault.patch.is_file()


def test_each_listed_tensor_is_one_of_the_checkpoint_that_the_list_is_for(tmp_path: Path) -> None:
    tinymodel.generate(tmp_path / "mini", replace(tinymodel.PRESETS["mini"], dtype="bfloat16"))
    index = json.loads((tmp_path / "mini" / "model.safetensors.index.json").read_text())
    for fault in faults.read_faults(faults.FOLDER / "faults.toml"):
        if fault.patch is None:
            assert len([name for name in index["weight_map"] if re.search(fault.tensor, name)]) == 1, fault.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[fault]]\nname = "a"\nwhat = "w"\n', "a: give tensor or patch"),
        ('[[fault]]\nname = "a"\nwhat = "w"\ntensor = "t"\npatch = "p"\n', "a: give tensor or patch"),
        ('[[fault]]\nname = "a"\nwhat = "w"\ntensor = "t"\nkind = "burn"\n', "kind 'burn', expected one of noise"),
        ("faults = 1\n", "fault"),
        ('[[fault]]\nname = "../a"\nwhat = "w"\ntensor = "t"\n', "name '../a': expected letters"),
        ('[[fault]]\nname = "restart"\nwhat = "w"\ntensor = "t"\n', "name 'restart': expected letters"),
        ('[[fault]]\nname = "restart-3"\nwhat = "w"\ntensor = "t"\n', "name 'restart-3': expected letters"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "faults.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        faults.read_faults(file)


def test_a_small_fault_passes_the_fixed_rule_and_not_the_oracle() -> None:
    each = found(1e-3)
    assert not each.seed_sees
    assert each.comparison.verdict == judge.DIFFERENT
    assert faults.exit_code([each]) == 0
    data = faults.report("m", [each]).to_json()
    assert (data["verdict"], data["faults"][0]["seed_rule"]) == ("HOLDS", "fine")


def test_a_fault_that_the_fixed_rule_sees_proves_nothing() -> None:
    each = found(0.6)
    assert each.seed_sees
    assert faults.exit_code([each]) == 1


def test_a_fault_that_the_oracle_misses_does_not_hold() -> None:
    assert faults.exit_code([found(0.0)]) == 1
    assert faults.exit_code([]) == 1


FAULT = faults.Fault("f", "a fault", tensor="t")


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> faults.Bench:
    """Return a bench whose recordings are all there, so that it starts no server."""
    made = faults.Bench(tmp_path / "out", model, series_package.load(), "no-python", lambda _: None)
    restarts = {f"restart{number}": 0.0 for number in ("", "-2", "-3", "-4")}
    with made.opened([FAULT]):
        for run, (name, shift) in enumerate({"reference": 0.0, **restarts, "f": 1e-3}.items()):
            recordings.write(recording(run, shift=shift), made.folder / f"{name}.jsonl.gz")
    return made


def test_what_is_recorded_is_judged_again_without_a_server(bench: faults.Bench) -> None:
    assert faults.exit_code(faults.find(bench, [FAULT])) == 0
    assert faults.exit_code(faults.find(bench, [replace(FAULT, what="in other words")])) == 0


def test_the_floor_is_five_runs_and_the_table_says_what_ran(bench: faults.Bench) -> None:
    found = faults.find(bench, [FAULT])
    assert "over 5 runs" in found[0].comparison.evidence
    block = faults.report("m", found, bench.provenance(found)).to_json()["provenance"]
    assert len(block["floor"]) == 5
    assert len({run["id"] for run in block["floor"]}) == 5
    assert set(block["tool"]["trees"]) == {"q4kit", "tools", "tests/gpu"}
    assert block["reference"] == recordings.read(bench.folder / "reference.jsonl.gz").provenance
    assert block["faults"]["f"]["model"] == block["reference"]["model"]


def test_a_larger_floor_is_measured_and_not_made_up(bench: faults.Bench) -> None:
    """The sixth run is not there, so a server would have to be started for it: with no interpreter that fails."""
    larger = faults.Bench(bench.folder, bench.model, bench.series, "no-python", lambda _: None, floor_runs=6)
    with pytest.raises(UsageError, match="no-python"):
        faults.find(larger, [FAULT])
    smaller = faults.Bench(bench.folder, bench.model, bench.series, "no-python", lambda _: None, floor_runs=3)
    assert "over 3 runs" in faults.find(smaller, [FAULT])[0].comparison.evidence
    with pytest.raises(UsageError, match="1 runs for the floor: at least 2"):
        faults.Bench(bench.folder, bench.model, bench.series, "no-python", lambda _: None, floor_runs=1)


@pytest.mark.parametrize(
    "other", [replace(FAULT, relative=0.5), replace(FAULT, kind="roll"), replace(FAULT, rows=(0, 1))]
)
def test_recordings_of_another_definition_of_the_fault_are_refused(bench: faults.Bench, other: faults.Fault) -> None:
    with pytest.raises(UsageError, match=r"f\.fault\.json: measured with another"):
        faults.find(bench, [other])


def test_recordings_with_another_patch_are_refused(bench: faults.Bench, tmp_path: Path) -> None:
    patch = tmp_path / "f.patch"
    patch.write_text("one")
    fault = faults.Fault("g", "a fault", patch=patch)
    with bench.opened([fault]):
        recordings.write(recording(3, shift=1e-3), bench.folder / "g.jsonl.gz")
    patch.write_text("two")
    with pytest.raises(UsageError, match="measured with another patch"):
        faults.find(bench, [fault])


def test_recordings_of_another_model_are_refused(bench: faults.Bench, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(UsageError, match="measured with another model"):
        faults.find(faults.Bench(bench.folder, other, bench.series, "no-python", lambda _: None), [FAULT])


def test_a_fault_that_is_not_recorded_yet_may_change(bench: faults.Bench) -> None:
    (bench.folder / "f.jsonl.gz").unlink()
    with bench.opened([replace(FAULT, relative=0.5)]):
        assert '"relative": 0.5' in (bench.folder / "f.fault.json").read_text()


def test_recordings_without_settings_are_refused(bench: faults.Bench) -> None:
    (bench.folder / "oracle_faults.json").unlink()
    with pytest.raises(UsageError, match=r"f\.jsonl\.gz is there, and no oracle_faults\.json"):
        faults.find(bench, [FAULT])


def test_two_runs_do_not_share_a_folder(bench: faults.Bench) -> None:
    with bench.opened([]), pytest.raises(EnvironmentFault, match="another oracle_faults works here"):
        faults.find(bench, [FAULT])


def test_a_folder_of_somebody_else_is_left_alone(bench: faults.Bench) -> None:
    theirs = bench.folder / "model-f"
    theirs.mkdir()
    (theirs / "mine").write_text("x")
    faults.find(bench, [FAULT])
    assert (theirs / "mine").read_text() == "x"


def test_a_model_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "out"), "--model", str(tmp_path / "nowhere")]
    assert runpy.run_path(str(TOOL))["main"](arguments) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'nowhere'}: no such folder" in error
    assert "remedy: name a checkpoint folder" in error
    assert not (tmp_path / "out").exists()
