"""A process that passes for SGLang's server where only starting, pausing and ending it counts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SERVER = """
import http.server, json, os, sys
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"model_path": arguments["--model-path"], "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *_):
        pass
print("up", flush=True)
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


def write_interpreter(folder: Path, script: str) -> Path:
    """Return an interpreter that runs the lines of `script` and, where they do not leave, becomes the server.

    $K is the prefix that it is started for.
    """
    server, python = folder / "server.py", folder / "python"
    server.write_text(SERVER)
    python.write_text(
        f'#!/bin/sh\nK=${{PYTHONPATH##*/k}}\nK=${{K%%/*}}\n{script}\nexec {sys.executable} {server} "$@"\n'
    )
    python.chmod(0o755)
    return python


def make_tree(folder: Path, prefix: int) -> Path:
    """Return a folder for PYTHONPATH that says its prefix in its name and holds an empty package."""
    path = folder / f"k{prefix}" / "python"
    (path / "sglang").mkdir(parents=True, exist_ok=True)
    return path


def processes(word: str) -> dict[int, str]:
    """Return the living processes with `word` in their command line, and the state of each: T is stopped."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if word in (entry / "cmdline").read_text() and state not in "ZX" and int(entry.name) != os.getpid():
                found[int(entry.name)] = state
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once a condition holds; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
