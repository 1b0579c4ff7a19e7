"""Exit codes shared by every tool (documented in README.md, "Exit codes")."""

from __future__ import annotations

HOLDS = 0
"""The claim, comparison or check holds."""
NEGATIVE = 1
"""The verdict is negative: DIFFERENT, a needle lost, a check red."""
USAGE = 2
"""The command line or an input file is wrong."""
INCONCLUSIVE = 3
"""Not enough evidence, or the two sides cannot be compared."""
FAULT = 4
"""The server or the environment failed; nothing was measured."""
INTERRUPTED = 130
"""Stopped by the user; the partial result is kept and marked as partial."""
PIPE_CLOSED = 141
"""Nobody reads the output any more (`tool | head`); as a shell reports SIGPIPE, 128 + 13."""
