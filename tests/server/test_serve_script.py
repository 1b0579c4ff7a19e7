"""`scripts/serve.sh --profile tiny` on the real server: it serves, proves it, writes its papers, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import ROOT, cached_model

from q4kit import smoke
from q4kit.server.client import Client
from q4kit.server.launch import _free_port
from q4kit.server.processes import members
from q4kit.tinymodel import PRESETS


@dataclass
class Serving:
    """A running serve.sh."""

    process: subprocess.Popen[str]
    port: int
    run_dir: Path
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def server_pid(self) -> int:
        words = self.text().split("process ", 1)[1]
        return int(words.split(None, 1)[0].rstrip("\n"))


def start(tmp: Path, *extra: str) -> Serving:
    """Start serve.sh with the environment of this interpreter and wait until it says that it is ready."""
    port, output = _free_port(), tmp / "output"
    command = [
        "bash", str(ROOT / "scripts" / "serve.sh"), "--profile", "tiny", "--model", str(cached_model(PRESETS["mini"])),
        "--port", str(port), "--run-dir", str(tmp / "run"), *extra,
    ]  # fmt: skip
    with output.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "VENV": str(Path(sys.executable).parent.parent)},
        )  # fmt: skip
    serving = Serving(process, port, tmp / "run", output)
    deadline = time.monotonic() + 900
    while "\nready: " not in serving.text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"serve.sh did not become ready:\n{serving.text()[-4000:]}")
        time.sleep(0.5)
    return serving


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    running = start(tmp_path_factory.mktemp("serve"))
    yield running
    running.process.kill()


def test_it_serves_and_the_smoke_test_holds_again(serving: Serving) -> None:
    with Client(f"http://127.0.0.1:{serving.port}") as client:
        result = smoke.run(client)
    assert result.problems == []
    assert json.loads((serving.run_dir / "smoke.json").read_text())["verdict"] == "HOLDS"


def test_environment_json_is_the_provenance_of_this_server(serving: Serving) -> None:
    block = json.loads((serving.run_dir / "environment.json").read_text())
    assert block["tool"]["name"] == "serve"
    assert block["server_args"]["ple_offload_backend"] == "nvme"
    assert block["server_args"]["context_length"] == 8192
    assert block["server_env"]["SGLANG_PLATFORM"] == "cpu_ref"
    assert block["series"]["state"] == "applied"
    assert len(block["model"]["weights"]) == 64


def test_garbage_collection_is_frozen_before_it_is_ready(serving: Serving) -> None:
    assert "/freeze_gc" in (serving.run_dir / "server.log").read_text()
    text = serving.text()
    assert text.index("garbage collection frozen") < text.index("Chat smoke test") < text.index("\nready: ")


def test_sigterm_ends_it_in_order_and_leaves_no_process(serving: Serving) -> None:
    """Defined last of those that share the server: it ends it."""
    server = serving.server_pid()
    assert len(members(server)) >= 3  # server, scheduler, detokenizer
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(timeout=120) == 0
    assert members(server) == []
    assert "no process of the server is left" in serving.text()
    assert "crashed" not in (serving.run_dir / "server.log").read_text()


def test_a_server_that_dies_ends_serve_with_its_code(tmp_path: Path) -> None:
    """SIGKILL to the server's main process: serve.sh reports it with the code of the signal and cleans up."""
    running = start(tmp_path)
    server = running.server_pid()
    os.kill(server, signal.SIGKILL)
    assert running.process.wait(timeout=120) == 128 + signal.SIGKILL
    assert members(server) == []
    assert "ended by itself with status -9" in running.text()
