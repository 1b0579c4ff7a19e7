"""From a server's log to the one line that says why it did not serve. Pure."""

from __future__ import annotations

import re

_ERROR = re.compile(r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:\[\w+\])?: ?.*\S)\s*$")
_USAGE = re.compile(r"(?:^|\s)(error: .*\S)\s*$")
_ECHO = re.compile(r"scheduler (?:died|is dead)|Initialization failed|exit ?code", re.IGNORECASE)
"""What a parent process says about a child that died: true, and no reason."""
_LONGEST = 300


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
