"""Starts that come to nothing: a stop before health, a server that dies, one that hangs. Real processes, no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from q4kit.errors import EnvironmentFault
from q4kit.server.processes import members
from q4kit.serving.run import StopRequested, _code, _context, exclusive, warm_up
from tests.fakes.adversary import Adversary, Reply

FAKE = Path(__file__).resolve().parents[1] / "launch" / "fake_server.py"
DRIVER = """
import signal, sys
from pathlib import Path
from q4kit.errors import Q4Error
from q4kit.serving.run import Plan, catch_signals, serve

signal.signal(signal.SIGINT, signal.default_int_handler)
catch_signals()
folder = Path(sys.argv[1])
plan = Plan(
    model=folder / "model", python=str(folder / "python"), device="cpu", flags=sys.argv[4:], env={}, host="127.0.0.1",
    port=int(sys.argv[2]), prefix=(), timeout_s=float(sys.argv[3]), log=folder / "log",
    environment=folder / "environment.json", smoke_json=folder / "smoke.json",
)
try:
    code = serve(plan, lambda text: print(text, flush=True), lambda seconds, line: print("waiting", flush=True))
except Q4Error as error:
    print(error.render())
    code = error.exit_code
raise SystemExit(code)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return tmp_path


def start(folder: Path, mode: str, timeout: float = 60, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    from q4kit.server.launch import _free_port

    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), str(_free_port()), str(timeout), *flags],
        env={**os.environ, "FAKE_MODE": mode, "FAKE_STATE": str(folder / "state")},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def group(folder: Path) -> int:
    """Return the fake server's process group; its first line is awaited whole, not only the file."""
    state = folder / "state"
    deadline = time.monotonic() + 30
    while not (state.exists() and "\n" in state.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(json.loads(state.read_text().splitlines()[0])["pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_health_ends_everything(folder: Path, number: signal.Signals) -> None:
    running = start(folder, "hang")
    server = group(folder)
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting\n"
    running.send_signal(number)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"stopped by signal {number.value} before the server was up" in output
    assert members(server) == []
    assert not (folder / "environment.json").exists()


def test_a_server_that_dies_at_start_is_a_fault_with_its_last_words(folder: Path) -> None:
    running = start(folder, "die")
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 4
    assert "out of unobtainium" in output
    assert members(group(folder)) == []


def test_a_server_without_a_chat_route_is_never_declared_ready(folder: Path) -> None:
    running = start(folder, "serve")
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 4
    assert "ready" not in output
    assert "healthy after" in output
    assert members(group(folder)) == []


def test_the_key_of_the_server_is_shown_to_it_from_the_first_request_on(folder: Path) -> None:
    running = start(folder, "serve", 20, ("--api-key", "s3cret"))
    output, _ = running.communicate(timeout=60)
    assert "healthy after" in output
    seen = [json.loads(line) for line in (folder / "state.seen").read_text().splitlines()]
    assert ["/generate", "Bearer s3cret"] in seen
    assert ["/generate", None] not in seen


def test_status_codes_are_those_of_a_shell() -> None:
    assert [_code(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert str(StopRequested(15)) == "signal 15"


@pytest.mark.parametrize(
    ("context", "lengths"), [(None, (16, 300, 700)), (708, (16, 300, 700)), (707, (16, 300)), (307, (16,)), (20, ())]
)
def test_warm_up_prompts_fit_the_context(context: int | None, lengths: tuple[int, ...]) -> None:
    server = Adversary()
    answer = {"text": "x", "meta_info": {"finish_reason": {"type": "length", "length": 8}}}
    server.handlers["/generate"] = lambda payload: Reply(answer)
    assert warm_up(server.client(), context) == lengths
    assert tuple(len(sent["input_ids"]) for sent in server.payloads("/generate")) == lengths


def test_the_context_of_the_server_is_the_last_one_given() -> None:
    assert _context(["--context-length=8192", "--context-length", "512"]) == 512
    assert _context(["--max-running-requests=1"]) is None


def test_a_run_folder_belongs_to_one_server(tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"):
        with (
            pytest.raises(EnvironmentFault, match="belongs to a server that runs now") as caught,
            exclusive(tmp_path / "run"),
        ):
            pass
        assert "--run-dir" in caught.value.remedy
        with exclusive(tmp_path / "other"):
            pass
    with exclusive(tmp_path / "run"):
        pass


HANGUP = """
import os, signal
from q4kit.serving.run import StopRequested, catch_signals

catch_signals()
for number in (signal.SIGHUP, signal.SIGTERM):
    try:
        os.kill(os.getpid(), number)
        print("ignored")
    except StopRequested as stop:
        print(stop.number)
"""


@pytest.mark.parametrize(("prefix", "first"), [((), "1"), (("nohup",), "ignored")])
def test_a_hangup_stops_a_server_unless_nohup_forbids_it(prefix: tuple[str, ...], first: str) -> None:
    # SIGHUP may be ignored where the tests run, and is inherited.
    done = subprocess.run(
        ["env", "--default-signal=HUP", *prefix, sys.executable, "-c", HANGUP], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [first, "15"]
