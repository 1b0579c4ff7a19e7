"""The two command lines: exit codes, messages, and a clear word where SGLang lacks the reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from q4kit import exit_codes
from q4kit.errors import EnvironmentFault
from q4kit.ple import fio, patched
from q4kit.provenance import series_of
from q4kit.tinymodel import PRESETS, generate

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *args], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", ["ple_table.py", "ple_bench.py"])
def test_help_documents_exit_codes_and_needs_no_sglang(name: str) -> None:
    done = tool(name, "--help")
    assert done.returncode == 0
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize(
    ("name", "args"), [("ple_table.py", []), ("ple_table.py", ["melt"]), ("ple_bench.py", ["--fast"])]
)
def test_usage_errors(name: str, args: list[str]) -> None:
    assert tool(name, *args).returncode == exit_codes.USAGE


def test_missing_reader_is_an_environment_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(patched.importlib, "import_module", absent)
    with pytest.raises(EnvironmentFault, match="no on-disk PLE row reader") as caught:
        patched.rows_module()
    assert "series.py apply" in caught.value.remedy


def test_a_fault_inside_the_reader_is_not_blamed_on_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(patched.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        patched.rows_module()


def test_the_quick_bench_end_to_end(tmp_path: Path) -> None:
    """The real readers and a small random table: every cell is there, and the record says what was measured."""
    try:
        rows = patched.rows_module()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    options = [] if fio.available() else ["--no-fio"]
    options += ["--size-mib", "16", "--rounds", "2", "--cache", str(tmp_path)]
    done = tool("ple_bench.py", "--quick", "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {(line["reader"], line["rows"], line["cache"]) for line in data["lines"]} == {
        (reader, count, cache)
        for reader in ("auto", "memmap", "threads-16")
        for count in (16, 32_768)
        for cache in ("cold", "warm")
    }
    assert data["chunk_warm_over_memmap"] > 0
    assert (data["chunk_cold_over_fio"] is not None) == fio.available()
    block = data["provenance"]
    assert block["machine"]["disks"]["table"]["filesystem"]
    expected = series_of(patched.package(rows))
    assert {name: block["series"][name] for name in expected} == expected
    assert block["sglang"]["version"] == expected["version"]
    assert str(tmp_path) not in done.stdout


def test_one_of_several_tables_is_named(tmp_path: Path) -> None:
    """The real reader and a checkpoint with two tables: the error says how to choose, and each command can."""
    try:
        patched.rows_module()
    except EnvironmentFault as fault:
        pytest.skip(str(fault))
    model, flat = tmp_path / "model", tmp_path / "flat"
    generate(model, PRESETS["mini"])
    for args in (["inspect", model], ["export", model, flat], ["verify", model, flat]):
        done = tool("ple_table.py", *map(str, args))
        assert done.returncode == exit_codes.USAGE
        assert "several n-gram tables" in done.stderr
        assert "--prefix NAME" in done.stderr
    one, other = done.stderr.splitlines()[0].split("choose one: ")[1].split(", ")
    assert tool("ple_table.py", "inspect", str(model), "--prefix", other).returncode == 0
    assert tool("ple_table.py", "export", str(model), str(flat), "--prefix", one).returncode == 0
    for pair in ([model, flat], [flat, model]):
        assert tool("ple_table.py", "verify", *map(str, pair), "--prefix", one).returncode == 0
        assert tool("ple_table.py", "verify", *map(str, pair), "--prefix", other).returncode == exit_codes.NEGATIVE
    wrong = tool("ple_table.py", "inspect", str(model), "--prefix", "elsewhere")
    assert wrong.returncode == exit_codes.USAGE
    assert one in wrong.stderr
