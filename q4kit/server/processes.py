"""What the processes of a group do, told from outside: /proc, and the stacks that Python's faulthandler writes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

_CMDLINE_HEAD = 120
"""Characters of a command line that are shown, and none from the first --flag on: a key may follow."""
_ONE_S = 1.0
"""The longest wait for one process to write its stacks: it takes milliseconds where it can."""
_GONE = ("Z", "X")


def members(group: int) -> list[int]:
    """Return the living (not zombie) processes of a process group, smallest pid first, from /proc."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == group and fields[0] not in _GONE:
                found.append(int(entry.name))
    return sorted(found)


def describe(pid: int) -> str:
    """Return one line on a process: state, CPU time, threads, kernel function it waits in, head of its command line.

    What /proc does not tell is shown as "?".
    """
    fields = _stat(pid)
    state, cpu, threads = "?", "?", "?"
    if len(fields) > 17:
        state, threads = fields[0], fields[17]
        cpu = f"{(int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK'):.1f}"
    command = " ".join(_read(pid, "cmdline").replace("\0", " ").split()).partition(" --")[0][:_CMDLINE_HEAD]
    stacks = "" if handles(pid, signal.SIGABRT) else ", no faulthandler"
    return f"pid {pid}: state {state}, cpu {cpu} s, threads {threads}, wchan {_read(pid, 'wchan') or '?'}{stacks}: " + (
        command or "?"
    )


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal; False where /proc does not say."""
    for line in _read(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def dump_stacks(group: int, seconds: float, announce: Callable[[int], None]) -> None:
    """End the group's processes that handle SIGABRT with it: faulthandler writes every thread's stack to their stderr.

    One at a time, and the others stopped (SIGSTOP) meanwhile: their stacks would mix, and they would act on its end.
    The leader comes last, since a child may have asked for SIGKILL at its parent's death (SGLang's do). A process
    without a handler would only die, and is left alone, stopped. No core file is written.

    Args:
        group: process group, of processes that the caller ends next.
        seconds: the longest that this may take.
        announce: called with the pid of each process before it gets the signal.
    """
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
    for pid in sorted(members(group), key=lambda pid: (pid == group, -pid)):
        if handles(pid, signal.SIGABRT):
            with contextlib.suppress(OSError):  # gone, or not ours to limit: then it gets no SIGABRT either
                _no_core(pid)
                announce(pid)
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
                _wait_gone(pid, min(deadline, time.monotonic() + _ONE_S))


def _no_core(pid: int) -> None:
    """Let a process leave no core: a limit of 1 byte, where 0 would still feed a core_pattern that is a pipe."""
    hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
    resource.prlimit(pid, resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))


def _wait_gone(pid: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        fields = _stat(pid)
        if not fields or fields[0] in _GONE:
            return
        time.sleep(0.02)


def _stat(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on (man 5 proc, field 3), empty for a process that is gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), name).read_text(encoding="utf-8", errors="replace")
    return ""
