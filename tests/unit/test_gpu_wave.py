"""A wave of servers: asked side by side on different GPUs, timed alone, and none left behind, stopped or not."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import ServerError
from tests.gpu.wave import Quiet, Seat, gpu_list, run, seats


class Server:
    """A process of its own group that does nothing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        self.pid = self.process.pid

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def boot(seat: Seat) -> None:
    seat.server = Server()  # type: ignore[assignment]


def failed(seat: Seat, error: Exception) -> dict[str, Any]:
    return {"error": str(error)}


def others(wave: list[Seat], seat: Seat) -> list[Any]:
    return [other.server for other in wave if other is not seat]


def settled(server: Any, state: str) -> bool:
    """Whether a signal that was sent has arrived within two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if (server.state == "T") == (state == "T"):
            return True
        time.sleep(0.01)
    return False


def test_cells_are_dealt_to_the_gpus_and_each_sees_its_own() -> None:
    wave = seats(["a", "b", "c"], ["0", "3"])
    assert [(seat.cell, seat.environment) for seat in wave] == [
        ("a", {"CUDA_VISIBLE_DEVICES": "0"}),
        ("b", {"CUDA_VISIBLE_DEVICES": "3"}),
        ("c", {"CUDA_VISIBLE_DEVICES": "0"}),
    ]
    assert seats(["a"], [None])[0].environment == {}


def test_gpus_are_indices() -> None:
    assert gpu_list("0,2") == ["0", "2"]
    with pytest.raises(argparse.ArgumentTypeError, match="'0;1' is no list"):
        gpu_list("0;1")


def test_each_gpu_asks_one_server_at_a_time_and_timings_are_alone(tmp_path: Path) -> None:
    wave = seats(["a", "b", "c", "d"], ["0", "1"])
    busy: list[str] = []
    most: list[int] = []
    meet = threading.Barrier(2, timeout=10)  # both GPUs ask at the same time, twice

    def ask(seat: Seat) -> None:
        assert seat.server
        assert seat.gpu
        assert seat.gpu not in busy
        busy.append(seat.gpu)
        meet.wait()
        assert settled(seat.server, "S")
        most.append(len(busy))
        meet.wait()
        busy.remove(seat.gpu)

    def timed(seat: Seat) -> None:
        assert not busy
        busy.append("timing")
        assert all(settled(other, "T") for other in others(wave, seat))
        assert settled(seat.server, "S")
        seat.record["timed"] = True
        busy.remove("timing")

    run(wave, boot, ask, timed, quiet=Quiet(tmp_path / "lock"), failed=failed)
    assert max(most) == 2
    assert all(seat.record["timed"] and seat.record["boot_s"] >= 0 for seat in wave)
    assert all(seat.server.process.returncode is not None for seat in wave)  # type: ignore[union-attr]


def test_a_server_that_fails_is_asked_no_more_and_the_rest_goes_on(tmp_path: Path) -> None:
    wave = seats(["no-boot", "dies", "good"], [None])
    asked: list[str] = []

    def start(seat: Seat) -> None:
        if seat.cell == "no-boot":
            raise ServerError("no port", remedy="")
        boot(seat)

    def ask(seat: Seat) -> None:
        asked.append(seat.cell)
        if seat.cell == "dies":
            seat.server.process.kill()  # type: ignore[union-attr]
            raise ServerError("gone", remedy="")

    def timed(seat: Seat) -> None:
        asked.append(f"timed {seat.cell}")

    run(wave, start, ask, timed, quiet=Quiet(tmp_path / "lock"), failed=failed)
    assert asked == ["dies", "good", "timed good"]
    assert [seat.record.get("error") for seat in wave] == ["no port", "gone", None]


def test_a_fault_of_the_script_leaves_no_server(tmp_path: Path) -> None:
    wave = seats(["a", "b"], ["0", "1"])

    def ask(seat: Seat) -> None:
        if seat.cell == "a":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(wave, boot, ask, lambda seat: None, quiet=Quiet(tmp_path / "lock"), failed=failed)
    assert all(seat.server.process.returncode is not None for seat in wave)  # type: ignore[union-attr]


def test_a_timing_waits_for_the_questions_of_another_script(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path / "lock")
    order: list[str] = []
    with quiet.shared():
        timing = threading.Thread(
            target=run,
            args=(seats(["a"], [None]), boot, lambda seat: order.append("asked"), lambda seat: order.append("timed")),
            kwargs={"quiet": quiet, "failed": failed},
        )
        timing.start()
        deadline = time.monotonic() + 10
        while "asked" not in order and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert order == ["asked"]
    timing.join(timeout=10)
    assert order == ["asked", "timed"]
