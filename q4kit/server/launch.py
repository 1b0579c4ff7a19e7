"""Start, watch and stop a real `sglang.launch_server` on loopback."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import requests

from q4kit.errors import ServerError, UsageError
from q4kit.server import model_folder, processes
from q4kit.server.client import authorization

Device = Literal["cpu", "cuda"]
Progress = Callable[[float, str], None]
"""Called about once a second while a server starts: seconds since the start, last line of its log."""

CPU_ENV: Mapping[str, str] = {
    "SGLANG_PLATFORM": "cpu_ref",
    "TORCHDYNAMO_DISABLE": "1",  # inductor would need a compiler and changes the bf16 results
    "CUDA_VISIBLE_DEVICES": "",  # the same behaviour on a machine that has a GPU
}
OFFLINE_ENV: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
TOLD_ENV: Mapping[str, str] = {"PYTHONFAULTHANDLER": "1", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}
"""Where the shell does not set it otherwise: a crash, or a hang that `launch` ends, writes its stacks to the log, and
SGLang does not wait a minute for a core dump of the GPU, which only a process that was set up for it writes."""
FLOAT32_ENV: Mapping[str, str] = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_MAMBA_SSM_DTYPE": "float32"}
"""Gated-delta-net states in fp32; without them an fp32 server keeps them in bf16."""
CPU_FLAGS: Mapping[str, str | None] = {
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    "--max-total-tokens": "65536",  # without it the KV pool takes gigabytes
    "--max-running-requests": "8",
    "--max-mamba-cache-size": "64",  # without it 59530 state slots, 3 GB
    "--mem-fraction-static": "0.3",
    "--sleep-on-idle": None,  # an idle scheduler would otherwise spin on a whole core
}
"""Defaults on CPU (None: a switch); a flag in `extra_args` replaces its default."""

LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_TERM_GRACE_S = 10.0
_KILL_GRACE_S = 10.0
_PORT_ATTEMPTS = 4
_TAIL_LINES = 40
_DUMP_S = 3.0
_DUMP_LINES, _DUMP_WIDTH = 400, 300
HANG_MARK = "q4kit: not healthy in time; the server's processes, then their Python stacks:"
"""The line of a log from which on `launch` had the server say where it hangs."""
_PORT_TAKEN = re.compile(
    r"address already in use|EADDRINUSE|port \d+ is (?:already in use|not available|occupied)", re.IGNORECASE
)
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()
_ports_given: set[int] = set()
_ports_lock = threading.Lock()


class PortTakenError(ServerError):
    """Somebody else has the port; another one may work."""


class ServerProcess:
    """A running server in its own process group. Use as a context manager, or call `stop()`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path, command: Sequence[str]) -> None:
        self._process = process
        self._watchdog = _start_watchdog(process.pid)
        self.port = port
        self.log_path = log_path
        self.command = tuple(command)
        _running.add(self)

    @property
    def base_url(self) -> str:
        """Root of the server's HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_key(self) -> str | None:
        """The key that its command line asks of clients, None for none."""
        return flag_value("--api-key", self.command)

    @property
    def pid(self) -> int:
        """Process id of the server's main process, and its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the main process, None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last `lines` lines of the server's log."""
        return _tail(self.log_path, lines)

    def terminate(self, grace_s: float) -> int | None:
        """Ask the server to finish its requests and exit; return its exit status, None if it did not in `grace_s`.

        The main process alone is asked: it ends its children in order, where a signal to the whole group looks to it
        like a crash of its scheduler. `stop()` must follow and ends what is left.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        return self.returncode

    def pause(self) -> None:
        """Take the CPU from the whole process group (SIGSTOP); it keeps its memory. Idempotent."""
        if self._process.poll() is None:
            _signal_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process group run again. Idempotent."""
        if self._process.poll() is None:
            _signal_group(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL for what is left after 10 s. Idempotent."""
        _running.discard(self)
        _signal_group(self.pid, signal.SIGTERM)
        _signal_group(self.pid, signal.SIGCONT)  # a group that was paused acts on the SIGTERM only now
        if not self._wait_for_group(_TERM_GRACE_S):
            _signal_group(self.pid, signal.SIGKILL)
            self._wait_for_group(_KILL_GRACE_S)
        _dismiss(self._watchdog)

    def _wait_for_group(self, seconds: float) -> bool:
        """Return whether every member of the group ended within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            self._process.poll()  # reap, so that the leader does not count as a member
            if not processes.members(self.pid):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch(
    model_path: str | os.PathLike[str],
    *,
    python: str | os.PathLike[str],
    log_path: str | os.PathLike[str],
    pythonpath: str | os.PathLike[str] | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    device: Device = "cpu",
    progress: Progress | None = None,
    host: str = LOOPBACK,
    port: int | None = None,
    prefix: Sequence[str] = (),
) -> ServerProcess:
    """Start `sglang.launch_server` on a free port and return it once `/health` answers 200.

    It listens on `host` (which must include loopback: 127.0.0.1 or 0.0.0.0), on `port` where one is given;
    `prefix` goes in front of the command (it must exec it, as `systemd-run --scope` does).

    `python` is the interpreter whose environment serves; `pythonpath`, a folder that holds an `sglang`
    package, goes in front of it. `extra_args` replace the CPU defaults flag by flag, `env` replaces
    environment variables. On CPU, a checkpoint whose config says float32 is served in float32 (SGLang's
    "auto" would make it fp16). The log is written to `log_path` and kept. A port that somebody else takes in
    between is retried on another one.

    Raises ServerError with the end of the log if the server dies or is not healthy after `timeout_s` seconds; in the
    second case the log says where it hangs (HANG_MARK).
    """
    model, log = Path(model_path), Path(log_path)
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    attempts = _PORT_ATTEMPTS if port is None else 1
    for attempt in range(1, attempts + 1):
        here = _free_port() if port is None else port
        command, environment = plan(
            model, python=python, port=here, host=host, pythonpath=pythonpath, extra_args=extra_args, env=env,
            device=device,
        )  # fmt: skip
        server = _spawn([*prefix, *command], environment, here, log)
        try:
            _wait_healthy(server, str(model), deadline, timeout_s, progress)
            return server
        except BaseException as error:
            server.stop()
            if not isinstance(error, PortTakenError) or attempt == attempts:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def plan(
    model_path: str | os.PathLike[str],
    *,
    python: str | os.PathLike[str],
    port: int,
    host: str = LOOPBACK,
    pythonpath: str | os.PathLike[str] | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    device: Device = "cpu",
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the whole environment that `launch` would start, starting nothing.

    Raises UsageError for a checkpoint without a readable config.json and a tree without an sglang package.
    """
    model = Path(model_path)
    model_folder.check(model)
    if pythonpath is not None and not (Path(pythonpath) / "sglang").is_dir():
        raise UsageError(f"{pythonpath} holds no sglang package", remedy="give the folder above it (<tree>/python)")
    environment, flags = _environment(model, python, device, pythonpath, extra_args, env or {})
    command = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--host", host, "--port", str(port),
        *flags,
    ]  # fmt: skip
    return command, environment


