"""Stands where `python -m sglang.launch_server` would: a real process, socket and child, no model.

`FAKE_MODE`: serve, die (after printing a reason), hang (503 for ever), silent (never binds), stubborn (serve;
neither it nor its child heeds SIGTERM), stuck (not a word, nor from its children; `FAKE_ABORT`: it ignores SIGABRT, or
notes in `FAKE_STATE`.aborted the core limit that it finds and carries on). `FAKE_STATE` names a file that gets pids,
arguments and environment. With `--api-key` it answers nobody without the key but /health, as SGLang; `FAKE_STATE`.seen
gets path and Authorization of every request.
"""

from __future__ import annotations

import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path


def argument(flag: str) -> str:
    """Return the value after `flag` on the command line."""
    return sys.argv[sys.argv.index(flag) + 1]


def wanted_authorization() -> str | None:
    """Return the header that --api-key asks for, in either spelling."""
    for word in sys.argv:
        if word.startswith("--api-key="):
            return f"Bearer {word.partition('=')[2]}"
    return f"Bearer {argument('--api-key')}" if "--api-key" in sys.argv else None


def wait_for_a_lock_that_never_comes() -> None:
    """Hang where a stack can show it."""
    time.sleep(600)


def note_core_limit(_number: int, _frame: object) -> None:
    """Handle SIGABRT and live on."""
    Path(os.environ["FAKE_STATE"] + ".aborted").write_text(json.dumps(resource.getrlimit(resource.RLIMIT_CORE)))


STUCK_CHILD = """
import ctypes, subprocess, time
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: as SGLang's children
def child_waits_for_its_parent():
    time.sleep(600)
subprocess.Popen(["sleep", "600"])
child_waits_for_its_parent()
"""


def main() -> int:
    """Behave as FAKE_MODE says."""
    mode = os.environ["FAKE_MODE"]
    child_code = "import time; time.sleep(600)"
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child_code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    if mode == "stuck":
        child_code = STUCK_CHILD
        if abort := os.environ.get("FAKE_ABORT"):
            signal.signal(signal.SIGABRT, signal.SIG_IGN if abort == "ignore" else note_core_limit)
        else:
            signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))  # as SGLang ends when its scheduler did
    child = subprocess.Popen([sys.executable, "-c", child_code])
    state = {"pid": os.getpid(), "child": child.pid, "argv": sys.argv[1:], "env": dict(os.environ)}
    with Path(os.environ["FAKE_STATE"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(state) + "\n")
    if mode == "stuck":
        wait_for_a_lock_that_never_comes()
    print("fake server starts", flush=True)
    if mode == "die":
        time.sleep(0.3)
        print("RuntimeError: out of unobtainium", flush=True)
        return 3
    if mode == "silent":
        time.sleep(600)
    healthy_at = time.monotonic() + (0.5 if mode != "hang" else 1e9)
    model = argument("--model-path")

    wanted = wanted_authorization()
    seen = Path(os.environ["FAKE_STATE"] + ".seen")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown = self.headers.get("Authorization")
            with seen.open("a", encoding="utf-8") as file:
                file.write(json.dumps([self.path, shown]) + "\n")
            if wanted and shown != wanted and self.path != "/health":
                self.send_response(401)
                self.end_headers()
                return
            self.send_response(200 if time.monotonic() >= healthy_at else 503)
            self.end_headers()
            if self.path == "/model_info":
                self.wfile.write(json.dumps({"model_path": model}).encode())

        do_POST = do_GET  # noqa: N815

    http.server.HTTPServer.allow_reuse_address = False
    http.server.ThreadingHTTPServer(("127.0.0.1", int(argument("--port"))), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
