"""A wave of servers: asked side by side on different GPUs, timed alone in rounds, saved stage by stage, none left."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import ServerError
from tests.gpu.wave import Clock, Quiet, Seat, Stopped, gpu_list, run, seats


class Server:
    """A process of its own group that does nothing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        self.pid = self.process.pid

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def pause(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

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

    def timed(seat: Seat, number: int) -> None:
        assert not busy
        busy.append("timing")
        assert all(settled(other, "T") for other in others(wave, seat))
        assert settled(seat.server, "S")
        seat.record["timed"] = True
        busy.remove("timing")

    run(wave, boot, ask, timed, rounds=1, quiet=Quiet(tmp_path / "lock"), failed=failed)
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

    def timed(seat: Seat, number: int) -> None:
        asked.append(f"timed {seat.cell}")

    run(wave, start, ask, timed, rounds=1, quiet=Quiet(tmp_path / "lock"), failed=failed)
    assert asked == ["dies", "good", "timed good"]
    assert [seat.record.get("error") for seat in wave] == ["no port", "gone", None]


def test_a_fault_of_the_script_leaves_no_server(tmp_path: Path) -> None:
    wave = seats(["a", "b"], ["0", "1"])

    def ask(seat: Seat) -> None:
        if seat.cell == "a":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(wave, boot, ask, lambda seat, number: None, rounds=1, quiet=Quiet(tmp_path / "lock"), failed=failed)
    assert all(seat.server.process.returncode is not None for seat in wave)  # type: ignore[union-attr]


def test_a_timing_waits_for_the_questions_of_another_script(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path / "lock")
    order: list[str] = []
    with quiet.shared():
        timing = threading.Thread(
            target=run,
            args=(seats(["a"], [None]), boot, lambda seat: order.append("asked"), lambda *_: order.append("timed")),
            kwargs={"rounds": 1, "quiet": quiet, "failed": failed},
        )
        timing.start()
        deadline = time.monotonic() + 10
        while "asked" not in order and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert order == ["asked"]
    timing.join(timeout=10)
    assert order == ["asked", "timed"]


def ended(wave: list[Seat]) -> bool:
    return all(seat.server.process.returncode is not None for seat in wave if seat.server)  # type: ignore[attr-defined]


def test_rounds_alternate_their_order_and_every_stage_is_saved(tmp_path: Path) -> None:
    wave = seats(["a", "b", "c"], [None])
    wave[1].asked, wave[2].rounds = True, 1
    turns: list[str] = []
    saved: list[tuple[str, int]] = []

    def turn(seat: Seat, number: int) -> None:
        assert all(settled(other, "T") for other in others(wave, seat))
        turns.append(f"{seat.cell}{number}")

    run(
        wave, boot, lambda seat: turns.append(f"ask {seat.cell}"), turn, rounds=3, quiet=Quiet(tmp_path / "lock"),
        failed=failed, save=lambda seat: saved.append((seat.cell, len(turns))),
        close=lambda seat: turns.append(f"close {seat.cell}"),
    )  # fmt: skip
    assert turns == [
        "ask a", "ask c", "a0", "b0", "c0", "b1", "a1", "a2", "b2", "close a", "close b", "close c",
    ]  # fmt: skip
    assert [count for _, count in saved] == list(range(1, len(turns) + 1))
    assert [cell for cell, _ in saved] == [turn.split()[-1][0] for turn in turns]


def test_a_stage_that_cannot_end_in_time_is_not_started_and_named(tmp_path: Path) -> None:
    wave = seats(["a", "b"], [None])
    clock = Clock(budget_s=1000)
    clock.longest["turn"] = 2000
    turns: list[int] = []
    run(
        wave, boot, lambda seat: None, lambda seat, number: turns.append(number), rounds=1,
        quiet=Quiet(tmp_path / "lock"), failed=failed, clock=clock,
    )  # fmt: skip
    assert turns == []
    assert ended(wave)
    assert [text.split(",")[0] for text in clock.skipped] == ["a: turn not started", "b: turn not started"]
    assert "it takes 2000 s" in clock.skipped[0]


def test_nothing_boots_without_the_time_for_it(tmp_path: Path) -> None:
    clock = Clock(budget_s=5)
    clock.longest["boot"] = 10
    wave = seats(["a"], [None])
    run(
        wave, boot, lambda seat: None, lambda *_: None, rounds=1, quiet=Quiet(tmp_path / "lock"), failed=failed,
        clock=clock,
    )  # fmt: skip
    assert wave[0].server is None
    assert clock.skipped == ["1 servers: boot not started, 5 s left and it takes 10 s"]


def test_a_spent_budget_ends_the_run_and_keeps_what_was_saved(tmp_path: Path) -> None:
    wave = seats(["a", "b"], [None])
    saved: list[tuple[str, dict[str, Any]]] = []

    def ask(seat: Seat) -> None:
        seat.record["answer"] = 1
        if seat.cell == "b":
            deadline = time.monotonic() + 20
            while seat.server.process.poll() is None and time.monotonic() < deadline:  # type: ignore[union-attr]
                time.sleep(0.01)
            raise ServerError("the connection ended", remedy="")

    clock = Clock(budget_s=2)
    with clock.armed():
        run(
            wave, boot, ask, lambda *_: None, rounds=1, quiet=Quiet(tmp_path / "lock"), failed=failed, clock=clock,
            save=lambda seat: saved.append((seat.cell, dict(seat.record))),
        )  # fmt: skip
    assert clock.skipped == ["cut short by SIGALRM"]
    assert [(cell, record["answer"]) for cell, record in saved] == [("a", 1)]
    assert "error" not in wave[1].record  # it did not fail: it was ended
    assert ended(wave)


def test_a_termination_ends_the_block_once_and_handlers_return() -> None:
    before = signal.getsignal(signal.SIGTERM)
    clock, cleaned = Clock(), []
    with clock.armed():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Stopped:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not disturb the cleaning up
            cleaned.append(True)
            raise
    assert (clock.skipped, cleaned) == (["cut short by SIGTERM"], [True])
    assert signal.getsignal(signal.SIGTERM) is before
