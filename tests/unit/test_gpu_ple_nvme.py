"""The GPU comparison of disk and pinned tables: judged by the floor or by bits, resumed, and never lost."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import ServerError
from tests.gpu import ple_nvme
from tests.gpu.ple_nvme import CELLS, Cell, Run, chosen, main, memory_gib, parse, verdict
from tests.gpu.timing import Method

METHOD = Method(400, 50, 16384, 500)


def sample(number: int, step_us: float, rate: float = 100.0, session: float = 1.0) -> dict[str, Any]:
    decode = {"step_us": step_us, "p50_us": step_us - 1, "p95_us": step_us + 1, "steps": 399, "ttft_s": 0.1}
    return {
        "session": session,
        "gpu": "0",
        "round": number,
        "at": 0.0,
        "method": METHOD.to_json(),
        "decode": decode,
        "prefill_tok_s": rate,
    }


def record(noise: float = 0.0) -> dict[str, Any]:
    """Return the raw record of one server; its second run is `noise` away from its first."""
    scored = [{"prompt": [-1.0, -2.0], "output": [-0.5], "ids": [4]}]
    again = copy.deepcopy(scored)
    again[0]["prompt"][1] += noise
    memory = {"RssAnon": 1.0, "RssFile": 0.5, "RssShmem": 0.0, "processes": 3}
    return {
        "scored": scored,
        "scored_again": again,
        "greedy": [1, 2, 3, 4],
        "greedy_again": [1, 2, 3, 4],
        "pair": [[1], [2]],
        "one_left": [5, 6],
        "uncached": [5, 6],
        "one_left_cached": 2048,
        "rss_gib_start": memory,
        "rss_gib_end": memory,
        "samples": [sample(0, 1000.0), sample(1, 2000.0), sample(2, 1000.0)],
    }


def test_speeds_are_ratios_within_a_round() -> None:
    disk = record()
    disk["samples"] = [
        sample(0, 1250.0, 90),
        sample(1, 2500.0, 80),
        sample(2, 1000.0, 110),
        sample(0, 9.0, 1, session=2),
    ]
    compared = verdict(record(), disk, METHOD)
    assert compared["equal"]
    ratio = compared["decode_ratio"]
    assert (ratio["median"], ratio["min"], ratio["max"], ratio["rounds"]) == (0.8, 0.8, 1.0, 3)
    assert compared["added_us_per_step"]["median"] == 250
    assert compared["prefill_ratio"]["median"] == pytest.approx(0.9)
    assert compared["step_p95_us"] == [1001, 1251]
    assert "decode_ratio" not in verdict(record(), disk)
    assert "decode_ratio" not in verdict(record(), disk, Method(200, 50, 16384, 500))


def test_a_bit_off_is_unequal_where_the_server_repeats_its_bits() -> None:
    disk = record()
    disk["scored"][0]["prompt"][0] += 1e-6
    disk["scored_again"][0]["prompt"][0] += 1e-6
    assert not verdict(record(), disk)["equal"]
    assert verdict(record(noise=1e-6), disk)["equal"]
    by_bits = verdict(record(noise=1e-6), disk, repeatable=True)  # another position varies, this one does not
    assert (by_bits["equal"], by_bits["bits"]["differ"], by_bits["bits"]["unrepeated"]) == (False, 1, 1)
    assert by_bits["bits"]["first"][:3] == [3, "prompt", 0]


def test_by_bits_an_output_logprob_counts_too() -> None:
    disk = record()
    for leg in ("scored", "scored_again"):
        disk[leg][0]["output"][0] += 1e-9
    assert not verdict(record(), disk, repeatable=True)["equal"]


def test_another_token_is_unequal_unless_the_server_itself_does_not_repeat() -> None:
    disk = record()
    disk["greedy"] = disk["greedy_again"] = [1, 2, 9, 4]
    assert not verdict(record(), disk)["equal"]
    assert not verdict(record(), disk, repeatable=True)["equal"]
    pinned = record()
    pinned["greedy_again"] = [1, 7, 3, 4]
    assert verdict(pinned, disk)["equal"]
    assert verdict(pinned, disk, repeatable=True)["greedy_equal"] is None


@pytest.mark.parametrize(("field", "value"), [("pair", [[1], [3]]), ("one_left", [5, 7])])
def test_by_bits_pairs_and_a_prefix_hit_count_too(field: str, value: Any) -> None:
    disk = record() | {field: value}
    assert verdict(record(), disk)["equal"]
    assert not verdict(record(), disk, repeatable=True)["equal"]


def test_names_and_pinned_cells() -> None:
    names = [cell.name for cell in CELLS]
    assert len(names) == len(set(names))
    assert {"pinned-full", "nvme-full-auto", "nvme-gate-cold-full-auto", "nvme-eager-auto"} <= set(names)
    for position, cell in enumerate(CELLS):
        assert cell.table == "pinned" or cell.base in CELLS[:position]


def test_memory_is_read() -> None:
    assert memory_gib(os.getpgid(0))["RssAnon"] > 0


class Stand:
    """Stands for servers: what they answer, which were booted, asked and timed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.fails: dict[str, str] = {}
        self.model, self.tree = folder / "model", folder / "tree"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.tree / "sglang").mkdir(parents=True)
        self.out = folder / "out"
        monkeypatch.setattr(ple_nvme, "launch", self.launch)
        monkeypatch.setattr(ple_nvme, "ask", self.ask)
        monkeypatch.setattr(ple_nvme, "take_sample", self.sample)

    def launch(self, *_: Any, log_path: Path, **_options: Any) -> Any:
        self.log.append(f"boot {log_path.stem}")
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)

        class Server:
            pid, log_path_ = process.pid, log_path

            @staticmethod
            def pause() -> None:
                os.killpg(process.pid, signal.SIGSTOP)

            @staticmethod
            def resume() -> None:
                os.killpg(process.pid, signal.SIGCONT)

            @staticmethod
            def stop() -> None:
                process.kill()
                process.wait()

            @staticmethod
            def log_tail(_lines: int) -> str:
                return ""

        return Server

    def ask(self, server: Any, *_: Any) -> dict[str, Any]:
        name = server.log_path_.stem
        self.log.append(f"ask {name}")
        if self.fails.get("ask") == name:
            raise ServerError("gone", remedy="")
        answers = record()
        del answers["samples"]
        return answers

    def sample(self, seat: Any, args: Any, number: int, session: float, *_: Any) -> dict[str, Any]:
        self.log.append(f"turn {seat.cell.name} {number}")
        if self.fails.get("turn") == f"{seat.cell.name} {number}":
            raise ServerError("gone", remedy="")
        mine = sample(number, 1000.0, session=session)
        mine["method"] = ple_nvme.method_of(args, seat.cell.graph).to_json()
        return mine

    def run(self, *more: str) -> int:
        self.log.clear()
        return main([
            str(self.out), f"--model={self.model}", f"--patched={self.tree}", "--hash-rows=0", "--rounds=2",
            *more, "--only", "nvme-full-auto",
        ])  # fmt: skip


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def printed(capsys: pytest.CaptureFixture[str], kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_disk_cell_brings_its_pinned_one_and_a_second_run_does_nothing(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stand.run() == 0
    assert stand.log[4:] == [
        "turn pinned-full 0", "turn nvme-full-auto 0", "turn nvme-full-auto 1", "turn pinned-full 1",
    ]  # fmt: skip
    (found,) = printed(capsys, "verdict")
    assert (found["cell"], found["equal"], found["decode_ratio"]["rounds"]) == ("nvme-full-auto", True, 2)
    assert stand.run() == 0
    assert stand.log == []
    assert printed(capsys, "verdict") == [found]


def test_answers_without_timings_are_completed_not_asked_again(stand: Stand) -> None:
    assert stand.run("--answers-only") == 0
    assert sorted(stand.log) == ["ask nvme-full-auto", "ask pinned-full", "boot nvme-full-auto", "boot pinned-full"]
    assert stand.run() == 0
    assert [line for line in stand.log if "ask" in line] == []
    assert len([line for line in stand.log if "turn" in line]) == 4


def test_a_server_lost_while_it_is_timed_keeps_its_answers_and_its_rounds(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.fails = {"turn": "nvme-full-auto 1"}
    assert stand.run() == 1
    kept = json.loads((stand.out / "nvme-full-auto.json").read_text())
    assert (len(kept["samples"]), kept["error"], "scored" in kept) == (1, "gone", True)
    stand.fails = {}
    assert stand.run() == 0
    assert stand.log[2:] == ["turn pinned-full 0", "turn nvme-full-auto 0"]
    assert printed(capsys, "verdict")[-1]["decode_ratio"]["rounds"] == 2


def test_what_a_lost_server_leaves_unknown_is_incomplete(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ple_nvme.Clock, "admits", lambda self, stage, who: stage in ("boot", "ask"))
    assert stand.run() == 3
    assert "nvme-full-auto: 2 of 2 rounds missing" in capsys.readouterr().err


def test_a_refused_sample_is_named_until_another_run_makes_up_for_it(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(seat: Any, args: Any, number: int, session: float, *_: Any) -> dict[str, Any]:
        taken = stand.sample(seat, args, number, session)
        if seat.cell.table == "nvme" and number:
            del taken["decode"]
            taken["refused"] = "nvme-full-auto: not cold"
        return taken

    monkeypatch.setattr(ple_nvme, "take_sample", refuse)
    assert stand.run() == 3
    assert capsys.readouterr().err.splitlines() == [
        "nvme-full-auto: 1 of 2 rounds missing", "nvme-full-auto: not cold",
    ]  # fmt: skip
    monkeypatch.setattr(ple_nvme, "take_sample", stand.sample)
    assert stand.run() == 0


def test_a_termination_ends_with_the_verdict_of_what_is_on_disk(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(seat: Any, args: Any, number: int, session: float, *_: Any) -> dict[str, Any]:
        if number:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return stand.sample(seat, args, number, session)

    monkeypatch.setattr(ple_nvme, "take_sample", end)
    assert stand.run() == 3
    out, err = capsys.readouterr()
    (found,) = [json.loads(line) for line in out.splitlines() if '"verdict"' in line]
    assert (found["equal"], found["decode_ratio"]["rounds"]) == (True, 1)
    assert "cut short by SIGTERM" in err.splitlines()
    assert "nvme-full-auto: 1 of 2 rounds missing" in err.splitlines()


def test_another_tree_is_another_measurement(stand: Stand) -> None:
    assert stand.run() == 0
    (stand.tree / "sglang" / "model.py").write_text("x = 1\n")
    assert stand.run() == 0
    assert len([line for line in stand.log if "ask" in line]) == 2


def test_timings_alone_ask_nothing(stand: Stand) -> None:
    assert stand.run("--timings-only") == 0
    assert [line for line in stand.log if "ask" in line] == []


def arguments(*more: str) -> Any:
    return parse(["out", "--model=m", "--patched=p", *more])


def test_compared_servers_share_a_gpu_and_a_wave(tmp_path: Path) -> None:
    args = arguments("--gpus=0,1,2", "--jobs=4", f"--model={tmp_path}", f"--patched={tmp_path}")
    args.out = tmp_path
    waves = Run(args).waves()
    for wave in waves:
        cells = [seat.cell for seat in wave]
        assert len(cells) <= 4
        assert all(cell.base in cells for cell in cells)
        for seat in wave:
            assert {other.gpu for other in wave if other.cell.base == seat.cell.base} == {seat.gpu}
    assert {seat.cell for wave in waves for seat in wave} == set(CELLS)


def test_cold_cells_have_no_answers_of_their_own() -> None:
    assert not [cell for cell in chosen(arguments("--answers-only")) if cell.cold]
    only = chosen(arguments("--only", "nvme-cold-full-auto"))
    assert only == [Cell("pinned", "full"), Cell("nvme", "full", "auto", cold=True)]


def test_speculation_is_served_pinned_and_from_disk_under_each_kind_of_graphs(tmp_path: Path) -> None:
    args = arguments("--mtp")
    assert [cell.name for cell in chosen(args)] == [
        "pinned-full", "nvme-full-auto", "pinned-breakable", "nvme-breakable-auto", "pinned-eager", "nvme-eager-auto",
    ]  # fmt: skip
    for cell in chosen(args):
        assert set(ple_nvme.MTP_ARGS) < set(ple_nvme.server_args(args, cell))
        assert not set(ple_nvme.MTP_ARGS) & set(ple_nvme.server_args(arguments(), cell))
    assert [cell.name for cell in chosen(arguments("--mtp", "--only", "nvme-full-pread"))] == [
        "pinned-full", "nvme-full-pread",
    ]  # fmt: skip


def speculated(length: float | None) -> dict[str, Any]:
    return {"accepted": [{"length": length, "right": [5, 3, 1, 0]}] * 2}


@pytest.mark.parametrize(
    ("length", "code", "message"),
    [(1.56, 0, "complete"), (1.0, 3, "no draft was accepted: [1.0, 1.0]"), (None, 3, "it did not speculate")],
)
def test_a_server_that_accepts_no_draft_has_shown_nothing(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    length: float | None, code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(ple_nvme, "ask", lambda *args: stand.ask(*args) | speculated(length))
    assert stand.run("--mtp", "--answers-only") == code
    out, err = capsys.readouterr()
    assert message in err
    (found,) = [json.loads(line) for line in out.splitlines() if '"verdict"' in line]
    assert (found["equal"], found["accept_length"]) == (True, [length, length])


def test_a_record_says_which_tree_it_is_about(stand: Stand) -> None:
    (stand.tree / "sglang" / "__init__.py").touch()
    (stand.tree / "sglang" / "version.py").write_text('__version__ = "9"\n')
    assert stand.run("--answers-only") == 0
    found = json.loads((stand.out / "nvme-full-auto.json").read_text())["series"]
    assert (found["patches"], found["python_files"]) == (None, 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "nvme-full-atuo"], "--only nvme-full-atuo: expected some of pinned-full"),
        (["--rounds=0"], "--rounds 0"),
        (["--answers-only", "--timings-only"], "not allowed with"),
    ],
)
def test_bad_arguments_are_named(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(*more)
    assert message in capsys.readouterr().err
