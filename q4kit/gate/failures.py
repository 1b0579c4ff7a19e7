"""From a server's end and its log to why it did not serve: the line that says it, and code or machine. Pure."""

from __future__ import annotations

import re

from q4kit.errors import EnvironmentFault, ServerError
from q4kit.server.launch import HANG_MARK, PortTakenError

_ERROR = re.compile(r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:\[\w+\])?: ?.*\S)\s*$")
_USAGE = re.compile(r"(?:^|\s)(error: .*\S)\s*$")
_ECHO = re.compile(r"scheduler (?:died|is dead)|Initialization failed|exit ?code", re.IGNORECASE)
"""What a parent process says about a child that died: true, and no reason."""
_LONGEST = 300
_KILLED_OUTSIDE = frozenset({-1, -2, -9, -15})
"""Statuses of SIGHUP, SIGINT, SIGKILL and SIGTERM: somebody else's. A crash (SIGSEGV, SIGABRT) is the server's own."""
_OWN_KILL = re.compile(r"Received sigquit from a child process|SIGQUIT received\.")
"""SGLang's main process says so (while it starts, and once it listens) and kills itself when its scheduler failed."""
_CHILD_KILLED = re.compile(r"exit code:? -(?:9|15)\b")


_LOG_NAME = re.compile(r" \(log: .*\)$")
_STATUS = re.compile(r"exited with status (-?\d+)")
_KILLED = "something outside killed it: often the kernel, for want of memory (dmesg says so)"
_NO_GPU_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|Not enough memory|CUDA error: out of memory")


def last_error(log: str) -> str:
    """Return the last line of a log that names an error and is not an echo of one; else its last line."""
    lines = log.splitlines()
    echo = ""
    for line in reversed(lines):
        found = _ERROR.search(line) or _USAGE.search(line)
        if found is None:
            continue
        if not _ECHO.search(found[1]):
            return found[1][:_LONGEST]
        echo = echo or found[1][:_LONGEST]
    written = [line.strip() for line in lines if line.strip()]
    return echo or (written[-1][:_LONGEST] if written else "the log is empty")


def names_error(log: str) -> bool:
    """Return whether a log names an error that is more than the echo of one."""
    found = (_ERROR.search(line) or _USAGE.search(line) for line in log.splitlines())
    return any(match is not None and not _ECHO.search(match[1]) for match in found)


def killed_outside(status: int | None, log: str) -> bool:
    """Return whether something else ended the server: a kill from outside, or the kernel's for want of memory.

    Args:
        status: exit status of its main process, negative for a signal; None while it runs.
    """
    if status in _KILLED_OUTSIDE and not _OWN_KILL.search(log):
        return True
    return _CHILD_KILLED.search(log) is not None and not names_error(log)


def lacks_gpu_memory(log: str) -> bool:
    """Return whether a log says that the GPU's memory was not enough, at start or later."""
    return _NO_GPU_MEMORY.search(log) is not None


def boot_failure(name: str, error: ServerError, log: str, sharing: int) -> str:
    """Return why a server did not start; raise EnvironmentFault when that says nothing about its code.

    Args:
        name: of its log.
        sharing: servers on its GPU, itself included.
    """
    what, last = _LOG_NAME.sub("", str(error).splitlines()[0]), last_error(log.partition(HANG_MARK)[0])
    if what.startswith("the server was not healthy after"):
        remedy = "its log ends with what it was doing; a busy or slow machine: --timeout longer, --jobs fewer"
        raise _machine(name, what, last, remedy) from error
    if isinstance(error, PortTakenError):
        raise _machine(name, what, last, "other programs take the ports: end them") from error
    if what.startswith("cannot start"):
        raise _machine(name, what, "", "name an interpreter that runs: --python") from error
    status = _STATUS.search(what)
    _check_machine(name, what, log, int(status[1]) if status else None, sharing, error)
    return f"{what}: {last}"


def request_failure(name: str, error: ServerError, log: str, sharing: int, status: int | None) -> str:
    """Return why a server that was up failed a request; raise EnvironmentFault when its code is not to blame.

    Args:
        status: exit status of its main process, None while it runs.
    """
    _check_machine(name, "the server was killed" if status is not None else "no answer", log, status, sharing, error)
    return str(error).splitlines()[0]


def _check_machine(name: str, what: str, log: str, status: int | None, sharing: int, error: ServerError) -> None:
    if killed_outside(status, log):
        raise _machine(name, what, last_error(log), _KILLED) from error
    if sharing > 1 and lacks_gpu_memory(log):
        raise _machine(
            name, what, last_error(log), f"{sharing} servers share its GPU: --jobs fewer, or smaller --server-args"
        ) from error


def _machine(name: str, what: str, last: str, remedy: str) -> EnvironmentFault:
    """Return the fault of a machine, which leaves no record."""
    said = f"; the last line of {name}.log: {last}" if last else ""
    return EnvironmentFault(f"{name}: {what}{said}", remedy=f"{remedy}. Nothing is recorded: the next call tries again")
