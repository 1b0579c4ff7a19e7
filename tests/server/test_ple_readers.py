"""Every way to read the table gives the server the same answers: readers, sources, and a kernel without io_uring.

Needs the patched SGLang (Q4_PYTHONPATH): the stock pin has no `--ple-offload-backend nvme`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from serving import ROOT, Launcher, cached_model
from test_ple_nvme import CHUNK, FLAGS, NVME, Answer, ask, patched, payload, tokens

from q4kit.server.client import Client
from q4kit.tinymodel import PRESETS

__all__ = ["patched"]  # a fixture

MODEL = replace(PRESETS["mini"], dtype="bfloat16", table_rows=20_000)
NO_IO_URING = (sys.executable, str(Path(__file__).with_name("no_io_uring.py")))
PROMPTS = [tokens(60, 1), tokens(61, CHUNK + 1), tokens(62, 2 * CHUNK + 17)]


def answers(client: Client) -> list[Answer]:
    return [ask(client, payload(prompt, 12, start=0)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def resident(patched: None, start_server: Launcher) -> list[Answer]:
    with start_server(cached_model(MODEL), *FLAGS) as server, Client(server.base_url) as client:
        return answers(client)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat") / "table"
    path = os.pathsep.join(filter(None, [os.environ.get("Q4_PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    python = os.environ.get("Q4_PYTHON", sys.executable)
    tool = [python, ROOT / "tools" / "ple_table.py", "export", cached_model(MODEL)]
    for number in (one - 1 for one in MODEL.ple_layers):
        prefix = f"model.language_model.layers.{number}.ple.ple_embedding"
        command = [*tool, folder / f"layers.{number}", "--prefix", prefix]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return folder


def test_the_filter_forbids_io_uring_alone() -> None:
    call = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(425, 8, 0), ctypes.get_errno())"
    done = subprocess.run([*NO_IO_URING, sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-1", "1"]


@pytest.mark.parametrize(
    ("reader", "source", "prefix", "logged"),
    [
        ("auto", "shards", NO_IO_URING, "PLE rows: pread (auto asked for), io_uring: EPERM"),
        ("mmap", "flat", (), "PLE rows: mmap"),
        ("io_uring", "flat", (), "PLE rows: io_uring"),
    ],
    ids=["auto without io_uring", "mmap of a flat table", "io_uring of a flat table"],
)
def test_answers_equal_the_resident_tables(
    resident: list[Answer],
    start_server: Launcher,
    flat: Path,
    reader: str,
    source: str,
    prefix: tuple[str, ...],
    logged: str,
) -> None:
    where = ("--ple-offload-dir", str(flat)) if source == "flat" else ()
    with (
        start_server(
            cached_model(MODEL), *FLAGS, *NVME, "--ple-offload-reader", reader, *where, prefix=prefix
        ) as server,
        Client(server.base_url) as client,
    ):
        assert answers(client) == resident
        log = server.log_path.read_text()
    lines = [line for line in log.splitlines() if "PLE rows: " in line]
    assert len(lines) == len(MODEL.ple_layers), "one table a PLE layer in this checkpoint"
    for line in lines:
        assert logged in line
        assert ("EPERM" in line) == bool(prefix)
