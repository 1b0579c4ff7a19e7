"""Every way to read the table gives the server the same answers: readers, sources, and a kernel without io_uring.

And a read that fails below io_uring, in the block layer, ends its request only, as one that fails in libc does.

Needs the patched SGLang (Q4_PYTHONPATH): the stock pin has no `--ple-offload-backend nvme`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import no_io_uring
import numpy as np
import pytest
from safetensors import safe_open
from serving import ROOT, Launcher, cached_model
from test_ple_nvme import CHUNK, EOS, FLAGS, NVME, Answer, ask, patched, payload, tokens

from q4kit.errors import ServerError
from q4kit.server.client import Client
from q4kit.tinymodel import PRESETS
from tests.patches.dying_disk import DyingDisk, NoDiskError, mounted

__all__ = ["patched"]  # a fixture

MODEL = replace(PRESETS["mini"], dtype="bfloat16", table_rows=20_000)
PAGE = 4096
NO_IO_URING = (sys.executable, str(Path(__file__).with_name("no_io_uring.py")))
PROMPTS = [
    tokens(60, 1),
    tokens(61, CHUNK + 1),
    tokens(62, 2 * CHUNK + 17),
    [*tokens(63, 40), EOS, *tokens(64, 1), EOS, EOS, *tokens(65, CHUNK)],
]
LAYERS = [one - 1 for one in MODEL.ple_layers]


def answers(client: Client) -> list[Answer]:
    return [ask(client, payload(prompt, 12, start=0)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def resident(patched: None, start_server: Launcher) -> list[Answer]:
    with start_server(cached_model(MODEL), *FLAGS) as server, Client(server.base_url) as client:
        return answers(client)


@pytest.fixture(scope="module")
def flat(patched: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat") / "table"
    path = os.pathsep.join(filter(None, [os.environ.get("Q4_PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    python = os.environ.get("Q4_PYTHON", sys.executable)
    tool = [python, ROOT / "tools" / "ple_table.py", "export", cached_model(MODEL)]
    for number in LAYERS:
        prefix = f"model.language_model.layers.{number}.ple.ple_embedding"
        command = [*tool, folder / f"layers.{number}", "--prefix", prefix]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return folder


def test_the_filter_forbids_io_uring_alone() -> None:
    call = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(425, 8, 0), ctypes.get_errno())"
    done = subprocess.run([*NO_IO_URING, sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-1", "1"]


def needs_io_uring() -> None:
    if why := no_io_uring.refusal():
        pytest.skip(f"io_uring cannot be used here: {why}")


def check_log(log: str, logged: str) -> None:
    """Check that each PLE layer's table, and no other, was opened with what `logged` says."""
    lines = [line for line in log.splitlines() if "PLE rows: " in line]
    assert len(lines) == len(LAYERS)
    for line in lines:
        assert logged in line
        assert ("EPERM" in line) == ("EPERM" in logged)


