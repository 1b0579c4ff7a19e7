"""Boot servers side by side, spread over GPUs, ask them GPU by GPU at the same time, time them one by one.

Whoever is not being asked is stopped (SIGSTOP): an idle server still polls, and a GPU has one clock and one PCIe link.
What is timed is timed alone: `alone()` waits until no other stage of this process, and of every process that was given
the same lock file, runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q4kit.errors import Q4Error
from q4kit.server.launch import ServerProcess


@dataclass
class Quiet:
    """A lock file: boots and questions share it, a timing has it to itself."""

    path: Path

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        with self.path.open("w") as file:
            fcntl.flock(file, how)
            yield

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """Hold it beside other questions, not beside a timing."""
        return self._held(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold it with nobody else asking or booting."""
        return self._held(fcntl.LOCK_EX)


@dataclass
class Seat:
    """One cell of a wave on its GPU."""

    cell: Any
    gpu: str | None
    """As CUDA_VISIBLE_DEVICES names it; None: the process's own choice."""
    server: ServerProcess | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What the server's environment needs to see its GPU alone."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}


def gpu_list(text: str) -> list[str | None]:
    """Return the GPUs of an argument such as 0,1."""
    indices = text.split(",")
    if not all(index.isdecimal() for index in indices):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of GPU indices such as 0,1")
    return list(indices)


Stage = Callable[[Seat], None]
"""Adds to seat.record what it learned of seat.server."""


def seats(cells: Sequence[Any], gpus: Sequence[str | None]) -> list[Seat]:
    """Return the cells dealt to the GPUs in turn."""
    return [Seat(cell, gpus[number % len(gpus)]) for number, cell in enumerate(cells)]


def _signal(seat: Seat, what: signal.Signals) -> None:
    if seat.server:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(seat.server.pid, what)


def _run(seat: Seat, stage: Stage, failed: Callable[[Seat, Q4Error], dict[str, Any]]) -> None:
    """Let the server of a seat run for one stage; a server that fails has its error recorded and is asked no more."""
    if seat.server is None or "error" in seat.record:
        return
    _signal(seat, signal.SIGCONT)
    try:
        stage(seat)
    except Q4Error as error:
        seat.record |= failed(seat, error)
    finally:
        _signal(seat, signal.SIGSTOP)


def run(
    wave: Sequence[Seat],
    boot: Stage,
    ask: Stage,
    timed: Stage,
    *,
    quiet: Quiet,
    failed: Callable[[Seat, Q4Error], dict[str, Any]],
) -> None:
    """Fill the records of a wave: `boot` (all at once) sets seat.server, then `ask` (one a GPU), `timed` (alone).

    A stage that raises Q4Error ends its seat with the record that `failed` makes; anything else ends the wave. No
    server outlives the call.
    """
    started = time.monotonic()

    def start(seat: Seat) -> None:
        try:
            boot(seat)
        except Q4Error as error:
            seat.record |= failed(seat, error)
        else:
            seat.record["boot_s"] = time.monotonic() - started

    queues: dict[str | None, list[Seat]] = {}
    for seat in wave:
        queues.setdefault(seat.gpu, []).append(seat)
    errors: list[BaseException] = []

    def ask_all(queue: list[Seat]) -> None:
        try:
            for seat in queue:
                _run(seat, ask, failed)
        except BaseException as error:
            errors.append(error)

    try:
        with quiet.shared():
            with ThreadPoolExecutor(len(wave)) as pool:
                list(pool.map(start, wave))
            for seat in wave:
                _signal(seat, signal.SIGSTOP)
            threads = [threading.Thread(target=ask_all, args=(queue,)) for queue in queues.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        for seat in wave:
            with quiet.alone():
                _run(seat, timed, failed)
    finally:
        for seat in wave:
            if seat.server:
                _signal(seat, signal.SIGKILL)
                seat.server.stop()
