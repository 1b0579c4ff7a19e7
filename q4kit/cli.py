"""The frame around every tool's `main`: what happens when the reader of its output goes away."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator

from q4kit import exit_codes


def run(main: Callable[[], int]) -> int:
    """Return `main()`, or PIPE_CLOSED without a traceback when stdout or stderr is a pipe that nobody reads any more.

    `tool | head` is an ordinary end. Output is flushed here, because the interpreter would otherwise find the closed
    pipe after `main`, too late to be handled. A broken pipe to something else (a server, a child) is an error as ever.
    """
    try:
        try:
            code = main()
        except SystemExit:  # argparse: --help, usage
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        closed = [fd for fd in _outputs() if _unread(fd)]
        if not closed:
            raise
        _discard(closed)
        return exit_codes.PIPE_CLOSED
    return code


def _outputs() -> Iterator[int]:
    for stream in (sys.stdout, sys.stderr):
        try:
            yield stream.fileno()
        except (AttributeError, OSError, ValueError):  # None, or not backed by a file
            continue


def _unread(fd: int) -> bool:
    """Return whether `fd` is the writing end of a pipe or socket whose reader is gone."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLERR and POLLHUP are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard(fds: list[int]) -> None:
    """Let what is still buffered for `fds` go nowhere, so that the interpreter's own flush at exit succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)
