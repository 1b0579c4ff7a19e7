"""Errors that a user can act on: what was found, what was expected, and the remedy."""

from __future__ import annotations

from q4kit import exit_codes


class Q4Error(Exception):
    """A failure to report without a traceback; carries the remedy and the tool's exit code."""

    exit_code: int = exit_codes.FAULT

    def __init__(self, message: str, *, remedy: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy
        if exit_code is not None:
            self.exit_code = exit_code

    def render(self) -> str:
        """Return the text a tool prints to stderr: one line, or two when there is a remedy."""
        return f"error: {self}" + (f"\nremedy: {self.remedy}" if self.remedy else "")


class UsageError(Q4Error):
    """The command line or an input file is wrong."""

    exit_code = exit_codes.USAGE


class NotComparableError(Q4Error):
    """Two measurements differ in something that makes comparing them meaningless."""

    exit_code = exit_codes.INCONCLUSIVE


class ServerError(Q4Error):
    """The server is down, refused the request, or answered something unusable."""

    exit_code = exit_codes.FAULT


class EnvironmentFault(Q4Error):  # noqa: N818 (a fault of the machine, not of the program)
    """The machine lacks something: a package, disk space, a device."""

    exit_code = exit_codes.FAULT
