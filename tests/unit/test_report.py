"""Reports say the same in every form, and files are whole or absent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from q4kit.errors import EnvironmentFault
from q4kit.report import Report, Table, dump_json, format_cell, write_atomic


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (0.0, "0"),
        (0.0123456, "0.01235"),
        (1234.5678, "1235"),
        (3.0, "3"),
        (1.5e-9, "1.500e-09"),
        (-0.25, "-0.25"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        ([1, 2.5], "1, 2.5"),
        ("x", "x"),
    ],
)
def test_cells(value: object, text: str) -> None:
    assert format_cell(value) == text


def table() -> Table:
    return Table(["name", "tok/s"], [("a|b", 1.25), ("c", None)], title="T", notes=["n"])


def test_text_aligns_numbers_to_the_right() -> None:
    assert table().text().splitlines() == ["T", "name  tok/s", "----  -----", "a|b    1.25", "c         -", "n"]


def test_markdown_escapes_pipes() -> None:
    assert "| a\\|b | 1.25 |" in table().markdown()


def test_csv_keeps_full_precision() -> None:
    assert Table(["x"], [(0.1 + 0.2,)]).csv() == "x\n0.30000000000000004\n"


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table().add("alone")


def test_a_report_puts_the_verdict_first_in_every_form() -> None:
    report = Report("t", verdict="SAME", evidence="because", facts=[("k", 1)], blocks=[table()], data={"raw": 0.125})
    assert report.text().splitlines()[2] == "** SAME **  because"
    assert report.markdown().startswith("## t\n\n**SAME**: because")
    data = json.loads(dump_json(report.to_json()))
    assert (data["verdict"], data["raw"], data["facts"]) == ("SAME", 0.125, {"k": 1})


def test_data_cannot_overwrite_the_verdict() -> None:
    with pytest.raises(ValueError, match="verdict"):
        Report("t", data={"verdict": "OTHER"}).to_json()


def test_infinities_become_words_in_json() -> None:
    assert json.loads(dump_json({"high": math.inf})) == {"high": "inf"}


def test_an_unwritable_path_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        write_atomic(tmp_path / "file" / "below.json", b"y")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_atomic(path, b"old")
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(EnvironmentFault, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]
