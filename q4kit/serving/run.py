"""The life of one server: start, health, warm-up, smoke test, provenance, wait, orderly end. Prints nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from q4kit import exit_codes, locks, smoke
from q4kit.errors import ServerError
from q4kit.provenance import collect
from q4kit.report import Report, write_json
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import Device, Progress, ServerProcess, flag_value, launch

WARM_UP = (16, 300, 700)
"""Prompt lengths in tokens: below and above a page, and above a prefill chunk of the tiny profile."""
_WARM_UP_NEW = 8
_POLL_S = 0.5
DRAIN_S = 60.0
"""How long running requests may take to finish after a stop was asked for."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def catch_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise StopRequested; one that is ignored stays so: nohup means it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StopRequested(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


@dataclass(frozen=True)
class Plan:
    """Everything that decides what is started and what is written."""

    model: Path
    python: str
    device: Device
    flags: Sequence[str]
    env: Mapping[str, str]
    host: str
    port: int
    prefix: Sequence[str]
    timeout_s: float
    log: Path
    environment: Path
    smoke_json: Path


Say = Callable[[str], None]


def exclusive(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Hold `run_dir`, which is made, for one server: a second one would write over the first one's log.

    Raises:
        EnvironmentFault: another process holds it.
    """
    return locks.exclusive(
        run_dir, f"{run_dir} belongs to a server that runs now", "stop that one, or give --run-dir another folder"
    )


def serve(plan: Plan, say: Say, progress: Progress) -> int:
    """Serve until a stop is requested or the server ends; return the exit code.

    The code is the server's own: 0 after an orderly stop, 128 + n if signal n ended it. 1: the smoke test found a wrong
    answer (the server is stopped). 130: stopped before it was ready.

    Raises:
        ServerError: the server did not come up, or a request failed before it was declared ready.
    """
    started = time.monotonic()
    try:
        server = launch(
            plan.model, python=plan.python, log_path=plan.log, extra_args=plan.flags, env=plan.env,
            timeout_s=plan.timeout_s, device=plan.device, progress=progress, host=plan.host, port=plan.port,
            prefix=plan.prefix,
        )  # fmt: skip
    except StopRequested as stop:
        say(f"stopped by {stop} before the server was up")
        return exit_codes.INTERRUPTED
    ready = False
    try:
        say(f"healthy after {time.monotonic() - started:.0f} s, process {server.pid}")
        report, code = prepare(plan, server, say)
        say(report.text().rstrip())
        if code:
            return code
        ready = True
        say(f"ready: {server.base_url} (Ctrl-C or SIGTERM to process {os.getpid()} stops it)")
        return wait(server, say)
    except StopRequested as stop:
        say(f"stopping by {stop}: running requests have {DRAIN_S:.0f} s to finish; a second signal ends them now")
        code = _end(server)
        return code if ready else exit_codes.INTERRUPTED
    finally:
        server.stop()
        say("stopped; no process of the server is left")


def prepare(plan: Plan, server: ServerProcess, say: Say) -> tuple[Report, int]:
    """Warm up, freeze the garbage collector, test the chat route, write the provenance; return the smoke report."""
    with Client(server.base_url, plan.timeout_s, api_key=server.api_key) as client:
        lengths = warm_up(client, _context(plan.flags))
        client.freeze_gc()
        prompts = f"prompts of {', '.join(map(str, lengths))} tokens" if lengths else "nothing: no prompt fits"
        say(f"warmed up with {prompts}; garbage collection frozen")
        report, code = smoke.run(client).report()
        write_json(plan.smoke_json, report.to_json())
        write_json(plan.environment, collect(client, tool="serve"))
        say(f"environment: {plan.environment}")
    return report, code


def _context(flags: Sequence[str]) -> int | None:
    """Return the context that the server was given, None where it has the model's."""
    value = flag_value("--context-length", flags)
    return int(value) if value and value.isdecimal() else None


def warm_up(client: Client, context: int | None = None) -> tuple[int, ...]:
    """Send prompts of several lengths, so that the first user does not wait for kernels to compile; return them.

    Only those that fit into `context` tokens with their answer; None: all.
    """
    lengths = tuple(n for n in WARM_UP if context is None or n + _WARM_UP_NEW <= context)
    for length in lengths:
        ids = [(7 * position) % 400 + 10 for position in range(length)]
        client.generate({"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": _WARM_UP_NEW}})
    client.flush_cache()
    return lengths


def wait(server: ServerProcess, say: Say) -> int:
    """Return the server's exit code when it ends by itself."""
    while server.returncode is None:
        time.sleep(_POLL_S)
    say(f"the server ended by itself with status {server.returncode}; the end of its log:\n{server.log_tail(15)}")
    return _code(server.returncode)


def _end(server: ServerProcess) -> int:
    try:
        status = server.terminate(DRAIN_S)
    except StopRequested:
        status = None
    if status is None:
        server.stop()
        status = server.returncode
    if status is None:
        raise ServerError(f"process {server.pid} does not end", remedy="end it by hand: kill -9")
    return _code(status)


def _code(status: int) -> int:
    """Return a process status as a shell would: 128 + n for signal n."""
    return 128 - status if status < 0 else status
