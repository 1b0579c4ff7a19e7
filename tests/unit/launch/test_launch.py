"""launch() with real processes and sockets: servers that come up, die, hang, lose their port, ignore
SIGTERM.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import ServerError, UsageError
from q4kit.server import launch as launch_module
from q4kit.server.launch import HANG_MARK, ServerProcess, launch

FAKE = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder that passes for an fp32 checkpoint."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Return an executable that runs the fake server whatever module it is asked for."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def start(tmp_path: Path, model: Path, interpreter: Path) -> Callable[..., ServerProcess]:
    """Return launch() bound to the fake interpreter, with a mode."""

    def run(mode: str, **overrides: Any) -> ServerProcess:
        env = {"FAKE_MODE": mode, "FAKE_STATE": str(tmp_path / "state"), **overrides.pop("env", {})}
        settings = {"python": interpreter, "log_path": tmp_path / "log", "timeout_s": 30, **overrides}
        return launch(model, env=env, **settings)

    return run


def states(tmp_path: Path) -> list[dict[str, Any]]:
    """Return what every started fake server wrote about itself."""
    return [json.loads(line) for line in (tmp_path / "state").read_text().splitlines()]


def running(pid: int) -> bool:
    """Return whether `pid` is a living process (a zombie is not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int], seconds: float) -> bool:
    """Return whether all `pids` end within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


def test_healthy_server_is_returned_and_its_whole_group_ends(start: Any, tmp_path: Path) -> None:
    with start("serve") as server:
        (state,) = states(tmp_path)
        assert server.pid == state["pid"]
        assert server.returncode is None
        assert f"--port {server.port}" in " ".join(state["argv"])
        assert running(state["child"])
    assert not running(state["pid"])
    assert not running(state["child"])
    server.stop()  # a second stop does nothing


def test_dying_server_is_noticed_at_once_with_its_last_words(start: Any, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ServerError) as caught:
        start("die", timeout_s=60)
    assert time.monotonic() - begun < 15
    assert "exited with status 3" in str(caught.value)
    assert "out of unobtainium" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert "out of unobtainium" in (tmp_path / "log").read_text()
    (state,) = states(tmp_path)
    assert not running(state["child"])


def test_hanging_server_is_ended_after_the_timeout(start: Any, tmp_path: Path) -> None:
    lines: list[tuple[float, str]] = []
    with pytest.raises(ServerError, match="not healthy after 3 s") as caught:
        start("hang", timeout_s=3, progress=lambda seconds, line: lines.append((seconds, line)))
    assert "fake server starts" in str(caught.value)
    assert lines
    assert all(0 < seconds < 10 for seconds, _ in lines)
    (state,) = states(tmp_path)
    assert not running(state["pid"])
    assert not running(state["child"])


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working folder of a test whose processes may write core files of any size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_a_server_that_hangs_without_a_word_says_where(start: Any, tmp_path: Path, cores: Path) -> None:
    with pytest.raises(ServerError, match="not healthy after 3 s") as caught:
        start("stuck", timeout_s=3)
    text, log = str(caught.value), (tmp_path / "log").read_text()
    (state,) = states(tmp_path)
    assert HANG_MARK in text
    assert text.endswith(log.strip())  # the log was empty, and nothing of what was added is lost
    for pid in (state["pid"], state["child"]):
        (line,) = re.findall(rf"^pid {pid}: .*", text, re.MULTILINE)
        assert re.match(rf"pid {pid}: state S, cpu \d+\.\d s, threads 1, wchan \S+: \S*python\S* ", line), line
        assert not running(pid)
    assert re.search(r"^pid \d+: state S, .*, no faulthandler: sleep 600$", text, re.MULTILINE)
    of_child, of_server = text.split("\nstacks of pid ")[1:]
    for stack, pid, function in (
        (of_child, state["child"], "child_waits_for_its_parent"),
        (of_server, state["pid"], "wait_for_a_lock_that_never_comes"),
    ):
        assert stack.startswith(f"{pid}:\nFatal Python error: Aborted\n")
        assert f" in {function}\n" in stack
    assert list(cores.iterdir()) == []


def test_a_long_dump_is_cut_in_the_error_and_whole_in_the_log(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "_DUMP_LINES", 4)
    monkeypatch.setattr(launch_module, "_DUMP_WIDTH", 20)
    with pytest.raises(ServerError) as caught:
        start("stuck", timeout_s=2)
    _, found, after = (tmp_path / "log").read_text().partition("\nstacks of pid")
    whole = [line[:20] for line in (found + after).splitlines()]
    assert len(whole) > 8
    more = f"({len(whole) - 4} more lines in the log)"
    assert str(caught.value).splitlines()[-5:] == [*whole[:2], more, *whole[-2:]]


def test_what_the_log_said_comes_before_what_the_processes_do(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        start("hang", timeout_s=2)
    for text in (str(caught.value), (tmp_path / "log").read_text()):
        assert 0 <= text.find("fake server starts") < text.find(HANG_MARK) < text.find(" in serve_forever")


@pytest.mark.parametrize("abort", ["ignore", "handle"])
def test_a_server_that_does_not_end_at_sigabrt_is_stopped(start: Any, tmp_path: Path, abort: str, cores: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ServerError) as caught:
        start("stuck", timeout_s=2, env={"FAKE_ABORT": abort})
    assert time.monotonic() - begun < 10
    (state,) = states(tmp_path)
    (line,) = re.findall(rf"^pid {state['pid']}: .*", str(caught.value), re.MULTILINE)
    assert ("no faulthandler" in line) == (abort == "ignore")
    assert " in child_waits_for_its_parent" in str(caught.value)
    assert not running(state["pid"])
    assert not running(state["child"])
    if abort == "handle":  # 1 byte: no core file, and none through a core_pattern that is a pipe
        soft, hard = json.loads((tmp_path / "state.aborted").read_text())
        assert (soft, hard) == (0 if hard == 0 else 1, resource.getrlimit(resource.RLIMIT_CORE)[1])


def test_a_server_that_serves_or_ends_by_itself_is_asked_nothing(start: Any, tmp_path: Path) -> None:
    with start("serve") as server:
        pass
    assert server.returncode == -signal.SIGTERM
    assert (tmp_path / "log").read_text().startswith("fake server starts\n127.0.0.1 - - ")
    with pytest.raises(ServerError) as caught:
        start("die")
    for text in (str(caught.value), (tmp_path / "log").read_text()):
        assert HANG_MARK not in text
        assert "Fatal Python error" not in text


@pytest.mark.parametrize(("variable", "default"), launch_module.TOLD_ENV.items())
@pytest.mark.parametrize("shell", [None, ""])
@pytest.mark.parametrize("given", [None, "2"])
def test_a_server_is_told_what_nobody_says_otherwise(
    start: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    default: str,
    shell: str | None,
    given: str | None,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if shell is not None:
        monkeypatch.setenv(variable, shell)
    with start("serve", env={} if given is None else {variable: given}):
        (state,) = states(tmp_path)
    assert state["env"][variable] == next(value for value in (given, shell, default) if value is not None)


def test_crashes_leave_stacks_and_nobody_waits_for_a_core_dump_of_the_gpu() -> None:
    assert dict(launch_module.TOLD_ENV) == {
        "PYTHONFAULTHANDLER": "1",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    }


def test_group_that_ignores_sigterm_is_killed(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_TERM_GRACE_S", 0.5)
    server = start("stubborn")
    (state,) = states(tmp_path)
    server.stop()
    assert not running(state["pid"])
    assert not running(state["child"])
    assert server.returncode == -signal.SIGKILL


def test_taken_port_is_retried_on_another(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        squatter.setblocking(False)
        taken = squatter.getsockname()[1]
        ports = iter([taken, launch_module._free_port()])
        monkeypatch.setattr(launch_module, "_free_port", lambda: next(ports))
        with start("serve") as server:
            assert server.port != taken
    assert len(states(tmp_path)) == 2


@pytest.fixture
def stranger() -> Iterator[int]:
    """Yield the port of somebody else's healthy server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"model_path": "/somebody/elses"}')

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_somebody_elses_health_is_not_taken_for_ours(
    start: Any, stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([stranger, launch_module._free_port()])
    monkeypatch.setattr(launch_module, "_free_port", lambda: next(ports))
    with start("serve") as server:
        assert server.port != stranger
        assert states(tmp_path)[-1]["pid"] == server.pid
    ports = iter([stranger] * 100)
    with pytest.raises(ServerError, match="/somebody/elses"):
        start("silent")


def test_cpu_defaults_give_way_to_arguments_flag_by_flag(start: Any, tmp_path: Path) -> None:
    with start("serve", extra_args=["--max-total-tokens", "777", "--dtype=bfloat16", "--sleep-on-idle"]):
        (state,) = states(tmp_path)
    arguments = state["argv"]
    assert arguments[arguments.index("--max-total-tokens") + 1] == "777"
    assert not any(a.startswith("--max-total-tokens=") for a in arguments)
    assert arguments.count("--sleep-on-idle") == 1
    assert "--dtype=float32" not in arguments
    assert "--device=cpu" in arguments
    assert "--max-mamba-cache-size=64" in arguments
    assert state["env"]["SGLANG_PLATFORM"] == "cpu_ref"
    assert "SGLANG_MAMBA_SSM_DTYPE" not in state["env"]


def test_fp32_checkpoint_is_served_in_fp32(start: Any, tmp_path: Path) -> None:
    with start("serve"):
        (state,) = states(tmp_path)
    assert "--dtype=float32" in state["argv"]
    assert state["env"]["SGLANG_MAMBA_SSM_DTYPE"] == "float32"
    assert state["env"]["SGLANG_MAMBA_CONV_DTYPE"] == "float32"


@pytest.mark.parametrize("spelling", [["--api-key", "s3cret"], ["--api-key=s3cret"]])
def test_a_server_with_a_key_is_recognised_by_showing_it(start: Any, spelling: list[str]) -> None:
    with start("serve", extra_args=spelling, timeout_s=10) as server:
        assert server.api_key == "s3cret"


def test_a_failure_does_not_show_the_key(start: Any) -> None:
    with pytest.raises(ServerError) as caught:
        start("die", extra_args=["--api-key", "s3cret"])
    assert "--api-key KEY" in caught.value.render()
    assert "s3cret" not in caught.value.render()


def test_cuda_server_gets_no_cpu_settings(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    with start("serve", device="cuda"):
        (state,) = states(tmp_path)
    assert "SGLANG_PLATFORM" not in state["env"]
    assert [a for a in state["argv"] if a.startswith("--")] == ["--model-path", "--host", "--port"]


def test_the_environments_own_programs_come_first_though_it_is_not_activated(
    start: Any, tmp_path: Path, interpreter: Path
) -> None:
    with start("serve"):
        (state,) = states(tmp_path)
    first, *rest = state["env"]["PATH"].split(os.pathsep)
    assert first == str(interpreter.parent)
    assert rest == os.environ["PATH"].split(os.pathsep)


def test_an_activated_environment_keeps_its_path(
    start: Any, tmp_path: Path, interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    with start("serve"):
        (state,) = states(tmp_path)
    assert state["env"]["PATH"] == path


def test_tree_goes_in_front_of_the_python_path(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "sglang").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with start("serve", pythonpath=tmp_path / "tree"):
        (state,) = states(tmp_path)
    assert state["env"]["PYTHONPATH"] == f"{tmp_path / 'tree'}{os.pathsep}/elsewhere"


def test_wrong_arguments_are_refused_before_anything_starts(start: Any, tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError, match="holds no sglang package"):
        start("serve", pythonpath=tmp_path)
    with pytest.raises(ServerError, match="cannot start"):
        start("serve", python=tmp_path / "no-such-python")
    (model / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        start("serve")
    for other in ("[]", '{"text_config": [1]}'):
        (model / "config.json").write_text(other)
        with pytest.raises(UsageError, match=r"config\.json: expected a JSON object"):
            start("serve")
    (model / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        start("serve")
    model.rmdir()
    with pytest.raises(UsageError, match="no such folder"):
        start("serve")
    assert not (tmp_path / "state").exists()


OWNER = """
import os, sys
from q4kit.server.launch import launch
launch(sys.argv[1], python=sys.argv[2], log_path=sys.argv[3], timeout_s=30)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "return"])
def test_server_ends_with_its_owner(how: str, model: Path, interpreter: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model), str(interpreter), str(tmp_path / "log")],
        env={**os.environ, "FAKE_MODE": "serve", "FAKE_STATE": str(tmp_path / "state")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner:
        assert owner.stdout.readline() == "up\n"
        (state,) = states(tmp_path)
        assert running(state["pid"])
        if how == "return":
            owner.stdin.close()
        else:
            owner.send_signal(getattr(signal, how))
        owner.wait(timeout=30)
    assert wait_gone([state["pid"], state["child"]], 10)
