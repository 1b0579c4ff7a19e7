"""The list of planted faults, and what the table makes of the two rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_runs import recording

from q4kit.errors import UsageError
from q4kit.gate import faults
from q4kit.oracle import floor as floors
from q4kit.oracle import judge

FLOOR = floors.build([recording(0), recording(9)])


def found(shift: float) -> faults.Found:
    return faults.Found(faults.Fault("f", "a fault"), judge.compare(recording(0), recording(1, shift=shift), FLOOR))


def test_the_list_of_this_repository_is_read() -> None:
    listed = faults.read_faults(faults.FOLDER / "faults.toml")
    assert len({fault.name for fault in listed}) == len(listed) >= 3
    for fault in listed:
        assert (fault.patch is None) != (fault.tensor == "")
        assert fault.patch is None or fault.patch.is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[fault]]\nname = "a"\nwhat = "w"\n', "a: give tensor or patch"),
        ('[[fault]]\nname = "a"\nwhat = "w"\ntensor = "t"\npatch = "p"\n', "a: give tensor or patch"),
        ('[[fault]]\nname = "a"\nwhat = "w"\ntensor = "t"\nkind = "burn"\n', "kind 'burn', expected one of noise"),
        ("faults = 1\n", "fault"),
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
