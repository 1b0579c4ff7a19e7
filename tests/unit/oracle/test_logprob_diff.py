"""The command line: exit codes, files kept, and what a user reads."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from fake_sglang import FakeServer

from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle import restart

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


def measured_floor(server: FakeServer, reference: Path, out: Path, command: str, *, runs: int = 2) -> list[object]:
    """Return the arguments of a floor that is measured with restarts."""
    return [
        "floor", "--base-url", server.base_url, "--like", reference, "--runs", runs, "--restart-cmd", command,
        "--out", out, "--quiet",
    ]  # fmt: skip


def test_after_a_failed_restart_the_same_command_goes_on(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    """Run 1 is kept, not measured again, and what was kept goes when the floor is there."""
    out, runs = tmp_path / "f.jsonl.gz", tmp_path / "f.jsonl.gz.run1.jsonl.gz"
    code, _, err = run(*measured_floor(server, reference, out, "exit 7"))
    assert code == 4
    assert "restart command ended with 7: exit 7" in err
    assert "remedy: Run it by hand: it must stop the old server" in err
    assert "Finished runs are kept (f.jsonl.gz.run1.jsonl.gz): the same command goes on after them" in err
    kept, asked = recordings.read(runs), len(server.requests)
    one_run = sum(1 if result.item.leg == "prefill" else 2 for result in kept.results)
    code, _, _ = run(*measured_floor(server, reference, out, "true"))
    assert code == 0
    assert len(server.requests) - asked == one_run
    built = floors.read(out)
    assert built.runs[0]["id"] == floors.recording_id(kept)
    assert len(built.runs) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.jsonl.gz", "ref.jsonl.gz"]


def test_a_run_that_breaks_off_is_kept_as_partial_and_measured_again(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.jsonl.gz"
    server.fail_after = len(server.requests) + 3
    assert run(*measured_floor(server, reference, out, "true"))[0] == 4
    assert len(recordings.read(tmp_path / "f.jsonl.gz.run1.partial.jsonl.gz").results) == 3
    server.fail_after = None
    assert run(*measured_floor(server, reference, out, "true"))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.jsonl.gz", "ref.jsonl.gz"]


def test_a_kept_run_of_other_positions_is_refused(run, server: FakeServer, reference: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "f.jsonl.gz", tmp_path / "other.jsonl.gz"
    assert run(*measured_floor(server, reference, out, "exit 7"))[0] == 4
    smaller = [*SMALL[:1], "40", *SMALL[2:]]
    assert run("record", "--base-url", server.base_url, "--out", other, *smaller)[0] == 0
    code, _, err = run(*measured_floor(server, other, out, "true"))
    assert code == 3
    assert "f.jsonl.gz.run1.jsonl.gz" in err
    assert "delete them to start over" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "message", "remedy"),
    [
        ("./restart.sh --now", "./restart.sh is not found", "like scripts/restart_server.sh (docs/ORACLE.md"),
        ("no-such-program-q4", "no-such-program-q4 is not found", "Name a command that exists"),
        ("A=1 B=2 no-such-program-q4", "no-such-program-q4 is not found", "Name a command that exists"),
        ("  ", "names no program", "Name a command"),
        ("", "names no program", "Name a command"),
        ("sh -c 'exit 0", "No closing quotation", "Close the quote"),
    ],
)
def test_a_restart_command_that_cannot_run_is_said_before_the_first_run(
    run, server: FakeServer, reference: Path, tmp_path: Path, command: str, message: str, remedy: str
) -> None:
    asked = len(server.requests)
    code, _, err = run(*measured_floor(server, reference, tmp_path / "f.jsonl.gz", command))
    assert code == 2
    assert message in err
    assert remedy in err
    assert len(server.requests) == asked


def test_a_restart_script_that_is_not_executable_is_said_so(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    script = tmp_path / "restart.sh"
    script.write_text("#!/bin/sh\n")
    arguments = measured_floor(server, reference, tmp_path / "f.jsonl.gz", str(script))
    code, _, err = run(*arguments)
    assert code == 2
    assert f"{script} is not executable" in err
    assert f"remedy: chmod +x {script}" in err
    script.chmod(0o755)
    assert run(*arguments)[0] == 0


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("scripts/restart_server.sh --profile tiny", "scripts/restart_server.sh"),
        ("VENV=/x 'my script' --port 1", "my script"),
        ("cd /; ./restart.sh", "cd"),
        ("true&&false", "true"),
        ("(cd / && ./restart.sh)", None),
        ("$HOME/restart.sh", None),
    ],
)
def test_the_program_of_a_restart_command(command: str, program: str | None) -> None:
    assert restart.program(command) == program


def test_the_context_of_the_remedy_is_enough_where_the_server_keeps_some_of_it(
    run, server: FakeServer, tmp_path: Path
) -> None:
    """SGLang 0.5.23 refuses prompts from its context - 6 tokens on, which it reports as max_req_input_len."""
    command = ["record", "--base-url", server.base_url, "--out", tmp_path / "r.jsonl", *SMALL[:6], "--no-decode"]

    def serve(context: int) -> tuple[int, str]:
        server.limits = {
            "context_length": context, "max_total_num_tokens": 4 * context, "max_req_input_len": context - 6
        }  # fmt: skip
        code, _, err = run(*command, "--prompts", "ids")
        return code, err

    code, err = serve(2048)
    assert code == 2
    assert "sends 3500 tokens and asks for 1, the server's context_length is 2048 (max_req_input_len 2042)" in err
    assert "a context_length of 3507 or more (scripts/serve.sh: --context 3507)" in err
    assert server.requests == []
    assert serve(3506)[0] == 2
    assert serve(3507)[0] == 0


def test_prompts_that_do_not_fit_are_refused_before_they_are_sent(run, server: FakeServer, tmp_path: Path) -> None:
    """The fake tokenizer gives a token a byte, so the long text is about 20,000 tokens. Each remedy is followed."""
    server.limits = {"context_length": 4096}
    command = ["record", "--base-url", server.base_url, "--out", tmp_path / "r.jsonl", *SMALL[:6], "--quiet"]
    code, _, err = run(*command)
    assert code == 2
    assert server.requests == []
    found = re.search(
        r"prompt 'long' does not fit: (\S+) sends (\d+) tokens and asks for 1, the server's context_length is 4096", err
    )
    assert found
    assert int(found[2]) > 15_000
    assert "remedy: record with --prompts ids, or record with --max-prompt-tokens 4087, or start the server with" in err
    assert f"scripts/serve.sh: --context {int(found[2]) + 3})" in err
    assert run(*command, "--max-prompt-tokens", "4088")[0] == 2
    assert server.requests == []
    for enough in (["--prompts", "ids"], ["--max-prompt-tokens", "4087"]):
        assert run(*command, "--no-decode", *enough)[0] == 0
    assert len(server.requests) == 12


def test_a_remedy_that_does_not_fit_either_is_not_offered(run, server: FakeServer, tmp_path: Path) -> None:
    server.limits = {"context_length": 32768, "max_total_num_tokens": 40}
    code, _, err = run("record", "--base-url", server.base_url, "--out", tmp_path / "r.jsonl", "--prompts", "ids")
    assert code == 2
    assert "the server's max_total_num_tokens is 40" in err
    assert "remedy: start the server with a max_total_num_tokens of" in err
    assert server.requests == []


def test_a_reference_that_does_not_fit_the_candidate_is_refused(run, server: FakeServer, reference: Path) -> None:
    server.limits, asked = {"context_length": 100}, len(server.requests)
    code, _, err = run("compare", reference, "--base-url", server.base_url, "--quiet")
    assert code == 2
    assert "the server's context_length is 100" in err
    assert "remedy: record another reference that fits both servers" in err
    assert len(server.requests) == asked


def test_a_floor_in_place_of_a_recording_is_called_one(
    run, server: FakeServer, reference: Path, tmp_path: Path
) -> None:
    floor = tmp_path / "floor.jsonl.gz"
    assert run(*measured_floor(server, reference, floor, "true"))[0] == 0
    for arguments in (["compare", reference, floor], ["compare", floor, reference], ["floor", reference, floor]):
        code, _, err = run(*arguments, *(["--out", tmp_path / "f2"] if arguments[0] == "floor" else []))
        assert code == 2
        assert f"error: {floor}: a floor, expected a recording" in err
        assert "remedy: A floor is given to compare, after --floor" in err
    code, _, err = run("compare", reference, reference, "--floor", reference)
    assert code == 2
    assert f"error: {reference}: a single recording, expected a floor" in err
    assert "remedy: A floor is made of recordings by: logprob_diff.py floor" in err


def test_a_missing_or_unreadable_file_names_the_command_that_makes_it(run, reference: Path, tmp_path: Path) -> None:
    for arguments, message, remedy in (
        (["compare", "none.jsonl", reference], "none.jsonl: no such file", "logprob_diff.py record --base-url URL"),
        (["compare", reference, tmp_path], f"{tmp_path}: cannot be read (Is a directory)", "logprob_diff.py record"),
        (
            ["compare", reference, reference, "--floor", "none.gz"],
            "none.gz: no such file",
            "logprob_diff.py floor RUN1",
        ),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert message in err
        assert f"remedy: Is the path right? A {'floor' if 'floor' in remedy else 'recording'} is made" in err
        assert remedy in err


def test_a_damaged_gzip_stream_is_exit_3(run, reference: Path, tmp_path: Path) -> None:
    content, damaged = bytearray(reference.read_bytes()), tmp_path / "d.jsonl.gz"
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    code, _, err = run("compare", reference, damaged)
    assert code == 3
    assert f"error: {damaged}: damaged (" in err
    assert "remedy: Record it again." in err


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