def _environment(
    model: Path,
    python: str | os.PathLike[str],
    device: Device,
    pythonpath: str | os.PathLike[str] | None,
    extra_args: Sequence[str],
    env: Mapping[str, str],
) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the flags of the server process."""
    environment = {**TOLD_ENV, **os.environ, **OFFLINE_ENV}
    # An environment that is not activated: its ninja builds what SGLang compiles at first use.
    folder, path = str(Path(python).parent), environment.get("PATH", "")
    if path.split(os.pathsep)[0] != folder:
        environment["PATH"] = os.pathsep.join([folder, *filter(None, [path])])
    flags: list[str] = []
    if device == "cpu":
        environment |= CPU_ENV
        defaults: dict[str, str | None] = {**CPU_FLAGS, "--device": "cpu"}
        if _config_dtype(model) == "float32":
            defaults["--dtype"] = "float32"
        given = {arg.split("=", 1)[0] for arg in extra_args if arg.startswith("--")}
        flags = [flag if value is None else f"{flag}={value}" for flag, value in defaults.items() if flag not in given]
        if flag_value("--dtype", [*flags, *extra_args]) == "float32":
            environment |= FLOAT32_ENV
    if pythonpath is not None:
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([os.path.abspath(pythonpath), *([rest] if rest else [])])
    environment |= env
    return environment, [*flags, *extra_args]


def _config_dtype(model: Path) -> str | None:
    """Return the checkpoint's declared dtype, top level or text part."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{model / 'config.json'} is not JSON: {error}", remedy="generate the model again") from error
    text = (config.get("text_config") or {}) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise UsageError(
            f"{model / 'config.json'}: expected a JSON object, and in it text_config another",
            remedy="generate the model again",
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype")
    return None if dtype is None else str(dtype)


def flag_value(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the last value given for `flag`, in either spelling."""
    value = None
    for here, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if here == flag:
            value = following
        elif here.startswith(f"{flag}="):
            value = here.split("=", 1)[1]
    return value


def _free_port() -> int:
    """Return a loopback port that was free a moment ago, and that no other server of this process was given.

    Two servers of one model that start at the same time could otherwise be taken for each other.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        with _ports_lock:
            if port not in _ports_given:
                _ports_given.add(port)
                return port


def _spawn(command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> ServerProcess:
    """Start the server in its own process group, its output going to `log`."""
    try:
        log.write_bytes(b"")
        with log.open("ab") as output:  # appending: what `_explain` adds is not written over
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise ServerError(
            f"cannot start {command[0]}: {error}", remedy="give a Python interpreter that exists"
        ) from error
    return ServerProcess(process, port, log, command)


def _wait_healthy(
    server: ServerProcess, model: str, deadline: float, timeout_s: float, progress: Progress | None
) -> None:
    """Return when the server answers; raise ServerError if it dies, hangs, or is somebody else's."""
    started = reported = time.monotonic()
    while True:
        if server.returncode is not None:
            raise _failure(server, f"the server exited with status {server.returncode} before it was healthy")
        if _healthy(server.base_url):
            served = _served_model(server.base_url, server.api_key)
            if server.returncode is None and served == model:
                return
            if served is not None and served != model:
                raise _failure(server, f"the port was taken: {server.base_url} serves {served}, not {model}", True)
        now = time.monotonic()
        if now >= deadline:
            raise _failure(server, f"the server was not healthy after {timeout_s:.0f} s", end=_explain(server))
        if progress is not None and now - reported >= 1.0:
            reported = now
            progress(now - started, _tail(server.log_path, 1))
        time.sleep(_POLL_S)


def _explain(server: ServerProcess) -> str:
    """Have a server that hangs write to its log where, which ends its Python processes; return the log's end."""
    tail = server.log_tail()
    note = "\n".join([HANG_MARK, *map(processes.describe, processes.members(server.pid))])
    _append(server.log_path, f"\n{note}\n")
    written = len(_read(server.log_path))
    processes.dump_stacks(server.pid, _DUMP_S, lambda pid: _append(server.log_path, f"\nstacks of pid {pid}:\n"))
    stacks = [line[:_DUMP_WIDTH] for line in _read(server.log_path)[written:].splitlines()]
    if len(stacks) > _DUMP_LINES:  # the leader's main thread is the last one
        half = _DUMP_LINES // 2
        stacks[half:-half] = [f"({len(stacks) - 2 * half} more lines in the log)"]
    return "\n".join([*filter(None, [tail]), note, *stacks])


def _failure(server: ServerProcess, what: str, port_taken: bool = False, end: str | None = None) -> ServerError:
    """Return the error to raise, with the end of the log (`end` where the caller has it)."""
    kind = PortTakenError if port_taken or _PORT_TAKEN.search(_read(server.log_path)) else ServerError
    shown = " ".join(server.command)
    if server.api_key:
        shown = shown.replace(server.api_key, "KEY")
    return kind(
        f"{what} (log: {server.log_path})\n{server.log_tail() if end is None else end}",
        remedy=f"the lines above are the end of its log; the command was: {shown}",
    )


def _get(url: str, api_key: str | None = None) -> requests.Response:
    """Return the answer to GET `url`, past any proxy that the shell's environment names."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, timeout=5, headers=authorization(api_key))


def _healthy(base_url: str) -> bool:
    try:
        return _get(f"{base_url}/health").status_code == 200
    except requests.RequestException:
        return False


def _served_model(base_url: str, api_key: str | None) -> str | None:
    """Return the model path of whoever answers at `base_url`, None if it does not say."""
    try:
        answer = _get(f"{base_url}/model_info", api_key)
        path = answer.json().get("model_path") if answer.ok else None
    except (requests.RequestException, ValueError, AttributeError):
        return None
    return None if path is None else str(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _append(path: Path, text: str) -> None:
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
        log.write(text)


def _tail(path: Path, lines: int) -> str:
    return "\n".join(_read(path).splitlines()[-lines:])


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _start_watchdog(group: int) -> subprocess.Popen[bytes]:
    """Start the process that ends the server should this one be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "q4kit.server.watchdog", str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _dismiss(watchdog: subprocess.Popen[bytes]) -> None:
    """Call the watch off. Idempotent."""
    if watchdog.stdin is None or watchdog.stdin.closed:
        return
    with contextlib.suppress(BrokenPipeError):
        watchdog.stdin.write(b"x")
        watchdog.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        watchdog.stdin.close()
    watchdog.wait(timeout=10)


@atexit.register
def _stop_all() -> None:
    for server in list(_running):
        server.stop()
