"""Kill a process group when the process that started this one is gone, however it went (SIGKILL included).

Run as `python -m q4kit.server.watchdog PGID` with a pipe as stdin. The owner writes a byte to call the watch
off; end of file without one means that the owner died, and the group is killed. atexit handlers alone would
leave a server of several gigabytes running after a SIGTERM or SIGKILL of a test run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def watch(group: int, stdin_fd: int = 0) -> int:
    """Block until the owner speaks or dies; kill `group` in the second case. Return 0 always."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C for the owner's terminal group must not end the watch
    if not os.read(stdin_fd, 1):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1])))
