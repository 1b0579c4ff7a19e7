"""The host's side of a waiting step, against a thread that stands in for the GPU: exact, and never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.gpu.ple_memop import drive, protocol_cases
from tests.gpu.step_chain import FAILED, Chain, first_difference, write_table
from tests.gpu.step_engine import CpuEngine
from tests.gpu.step_server import HostServer, build_native
from tests.gpu.step_watchdog import Flags, Watchdog

ROWS, STEPS = 3000, 60


@pytest.fixture
def flags() -> Iterator[Flags]:
    shared = Flags()
    with Watchdog(shared, limit_s=60):
        yield shared


@pytest.fixture
def table(tmp_path: Path) -> np.ndarray:
    return write_table(tmp_path, ROWS)


def read_from(table: np.ndarray):
    def read(ids: np.ndarray, rows: np.ndarray) -> None:
        rows[:] = table[ids]

    return read


def test_protocol_holds_for_every_mode_and_server(flags: Flags, table: np.ndarray) -> None:
    cases = list(
        protocol_cases(
            lambda mode: CpuEngine(mode, Chain.make(), table, flags),
            flags, Chain.make(), table, read_from(table), ["memop"], None, STEPS,
        )
    )  # fmt: skip
    assert [case for case in cases if not case["ok"]] == []
    assert {(case["case"], case["mode"]) for case in cases} >= {
        ("correct", "pinned"), ("correct", "gate"), ("correct", "memop"), ("stall", "memop"), ("abort", "memop"),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["gate", "memop"])
def test_a_wrong_row_is_seen(flags: Flags, table: np.ndarray, mode: str) -> None:
    calls = 0

    def read(ids: np.ndarray, rows: np.ndarray) -> None:
        nonlocal calls
        rows[:] = table[ids]
        if calls == 20:
            rows[5, 7] ^= 1
        calls += 1

    chain = Chain.make()
    tokens, _, failed = drive(CpuEngine(mode, chain, table, flags), mode, "inline", flags, read, STEPS)
    assert first_difference(chain.run(table, STEPS), tokens) == 20
    assert failed == []


def test_watchdog_fails_a_wait_at_its_deadline_and_only_then(flags: Flags) -> None:
    flags.arm(0.3)
    time.sleep(0.1)
    assert flags.get("rows_ready") == 0
    time.sleep(0.4)
    assert flags.get("rows_ready") == FAILED
    assert flags.get("fired") == 1
    assert flags.get("deadline_ns") == 0
    flags.clear()
    flags.arm(0.05)
    assert flags.disarm() == 0
    time.sleep(0.2)
    assert flags.get("rows_ready") == 0


def test_no_ids_in_time_is_an_error_that_names_the_step(flags: Flags) -> None:
    server = HostServer(flags, np.zeros(16, np.int64), np.zeros((16, 160), np.uint8), lambda ids, rows: None, 0.1)
    with pytest.raises(TimeoutError, match=r"step 0: no row ids after 0\.1 s"):
        server.serve(0)


def test_watchdog_ends_a_process_that_hangs_past_the_limit(tmp_path: Path) -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from tests.gpu.step_watchdog import Flags, Watchdog\n"
        "with Watchdog(Flags(), 0.5):\n    time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, str(root)], timeout=30, env={**os.environ})
    assert done.returncode == -9
    assert time.monotonic() - start < 20


def test_native_loop_serves_the_same_rows(flags: Flags, table: np.ndarray, tmp_path: Path) -> None:
    from tests.gpu.step_server import NativeThread

    library = build_native(tmp_path)
    if library is None:
        pytest.skip("no C++ compiler on PATH")
    chain = Chain.make()
    engine = CpuEngine("memop", chain, table, flags)
    tokens, _, _ = drive(
        engine, "memop", "native", flags, read_from(table), STEPS,
        native=lambda: NativeThread(library, flags, engine.host_ids, engine.host_rows, table),
    )  # fmt: skip
    assert first_difference(chain.run(table, STEPS), tokens) is None
    assert flags.get("served") == STEPS
