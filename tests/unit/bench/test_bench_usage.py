"""The command lines: what they refuse, in which words, with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["bench_speed.py", "needle_test.py", "claims.py"])
def test_help_states_the_exit_codes(name: str) -> None:
    done = tool(name, "--help")
    assert done.returncode == 0
    assert "Exit codes: 0 " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--claim", "nope"), "no claim 'nope' in claims.toml"),
        (("verify", "--claim", "hs-card-decode"), "verify needs a measurement: --result FILE or --base-url URL"),
        (("verify", "--claim", "hs-decode-fp8", "--base-url", "http://127.0.0.1:9"), "states no context length"),
        (
            ("verify", "--claim", "hs-card-decode", "--result", str(ROOT / "README.md")),
            "README.md cannot be read as a bench result",
        ),
        (("run", "-c", "101", "-n", "1"), "needs at least 2 tokens, found 1"),
        (("run", "--page-cache", "cold"), "needs the table's files"),
        (("run", "--domains", "poetry", "--base-url", "http://127.0.0.1:9"), "no such domain 'poetry'"),
        (("run", "--base-url", "localhost:30000"), "has no scheme"),
    ],
)
def test_bench_refuses_bad_usage_in_words(arguments: tuple[str, ...], message: str) -> None:
    done = tool("bench_speed.py", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("claim", "nearest"),
    [
        ("hs-card-decod", "did you mean 'hs-card-decode'"),
        ("HS-Card-Decode", "did you mean 'hs-card-decode'"),
        ("??", ""),
    ],
)
def test_unknown_claim_names_the_nearest_and_the_command_that_lists_them(claim: str, nearest: str) -> None:
    done = tool("bench_speed.py", "verify", "--claim", claim)
    assert done.returncode == 2
    assert f"no claim {claim!r} in claims.toml" in done.stderr
    assert nearest in done.stderr
    assert ("did you mean" in done.stderr) == bool(nearest)
    assert "`python tools/claims.py list` prints the ids" in done.stderr
    assert len(done.stderr) < 300
    assert "hs-card-decode" in tool("claims.py", "list").stdout


def test_unknown_claim_of_a_ledger_of_ones_own_names_that_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "mine.toml"
    ledger.write_text("schema = 1\n")
    done = tool("bench_speed.py", "verify", "--claim", "x", "--ledger", str(ledger))
    assert done.returncode == 2
    assert f"`grep '^id' {ledger}` prints the ids" in done.stderr


def test_table_that_is_not_there_is_an_environment_fault() -> None:
    done = tool("bench_speed.py", "run", "--table", "/nowhere/table.bin", "--page-cache", "cold")
    assert done.returncode == 4
    assert "--table /nowhere/table.bin: no file there" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-l", "100"), "length must lie in 256..262144 tokens, found 100"),
        (("-l", "8192", "-d", "1.5"), "depth must lie in 0..1, found 1.5"),
        (("--grid", "0"), "at least one depth is needed, found 0"),
    ],
)
def test_needle_refuses_bad_usage_in_words(arguments: tuple[str, ...], message: str) -> None:
    done = tool("needle_test.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_shipped_claim_against_a_run_on_another_machine_is_not_comparable(tmp_path: Path) -> None:
    """What most readers will do first: compare their GPU with a published number."""
    sample = {"refusals": [], "decode_rate": 57.5, "page_cache": "unknown"}
    data = {
        "schema": "q4kit.bench/1",
        "partial": False,
        "points": [{"context": 10001, "kind": "filler", "tokens": 200, "samples": [sample] * 5}],
        "provenance": {"device": {"name": "NVIDIA GeForce RTX 3090"}, "model": {"name": "other"}},
    }
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    done = tool("bench_speed.py", "verify", "--claim", "hs-card-decode", "--result", str(path), "--json", "-")
    assert done.returncode == 3, done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "NOT COMPARABLE"
    assert [m["name"] for m in answer["mismatches"]] == ["gpu", "model"]
    done = tool(
        "bench_speed.py", "verify", "--claim", "hs-card-decode", "--result", str(path), "--vary", "gpu", "model"
    )
    assert done.returncode == 0
    assert "** AGREES **" in done.stdout
    assert "verdict under changed conditions: gpu, model" in done.stdout
