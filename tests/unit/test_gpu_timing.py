"""Figures of a stream, comparison within rounds, bits, records on disk, and a table that is cold or refused."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import EnvironmentFault, ServerError
from tests.gpu import bits, cold, records
from tests.gpu.timing import Method, compare, paired, spread, step_figures, unique


def test_steps_before_the_warm_up_are_left_out() -> None:
    events = [(0.0, 1), (9.0, 2), (10.0, 3), (10.001, 4), (10.002, 5), (10.006, 7)]
    found = step_figures(events, warmup_tokens=2)
    assert found["steps"] == 4
    assert found["step_us"] == pytest.approx(1500)
    assert found["p50_us"] == pytest.approx(1500)
    assert found["p95_us"] == pytest.approx(2000)


def test_two_kinds_of_steps_show() -> None:
    times = [0.0]
    for number in range(100):
        times.append(times[-1] + (0.004 if number % 10 == 0 else 0.001))
    found = step_figures([(t, n + 1) for n, t in enumerate(times)], 0)
    assert (round(found["p50_us"]), round(found["p95_us"]), round(found["step_us"])) == (1000, 4000, 1300)


def test_a_stream_that_is_too_short_is_refused() -> None:
    with pytest.raises(ServerError, match="1 stream events after 5 tokens"):
        step_figures([(0.0, 5), (1.0, 6)], 5)


def test_texts_repeat() -> None:
    assert unique(7, 100, 500) == unique(7, 100, 500) != unique(8, 100, 500)


METHOD = Method(10, 1, 0, 500)


def sample(session: float, number: int, step_us: float, method: Method = METHOD) -> dict[str, Any]:
    decode = {"step_us": step_us, "p50_us": step_us, "p95_us": step_us}
    return {"session": session, "gpu": None, "round": number, "method": method.to_json(), "decode": decode}


def test_only_rounds_of_one_session_and_method_are_compared() -> None:
    base = [sample(1, 0, 100), sample(1, 1, 200), sample(2, 0, 300)]
    other = [sample(1, 1, 400), sample(3, 0, 1), sample(2, 0, 300, Method(20, 1, 0, 500)), {**sample(1, 0, 1)}]
    del other[3]["decode"]  # refused
    assert [(b["decode"]["step_us"], o["decode"]["step_us"]) for b, o in paired(base, other, METHOD)] == [(200, 400)]
    assert compare(base, other, METHOD)["decode_ratio"]["median"] == 0.5
    assert compare(base, [], METHOD) == {}


def test_the_interval_of_a_median_lies_within_the_ends() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 9.0])
    assert (found["median"], found["min"], found["max"], found["rounds"]) == (3.0, 1.0, 9.0, 5)
    assert 1.0 <= found["bootstrap_95"][0] < 3.0 < found["bootstrap_95"][1] <= 9.0
    assert "bootstrap_95" not in spread([1.0, 2.0])


def answers(*values: float) -> list[dict[str, Any]]:
    return [{"prompt": list(values), "output": [], "ids": [1]}]


def test_bits_are_compared_where_both_servers_repeat_them() -> None:
    steady = (answers(-1.0, -2.0), answers(-1.0, -2.0))
    shaky = (answers(-1.0, -2.5), answers(-1.0, -2.0))
    assert bits.compare(steady, steady) == {"compared": 2, "differ": 0, "unrepeated": 0}
    assert bits.compare(steady, shaky) == {"compared": 1, "differ": 0, "unrepeated": 1}
    moved = (answers(-1.0, -2.0000001), answers(-1.0, -2.0000001))
    assert bits.compare(steady, moved)["first"] == [3, "prompt", 1, -2.0, -2.0000001]
    assert bits.greedy(([1], [1]), ([2], [2])) is False
    assert bits.greedy(([1], [2]), ([2], [2])) is None


def test_the_environment_of_repeatable_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = bits.environment(tmp_path)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(bits.SHIM), str(tmp_path), "/elsewhere"]
    shim = (bits.SHIM / "sitecustomize.py").read_text()
    assert f'VARIABLE = "{bits.VARIABLE}"' in shim
    assert f'MARK = "{bits.MARK.strip()}"' in shim
    log = tmp_path / "log"
    assert bits.replaced(log) == []
    log.write_text(f"x\n[tp0] {bits.MARK}fast_topk\n{bits.MARK}fast_topk\n")
    assert bits.replaced(log) == ["fast_topk"]


def test_a_record_is_written_whole_and_kept_for_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "cell.json"
    assert records.kept(path, "a") is None
    records.save(path, {"inputs": "a", "x": 1})
    assert records.kept(path, "a") == {"inputs": "a", "x": 1}
    assert [file.name for file in path.parent.iterdir()] == ["cell.json"]
    with pytest.raises(TypeError):
        records.save(path, {"inputs": "a", "x": object()})
    assert records.kept(path, "a") == {"inputs": "a", "x": 1}
    assert records.kept(path, "b") is None
    assert (path.parent / "cell.json.old").exists()
    assert "cell: measured with another tree" in capsys.readouterr().err
    assert records.without_error({"error": "e", "full": "f", "x": 1}) == {"x": 1}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table" / "ple_table.bin"
    path.parent.mkdir()
    path.write_bytes(os.urandom(1 << 20))
    (path.parent / "ple.json").write_text("{}")
    return path


def test_pages_that_a_process_maps_are_not_cold(table: Path) -> None:
    assert cold.files_of(table.parent) == [table]
    assert cold.drop([table]) == 0
    with table.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert sum(mapping[offset] for offset in range(0, len(mapping), 4096)) >= 0
        share = cold.drop([table])
    assert share > 0.5
    assert "is resident before decode of round 3; cold is 2% at most" in str(
        cold.refusal("x", "decode of round 3", share)
    )
    assert cold.refusal("x", "decode", 0.02) is None


def test_a_table_of_somebody_else_is_no_cold_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        cold.drop([table])


def test_copies_are_files_of_their_own(table: Path) -> None:
    folder = table.parents[1]
    made = cold.make_copies(folder, ["a", "b"], Path("unused"), Path("unused"))
    inodes = {(path / table.name).stat().st_ino for path in made.values()} | {table.stat().st_ino}
    assert len(inodes) == 3
    assert all((path / table.name).read_bytes() == table.read_bytes() for path in made.values())
    (made["a"] / table.name).write_bytes(b"kept")
    assert cold.make_copies(folder, ["a"], Path("unused"), Path("unused")) == {"a": folder / "a"}
    assert (folder / "a" / table.name).read_bytes() == b"kept"


def test_a_table_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"no flat table of .*nothing"):
        cold.make_copies(tmp_path, ["a"], tmp_path / "nothing", tmp_path)
