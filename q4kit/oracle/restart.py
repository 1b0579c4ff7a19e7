"""The restart command between a floor's runs: looked for before anything is measured, run, and waited for."""

from __future__ import annotations

import os
import shlex
import subprocess
import time

from q4kit.errors import EnvironmentFault, ServerError, UsageError
from q4kit.server.client import Client

TIMEOUT_S = 900.0
"""How long the command may take, and then the server until it answers, seconds."""
_SHELL = "/bin/sh"
_EXPANDED = frozenset("$`*?[{")
"""A word with one of these names its program only after the shell's expansion."""
_WHAT = (
    "it must stop the old server, start the new one in the background and end with 0, "
    'like scripts/restart_server.sh (docs/ORACLE.md, "A floor with restarts")'
)


def program(command: str) -> str | None:
    """Return the first word that a shell command runs; None where only the shell can tell.

    Raises:
        UsageError: empty, or a quote is not closed.
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise UsageError(f"--restart-cmd {command!r}: {error}", remedy="Close the quote.") from error
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        del words[0]  # a variable for the command
    if not words:
        raise UsageError(f"--restart-cmd {command!r} names no program", remedy=f"Name a command: {_WHAT}.")
    word = words[0]
    if _EXPANDED & set(word) or not set(word) - set(lexer.punctuation_chars):
        return None
    return os.path.expanduser(word)


def check(command: str) -> None:
    """Raise `UsageError` when the command's program does not exist: better before the first run than after it."""
    word = program(command)
    if word is None:
        return
    if "/" in word:
        found = os.path.isfile(word) and os.access(word, os.X_OK)  # dash's command -v does not ask for the bit
    else:
        # The shell itself is asked: it knows its own commands (cd, exit) beside PATH.
        asked = subprocess.run([_SHELL, "-c", 'command -v -- "$1"', _SHELL, word], capture_output=True, check=False)
        found = asked.returncode == 0
    if not found:
        kind = "not executable" if os.path.isfile(word) else "not found"
        remedy = f"chmod +x {shlex.quote(word)}" if os.path.isfile(word) else f"Name a command that exists: {_WHAT}"
        raise UsageError(f"--restart-cmd {command!r}: {word} is {kind}", remedy=f"{remedy}.")


def run(command: str, base_url: str) -> None:
    """Run the restart command and wait until the server answers.

    Raises:
        EnvironmentFault: the command failed, or did not end.
        ServerError: it ended with 0, but no server answers.
    """
    try:
        done = subprocess.run(command, shell=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"restart command did not end within {TIMEOUT_S:.0f} s: {command}", remedy=f"Run it by hand: {_WHAT}."
        ) from error
    if done.returncode:
        raise EnvironmentFault(
            f"restart command ended with {done.returncode}: {command}", remedy=f"Run it by hand: {_WHAT}."
        )
    deadline = time.monotonic() + TIMEOUT_S
    with Client(base_url, 10.0) as client:
        while True:
            try:
                client.health()
                return
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)