@pytest.mark.parametrize(
    ("reader", "source", "prefix", "logged"),
    [
        ("auto", "flat", NO_IO_URING, "PLE rows: pread (auto asked for), io_uring: EPERM"),
        ("pread", "flat", (), "PLE rows: pread (pread asked for)"),
        ("mmap", "flat", (), "PLE rows: mmap"),
        ("mmap", "shards", (), "PLE rows: mmap"),
        ("io_uring", "shards", (), "PLE rows: io_uring (io_uring asked for)"),
    ],
    ids=["auto without io_uring, flat", "pread, flat", "mmap, flat", "mmap, shards", "io_uring, shards"],
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
    """The other pairs: auto and pread on shards in test_ple_nvme.py, io_uring on a flat table below."""
    if reader == "io_uring":
        needs_io_uring()
    where = ("--ple-offload-dir", str(flat)) if source == "flat" else ()
    with (
        start_server(
            cached_model(MODEL), *FLAGS, *NVME, "--ple-offload-reader", reader, *where, prefix=prefix
        ) as server,
        Client(server.base_url) as client,
    ):
        assert answers(client) == resident
        check_log(server.log_path.read_text(), logged)


@dataclass
class Served:
    """A server that reads flat tables with io_uring, the first of them on `disk`, if there is one."""

    client: Client
    log: Path
    table: Path
    disk: DyingDisk | None
    why_none: str


@pytest.fixture(scope="module")
def served(
    patched: None, start_server: Launcher, flat: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    needs_io_uring()
    folder = tmp_path_factory.mktemp("disk")
    with ExitStack() as stack:
        disk, why_none = None, ""
        try:
            disk = stack.enter_context(mounted(folder))
        except NoDiskError as error:
            why_none = f"no disk that can die: {error}"
        tables = folder / "tables"
        first, *others = (f"layers.{number}" for number in LAYERS)
        shutil.copytree(flat / first, (disk.mount if disk else folder) / first)
        tables.mkdir()
        (tables / first).symlink_to((disk.mount if disk else folder) / first)
        for other in others:
            (tables / other).symlink_to(flat / other)
        flags = ("--ple-offload-reader", "io_uring", "--ple-offload-dir", str(tables))
        server = stack.enter_context(start_server(cached_model(MODEL), *FLAGS, *NVME, *flags))
        client = stack.enter_context(Client(server.base_url))
        file = json.loads((tables / first / "ple.json").read_text())["file"]
        yield Served(client, server.log_path, tables / first / file, disk, why_none)


def test_answers_of_io_uring_on_a_flat_table_equal_the_resident_tables(resident: list[Answer], served: Served) -> None:
    assert answers(served.client) == resident
    check_log(served.log.read_text(), "PLE rows: io_uring (io_uring asked for)")


def buffer(name: str) -> np.ndarray:
    """Return a buffer of the first PLE layer's hash, as the checkpoint has it."""
    full = f"model.language_model.layers.{LAYERS[0]}.ple.ple_embedding.{name}"
    files = json.loads((cached_model(MODEL) / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(cached_model(MODEL) / files[full], "np") as file:
        return np.asarray(file.get_tensor(full))


class Lost:
    """The end of the first table from `cut` on, and who reads of it."""

    def __init__(self, table: Path) -> None:
        self.multipliers = buffer("layer_multipliers")
        self.sizes, self.starts = buffer("ngram_heads_vocab_sizes"), buffer("ngram_heads_offsets")
        self.row_bytes = table.stat().st_size // json.loads(table.with_name("ple.json").read_text())["rows"]
        # The page of the last row that tokens hash to; only padding comes after it.
        self.cut = (int(self.sizes.sum()) - 1) * self.row_bytes // PAGE * PAGE

    def rows(self, ids: Sequence[int]) -> set[int]:
        """Return the byte offsets of the lost rows that the last of `ids` reads."""
        window = np.array([EOS, EOS, *ids][:-4:-1])  # newest first
        with np.errstate(over="ignore"):
            hashes = np.bitwise_xor.accumulate(window * self.multipliers)[1:]  # of two tokens, of three
        offsets = (hashes.repeat(len(self.sizes) // 2) % self.sizes + self.starts) * self.row_bytes
        return {int(offset) for offset in offsets if offset + self.row_bytes > self.cut}

    def prompt(self, seed: int, length: int, doomed: int = -1) -> list[int]:
        """Return random tokens of which the one at `doomed` reads a lost row, and no other does."""
        draw, ids = np.random.default_rng(seed), list[int]()
        while len(ids) < length:
            ids.append(int(draw.integers(3, 500)))
            if bool(self.rows(ids)) != (len(ids) - 1 == doomed):
                ids.pop()
        return ids

    def spares(self, ids: Sequence[int]) -> bool:
        return EOS not in ids and not any(self.rows(ids[: end + 1]) for end in range(len(ids)))


def test_a_row_that_the_disk_fails_to_read_ends_its_request_only(served: Served) -> None:
    if served.disk is None:
        pytest.skip(served.why_none)
    client, lost, at = served.client, Lost(served.table), (3, 2 * CHUNK + 3)  # in the first chunk and in the last
    doomed = [lost.prompt(70, 3 * CHUNK - 5, position) for position in at]
    client.flush_cache()
    before = [ask(client, payload(ids)).output_ids for ids in doomed]
    for seed in range(80, 90):
        healthy = lost.prompt(seed, 30)
        client.flush_cache()
        expected = ask(client, payload(healthy, 12))
        if lost.spares([*healthy, *expected.output_ids]):
            break
    else:
        pytest.fail("every answer reads of the lost end")
    served.disk.lose(served.table, lost.cut)
    try:
        for ids, position in zip(doomed, at, strict=True):
            client.flush_cache()
            with ThreadPoolExecutor(1) as pool:
                beside = pool.submit(ask, client, payload(healthy, 12))
                with pytest.raises(ServerError) as error:
                    client.generate(payload(ids))
                assert beside.result().output_ids == expected.output_ids
            for named in ("500", str(served.table), "errno 5 EIO"):
                assert named in str(error.value)
            assert int(re.findall(r"at byte (\d+)", str(error.value))[0]) in lost.rows(ids[: position + 1])
            client.flush_cache()
            assert ask(client, payload(healthy, 12)) == expected
    finally:
        served.disk.heal()
    client.flush_cache()
    assert [ask(client, payload(ids)).output_ids for ids in doomed] == before
