"""Servers side by side: one alone is really alone, and none is left behind, paused ones least of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from gate_servers import processes, wait_for, write_interpreter

from q4kit.gate.wave import Seat, Wave
from q4kit.server.launch import Progress, ServerProcess, launch


@dataclass
class Named(Seat):
    name: str = ""


Start = Callable[[Named, Progress], ServerProcess]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    """Return what starts a stand-in server; one named `slow` is never healthy."""
    python, slow = write_interpreter(tmp_path, ""), tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)

    def run(seat: Named, progress: Progress) -> ServerProcess:
        command = slow if seat.name == "slow" else python
        return launch(model, python=command, log_path=tmp_path / f"{seat.name}.log", timeout_s=60, progress=progress)

    return run


def states(wave: Wave[Named]) -> list[str]:
    """Return the scheduling state of each server's main process."""
    found = []
    for seat in wave.seats:
        assert seat.server is not None
        stat = Path(f"/proc/{seat.server.pid}/stat").read_text()
        found.append(stat.rsplit(")", 1)[1].split()[0])
    return found


def test_one_server_runs_while_the_others_are_paused(start: Start, tmp_path: Path) -> None:
    with Wave([Named(name=name) for name in "abc"]) as wave:
        wave.boot(start)
        assert len({seat.server.port for seat in wave.seats if seat.server}) == 3
        for seat in wave.seats:
            wanted = [other is not seat for other in wave.seats]
            wave.alone(lambda _, wanted=wanted: wait_for(lambda: [s == "T" for s in states(wave)] == wanted), seat)
    assert not processes(str(tmp_path))


def test_paused_servers_end_at_once(start: Start, tmp_path: Path) -> None:
    with Wave([Named(name=name) for name in "abc"]) as wave:
        wave.boot(start)
        wave.alone(lambda _: None, wave.seats[0])
        began = time.monotonic()
    assert time.monotonic() - began < 5.0  # not the 10 s after which a server that ignores SIGTERM is killed
    assert not processes(str(tmp_path))


def test_a_server_that_dies_while_it_is_paused_keeps_the_others(start: Start) -> None:
    with Wave([Named(name=name) for name in "ab"]) as wave:
        wave.boot(start)
        dead, other = wave.seats[1], wave.seats[0]
        assert dead.server is not None
        wave.alone(lambda _: None, other)
        os.killpg(dead.server.pid, signal.SIGKILL)
        wait_for(lambda: dead.server is not None and dead.server.returncode == -signal.SIGKILL)
        wave.alone(lambda _: None, dead)  # its stage finds out; nothing is signalled to an id that may be another's
        wave.leave([dead])
        assert dead.server is None
        wave.alone(lambda _: None, other)
        assert states(Wave([other])) != ["T"]


def test_an_interrupt_while_servers_start_leaves_none(start: Start, tmp_path: Path) -> None:
    wave = Wave([Named(name="a"), Named(name="slow")])
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), wave:
            wave.boot(start)
    finally:
        timer.cancel()
    assert time.monotonic() - began < 20.0
    assert not processes(str(tmp_path))


def test_an_error_in_one_stage_ends_the_wave(start: Start, tmp_path: Path) -> None:
    def stage(seat: Named) -> None:
        if seat.name == "b":
            raise ZeroDivisionError
        wait_for(lambda: seat.server is None)  # a request in flight ends with its server

    with Wave([Named(name=name) for name in "ba"]) as wave:
        wave.boot(start)
        with pytest.raises(ZeroDivisionError):
            wave.together(stage, wave.seats)
    assert not processes(str(tmp_path))


OWNER = """
import sys, time
from pathlib import Path
from q4kit.gate.wave import Seat, Wave
from q4kit.server.launch import launch
model, python, log = sys.argv[1:]
with Wave([Seat(), Seat()]) as wave:
    wave.boot(lambda seat, progress: launch(model, python=python, log_path=f"{log}-{id(seat)}.log", progress=progress))
    def hold(seat):
        print("paused", flush=True)
        time.sleep(60)
    wave.alone(hold, wave.seats[0])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_owner_that_is_ended_leaves_no_paused_server(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    python = write_interpreter(tmp_path, "")
    command = [sys.executable, "-c", OWNER, str(model), str(python), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "paused\n"
        wait_for(lambda: sorted(s == "T" for s in processes(str(tmp_path / "server.py")).values()) == [False, True])
        owner.send_signal(number)
        owner.wait(timeout=30)
    wait_for(lambda: not processes(str(tmp_path / "server.py")))
