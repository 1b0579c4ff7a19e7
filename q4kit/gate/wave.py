"""Servers that boot side by side and are asked together, or one alone while the others are paused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from q4kit.server import launch
from q4kit.server.launch import ServerProcess


class CancelledError(Exception):
    """The wave ended while a server of it was still starting."""


@dataclass
class Seat:
    """One server of a wave: None before its boot and after it was given back."""

    server: ServerProcess | None = None


S = TypeVar("S", bound=Seat)


class Wave(Generic[S]):
    """The servers that live at the same time. Use as a context manager: none outlives it, paused or not."""

    def __init__(self, seats: Sequence[S]) -> None:
        self.seats = tuple(seats)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def boot(self, start: Callable[[S, launch.Progress], ServerProcess | None]) -> None:
        """Start the servers of all seats at once and return when each is up or has failed.

        `start` gets a progress callback for `launch`, which raises CancelledError in it once the wave is over.
        """

        def one(seat: S) -> None:
            server = start(seat, self._still_on)
            seat.server = server
            if server is not None and self._over.is_set():
                server.stop()

        self.together(one, self.seats)

    def together(self, stage: Callable[[S], None], seats: Iterable[S]) -> None:
        """Run a stage for several seats at once. An exception, an interrupt too, ends the wave and goes on."""
        chosen = tuple(seats)
        if not chosen:
            return
        with ThreadPoolExecutor(len(chosen)) as pool:
            futures = [pool.submit(stage, seat) for seat in chosen]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.end()  # breaks the requests in flight: no thread keeps the pool waiting
                raise

    def alone(self, stage: Callable[[S], None], seat: S) -> None:
        """Run a stage for one seat while every other server is paused; they stay so."""
        for other in self.seats:
            if other is not seat and other.server is not None:
                other.server.pause()
        if seat.server is not None:
            seat.server.resume()
        stage(seat)

    def leave(self, seats: Iterable[S]) -> None:
        """Stop the servers of some seats, all at once."""
        servers = [seat.server for seat in seats if seat.server is not None]
        if servers:
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(ServerProcess.stop, servers))
        for seat in self.seats:
            if seat.server in servers:
                seat.server = None

    def end(self) -> None:
        """Stop every server, and make those that are still starting give up. Idempotent."""
        self._over.set()
        self.leave(self.seats)

    def _still_on(self, seconds: float, line: str) -> None:
        if self._over.is_set():
            raise CancelledError
