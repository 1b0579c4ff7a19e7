"""Boot servers side by side, spread over GPUs, ask them GPU by GPU at the same time, time them in interleaved rounds.

Whoever is not being asked is stopped (SIGSTOP): an idle server still polls, and a GPU has one clock and one PCIe link.
A round of timing gives every server one turn, alone; the order is reversed every second round, so that a machine that
drifts (clocks, neighbours) drifts for all of them. While a round runs, no other process that was given the same lock
file asks or boots. What a stage learned is saved when the stage ends: a run that is cut short loses one stage.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q4kit.errors import Q4Error
from q4kit.server.launch import ServerProcess


class Stopped(BaseException):
    """The run must end now: its budget is spent, or it was told to (SIGTERM)."""


@dataclass
class Clock:
    """How long the run may take, and how long its stages took so far."""

    budget_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    longest: dict[str, float] = field(default_factory=dict)
    """Stage -> the longest of its kind so far, seconds."""
    skipped: list[str] = field(default_factory=list)
    """What was not started, or was cut short, and why."""
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def left_s(self) -> float:
        """Seconds until the budget is spent, infinite without one."""
        return float("inf") if self.budget_s is None else self.budget_s - (time.monotonic() - self.started)

    def admits(self, stage: str, who: str) -> bool:
        """Return whether a stage can still end in time, judged by the longest of its kind; note it where it cannot."""
        needs = self.longest.get(stage, 0.0)
        if self.stopped.is_set() or self.left_s > needs:
            return not self.stopped.is_set()
        self.skipped.append(f"{who}: {stage} not started, {self.left_s:.0f} s left and it takes {needs:.0f} s")
        return False

    @contextlib.contextmanager
    def measured(self, stage: str) -> Iterator[None]:
        """Note how long the block took."""
        started = time.monotonic()
        yield
        self.longest[stage] = max(self.longest.get(stage, 0.0), time.monotonic() - started)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """End the block, not the program, at SIGTERM or when the budget is spent; main thread only."""

        def stop(number: int, _frame: object) -> None:
            for each in handled:
                signal.signal(each, signal.SIG_IGN)  # once: what follows cleans up
            self.stopped.set()
            raise Stopped(signal.Signals(number).name)

        handled = (signal.SIGTERM, signal.SIGALRM)
        before = {number: signal.signal(number, stop) for number in handled}
        if self.budget_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self.left_s, 0.001))
        try:
            yield
        except Stopped as stopped:
            self.skipped.append(f"cut short by {stopped}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)


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
    asked: bool = False
    """Whether the record holds the answers already."""
    rounds: int | None = None
    """Turns that it takes part in, from the first; None: all of the wave."""

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


def nothing(_seat: Seat) -> None:
    """Be a stage that learns nothing."""


def seats(cells: Sequence[Any], gpus: Sequence[str | None]) -> list[Seat]:
    """Return the cells dealt to the GPUs in turn."""
    return [Seat(cell, gpus[number % len(gpus)]) for number, cell in enumerate(cells)]


@dataclass
class _Wave:
    seats: Sequence[Seat]
    failed: Callable[[Seat, Q4Error], dict[str, Any]]
    save: Stage
    clock: Clock
    errors: list[BaseException] = field(default_factory=list)

    def boot(self, seat: Seat, boot: Stage) -> None:
        started = time.monotonic()
        try:
            boot(seat)
        except Q4Error as error:
            self.note(seat, error)
        except BaseException as error:
            self.errors.append(error)
        else:
            seat.record["boot_s"] = time.monotonic() - started
            if self.clock.stopped.is_set() and seat.server:
                seat.server.stop()

    def note(self, seat: Seat, error: Q4Error) -> None:
        """Record the failure of a server, unless it failed because the run was stopped."""
        if not self.clock.stopped.is_set():
            seat.record |= self.failed(seat, error)
            self.save(seat)

    def stage(self, name: str, seat: Seat, stage: Stage) -> None:
        """Let the server of a seat run for one stage; one that failed is asked no more."""
        if seat.server is None or "error" in seat.record or not self.clock.admits(name, str(seat.cell)):
            return
        seat.server.resume()
        try:
            with self.clock.measured(name):
                stage(seat)
            self.save(seat)
        except Q4Error as error:
            self.note(seat, error)
        finally:
            seat.server.pause()

    def ask(self, queue: Sequence[Seat], ask: Stage) -> None:
        try:
            for seat in queue:
                if not seat.asked:
                    self.stage("ask", seat, ask)
        except BaseException as error:
            self.errors.append(error)

    def together(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run the jobs side by side; threads that a stop leaves behind do not keep the process."""
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def run(
    wave: Sequence[Seat],
    boot: Stage,
    ask: Stage,
    turn: Callable[[Seat, int], None],
    *,
    rounds: int,
    quiet: Quiet,
    failed: Callable[[Seat, Q4Error], dict[str, Any]],
    save: Stage = nothing,
    close: Stage = nothing,
    clock: Clock | None = None,
) -> None:
    """Fill the records of a wave.

    `boot` (all at once) sets seat.server; `ask` (one a GPU) is left out where seat.asked; `turn` is called once a round
    for each seat, alone, with the round's number; `close` last, alone. `save` is called after each of them. A stage
    that raises Q4Error ends its seat with the record that `failed` makes; anything else ends the wave. What `clock`
    does not admit is left out. No server outlives the call.
    """
    clock = clock or Clock()
    this = _Wave(wave, failed, save, clock)
    queues: dict[str | None, list[Seat]] = {}
    for seat in wave:
        queues.setdefault(seat.gpu, []).append(seat)
    try:
        if not clock.admits("boot", f"{len(wave)} servers"):
            return
        with quiet.shared():
            with clock.measured("boot"):
                this.together([lambda seat=seat: this.boot(seat, boot) for seat in wave])  # type: ignore[misc]
            for seat in wave:
                if seat.server:
                    seat.server.pause()
            this.together([lambda queue=queue: this.ask(queue, ask) for queue in queues.values()])  # type: ignore[misc]
        for number in range(rounds):
            with quiet.alone():
                for seat in reversed(wave) if number % 2 else wave:
                    if seat.rounds is None or number < seat.rounds:
                        this.stage("turn", seat, lambda seat, number=number: turn(seat, number))  # type: ignore[misc]
        if close is not nothing:
            for seat in wave:
                with quiet.alone():
                    this.stage("close", seat, close)
    except BaseException:
        clock.stopped.set()
        raise
    finally:
        for seat in wave:
            if seat.server:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(seat.server.pid, signal.SIGKILL)  # nothing to end in order: spare stop() its patience
                seat.server.stop()
