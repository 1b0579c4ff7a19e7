"""From a server's end and its log to why it did not serve: the line that says it, and code or machine. Pure."""

from __future__ import annotations

import re

_ERROR = re.compile(r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:\[\w+\])?: ?.*\S)\s*$")
_USAGE = re.compile(r"(?:^|\s)(error: .*\S)\s*$")
_ECHO = re.compile(r"scheduler (?:died|is dead)|Initialization failed|exit ?code", re.IGNORECASE)
"""What a parent process says about a child that died: true, and no reason."""
_LONGEST = 300
_KILLED_OUTSIDE = frozenset({-1, -2, -9, -15})
"""Statuses of SIGHUP, SIGINT, SIGKILL and SIGTERM: somebody else's. A crash (SIGSEGV, SIGABRT) is the server's own."""
_OWN_KILL = "Received sigquit from a child process"
"""SGLang's main process says so and kills itself with SIGKILL when its scheduler failed."""
_CHILD_KILLED = re.compile(r"exit code:? -(?:9|15)\b")


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
    if status in _KILLED_OUTSIDE and _OWN_KILL not in log:
        return True
    return _CHILD_KILLED.search(log) is not None and not names_error(log)
