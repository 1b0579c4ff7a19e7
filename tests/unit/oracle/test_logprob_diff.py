"""The command line: exit codes, files kept, and what a user reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from fake_sglang import FakeServer

from q4kit.oracle import recording as recordings

TOOL = Path(__file__).resolve().parents[3] / "tools" / "logprob_diff.py"
SMALL = ["--scored", "60", "--decode-tokens", "7", "--top", "5", "--max-prompt-tokens", "100", "--quiet"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("logprob_diff", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool: ModuleType, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the tool and gives (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = tool.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def reference(run, server: FakeServer, tmp_path: Path) -> Path:
    path = tmp_path / "ref.jsonl.gz"
    code, out, _ = run("record", "--base-url", server.base_url, "--out", path, *SMALL)
    assert code == 0
    assert "positions" in out
    return path


def test_record_writes_its_report_as_json(run, server: FakeServer, tmp_path: Path) -> None:
    path, result = tmp_path / "ref.jsonl.gz", tmp_path / "record.json"
    code, out, _ = run("record", "--base-url", server.base_url, "--out", path, "--json", result, *SMALL)
    assert code == 0
    data, kept = json.loads(result.read_text()), recordings.read(path)
    assert data["complete"] is True
    assert data["positions"] == {"prefill": 60, "decode": 60}
    assert data["facts"]["content"] == kept.content_hash()
    assert data["provenance"] == kept.provenance
    assert kept.content_hash() in out


def test_record_prints_json_only_for_a_dash(run, server: FakeServer, tmp_path: Path) -> None:
    code, out, _ = run("record", "--base-url", server.base_url, "--out", tmp_path / "r.jsonl", "--json", "-", *SMALL)
    assert code == 0
    assert json.loads(out)["title"] == "logprob_diff record"


def test_the_same_server_is_equivalent(run, server: FakeServer, reference: Path) -> None:
    code, out, _ = run("compare", reference, "--base-url", server.base_url, "--quiet")
    assert code == 0
    assert "** EQUIVALENT **  bit-identical" in out


def test_a_noisy_server_without_a_floor_is_inconclusive(run, server: FakeServer, reference: Path) -> None:
    server.noise = 1e-3
    code, out, _ = run("compare", reference, "--base-url", server.base_url, "--quiet")
    assert code == 3
    assert "** INCONCLUSIVE **  no floor was given" in out


def test_a_changed_server_is_different_against_its_floor(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    server.noise, server.run = 1e-3, 0
    floor = tmp_path / "floor.jsonl.gz"
    paths = [reference]
    for number in range(1, 4):
        server.run = number
        paths.append(tmp_path / f"run{number}.jsonl.gz")
        assert run("record", "--base-url", server.base_url, "--like", reference, "--out", paths[-1], "--quiet")[0] == 0
    code, out, _ = run("floor", *paths[1:], "--out", floor)
    assert code == 0
    assert "Largest difference between two runs" in out
    server.noise, server.run = 0.05, 9
    result = tmp_path / "r.json"
    code, out, _ = run(
        "compare", paths[1], "--base-url", server.base_url, "--floor", floor, "--json", result, "--quiet"
    )
    assert code == 1
    assert "** DIFFERENT **" in out
    data = json.loads(result.read_text())
    assert data["verdict"] == "DIFFERENT"
    assert data["seed_policy"].keys() == {"prefill", "decode"}
    assert "flips: near-ties  flips: real" in out
    for leg in data["legs"].values():
        places = [place["flips"] for name, place in leg["bins"].items() if name.startswith("prompt")]
        for kind in ("near_tie", "real"):
            assert sum(place[kind] for place in places) == leg["flips"][kind]
    assert sum(leg["flips"]["real"] for leg in data["legs"].values()) > 0
    assert data["provenance"]["reference"]["model"]["name"] == "fake"


OPENAI = ["--backend", "openai", "--no-decode", *SMALL]


def test_a_server_that_does_not_report_cached_tokens_is_usable_and_said_so(
    run, server: FakeServer, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.jsonl.gz" for name in "abc"]
    for path in paths:
        code, out, _ = run("record", "--base-url", server.base_url, "--out", path, *OPENAI)
        assert code == 0
        assert "[warn: recording: the server did not say for 6 of 6 items" in out
    code, out, _ = run("compare", *paths[:2])
    assert code == 0
    assert "** EQUIVALENT **" in out
    for side in ("reference", "candidate"):
        assert f"[warn: {side}: the server did not say for 6 of 6 items" in out
    code, out, _ = run("floor", *paths, "--out", tmp_path / "f.jsonl")
    assert code == 0
    assert "[warn: run 2: the server did not say for 6 of 6 items" in out
    _, out, _ = run("compare", *paths[:2], "--floor", tmp_path / "f.jsonl")
    assert "[warn: 3 of the floor's 3 runs do not say that nothing was cached]" in out


def test_a_server_that_reports_no_cached_tokens_at_0_needs_no_warning(run, server: FakeServer, tmp_path: Path) -> None:
    server.spoil = lambda payload, answer: answer["usage"].update(prompt_tokens_details={"cached_tokens": 0})
    result = tmp_path / "r.json"
    code, out, _ = run(
        "record", "--base-url", server.base_url, "--out", tmp_path / "a.jsonl", "--json", result, *OPENAI
    )
    assert code == 0
    assert "warn:" not in out
    assert json.loads(result.read_text())["cache_unknown"] == 0


def test_saving_keeps_the_candidate(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    saved = tmp_path / "c.jsonl.gz"
    run("compare", reference, "--base-url", server.base_url, "--save", saved, "--quiet")
    code, _, _ = run("compare", reference, saved)
    assert code == 0


def test_json_on_stdout_is_only_json(run, server: FakeServer, reference: Path) -> None:
    _, out, _ = run("compare", reference, "--base-url", server.base_url, "--json", "-", "--quiet")
    assert json.loads(out)["verdict"] == "EQUIVALENT"


def test_a_server_that_is_down_is_exit_4(run, reference: Path) -> None:
    code, _, err = run("compare", reference, "--base-url", "http://127.0.0.1:9", "--quiet")
    assert code == 4
    assert "remedy: Is the server up" in err or "unknown" in err


def test_a_server_that_dies_midway_is_exit_4_and_keeps_the_part(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    server.fail_after = len(server.requests) + 3
    part = tmp_path / "part.jsonl.gz"
    code, _, err = run("record", "--base-url", server.base_url, "--like", reference, "--out", part, "--quiet")
    assert code == 4
    assert "error: " in err
    kept = recordings.read(part)
    assert (len(kept.results), kept.complete) == (3, False)
    code, _, err = run("compare", reference, part)
    assert code == 3
    assert "the candidate is a partial recording" in err


def test_ctrl_c_is_exit_130_and_keeps_the_part(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    count = len(server.requests)

    def stop(payload: object, answer: object) -> None:
        if len(server.requests) == count + 3:
            import _thread

            _thread.interrupt_main()

    server.spoil = stop
    part = tmp_path / "part.jsonl.gz"
    code, _, err = run("record", "--base-url", server.base_url, "--like", reference, "--out", part, "--quiet")
    assert code == 130
    assert "interrupted" in err
    assert recordings.read(part).reason == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "REF"], "compare needs one candidate"),
        (["compare", "REF", "REF", "--base-url", "http://127.0.0.1:9"], "compare needs one candidate"),
        (["compare", "none.jsonl", "REF"], "none.jsonl: no such file"),
        (["compare", "REF", "REF", "--tolerance", "-1"], "--tolerance -1.0: must be a number of nats >= 0"),
        (["compare", "REF", "REF", "--tolerance", "nan"], "must be a number of nats >= 0"),
        (["floor", "REF", "--out", "f.jsonl"], "1 recording: a floor needs at least 2"),
        (["floor", "REF", "--out", "f.jsonl", "--restart-cmd", "true"], "--restart-cmd needs --base-url"),
        (["selftest", "--trials", "5"], "at least 100"),
    ],
)
def test_wrong_usage_is_exit_2_with_its_reason(run, reference: Path, arguments: list[str], message: str) -> None:
    code, _, err = run(*(str(reference) if each == "REF" else each for each in arguments))
    assert code == 2
    assert message in err


def test_a_restart_command_that_fails_is_exit_4(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    code, _, err = run(
        "floor", "--base-url", server.base_url, "--like", reference, "--runs", "2", "--restart-cmd", "exit 7",
        "--out", tmp_path / "f.jsonl.gz", "--quiet",
    )  # fmt: skip
    assert code == 4
    assert "restart command ended with 7" in err


def test_floor_measures_its_own_runs(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "f.jsonl.gz"
    code, out, _ = run(
        "floor", "--base-url", server.base_url, "--like", reference, "--runs", "2", "--restart-cmd", "true",
        "--out", out_path, "--quiet",
    )  # fmt: skip
    assert code == 0
    assert "floor is exactly zero" in out
    code, out, _ = run("compare", reference, reference, "--floor", out_path)
    assert code == 0


def test_markdown_is_written_on_request(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.md"
    run("compare", reference, "--base-url", server.base_url, "--markdown", path, "--quiet")
    assert path.read_text().startswith("## logprob_diff compare\n\n**EQUIVALENT**")
