"""What a gate run leaves on disk, the line that says why a server failed, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_runs import failed, recording, served

from q4kit import series as series_package
from q4kit.errors import EnvironmentFault, UsageError
from q4kit.gate import ballast, commands, table
from q4kit.gate.failures import last_error
from q4kit.gate.judge import judge_all
from q4kit.gate.plan import Config
from q4kit.gate.probe import peak_rss
from q4kit.gate.store import Store
from q4kit.oracle import recording as recordings

BOOT_LOG = """\
[2026-11-29 18:00:01] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("x")
ValueError: --ple-offload-embedding cannot be combined with --cpu-offload-gb

[2026-11-29 18:00:02] Received sigquit from a child process.
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3)
"""


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for record in (served(3), failed(4)):
        store.write(record)
        assert store.read(record.prefix) == record
    assert store.read(5) is None


def test_a_foreign_record_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "prefix-0003.json").write_text('{"schema": "other/1"}')
    with pytest.raises(UsageError, match=r"prefix-0003\.json: not a gate record"):
        Store(tmp_path).read(3)


def test_a_folder_belongs_to_one_set_of_settings(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check_settings({"device": "cpu", "server_args": ["--a"]})
    store.check_settings({"device": "cpu", "server_args": ["--a"]})
    with pytest.raises(UsageError, match=r"another server_args: \['--a'\], now \['--b'\]"):
        store.check_settings({"device": "cpu", "server_args": ["--b"]})


def test_two_gates_do_not_share_a_folder(tmp_path: Path) -> None:
    with Store(tmp_path).locked(), pytest.raises(EnvironmentFault, match="another gate"), Store(tmp_path).locked():
        pass


def test_the_reason_is_the_error_and_not_its_echo() -> None:
    assert last_error(BOOT_LOG) == "ValueError: --ple-offload-embedding cannot be combined with --cpu-offload-gb"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("launch_server.py: error: argument --x: invalid choice: 'y'\n", "error: argument --x: invalid choice: 'y'"),
        ("[12:00] torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out of memory."),
        ("RuntimeError: Rank 0 scheduler died\n", "RuntimeError: Rank 0 scheduler died"),
        ("loading\nKilled\n\n", "Killed"),
        ("", "the log is empty"),
    ],
)
def test_other_last_lines(log: str, line: str) -> None:
    assert last_error(log) == line


def test_peak_memory_of_a_status_file() -> None:
    assert peak_rss("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t 10 kB\n") == 2048 * 1024
    assert peak_rss("Name:\tkthreadd\n") == 0


def test_a_ballast_that_misses_its_target_is_an_environment_fault() -> None:
    ballast.check_held({"free_gib": 24.3, "held_gib": 100.0}, 24.0)
    with pytest.raises(EnvironmentFault, match=r"20\.0 GiB of GPU memory are free"):
        ballast.check_held({"free_gib": 20.0, "held_gib": 0.0}, 24.0)


def test_a_ballast_on_cpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = Config(model=tmp_path, python="python", prefixes=(0,), free_gib=24.0)
    with pytest.raises(UsageError, match="needs --device cuda"):
        commands.run(config, series_package.load(), tmp_path / "out", progress=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_the_table_names_patch_verdict_and_numbers() -> None:
    series = series_package.load()
    config = Config(model=Path("tiny"), python="python", prefixes=(0, 1, 2), short=True)
    records = {0: served(0), 1: failed(1, "ValueError: a|b"), 2: served(2)}
    rows = judge_all((0, 1, 2), records, recording, None)
    report = table.report(config, series, rows, None, {})
    lines = report.markdown().splitlines()
    second = next(line for line in lines if line.startswith("| 2 |") or line.startswith("| 2 "))
    assert series.entries[1].subject in second
    assert "EQUIVALENT" in second
    assert "BROKEN" in report.markdown()
    assert report.verdict == "DOES NOT HOLD"
    found = report.to_json()["rows"][2]
    assert found["legs"]["prefill"] == {
        "positions": 60, "changed": 0, "lost": 0, "mean": 0.0, "max": 0.0, "seed_rule_holds": True,
    }  # fmt: skip


def test_a_forgotten_reference_takes_its_floor_along(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for prefix in (0, 7):
        store.write(served(prefix))
        recordings.write(recording(prefix), store.oracle(prefix))
        recordings.write(recording(100 + prefix), store.floor_run(prefix, 0))
    store.forget(0)
    assert store.read(0) is None
    assert store.floor_runs(0) == []
    floor = store.floor(7)
    assert floor is not None
    assert [run["time"] for run in floor.runs] == ["t7", "t107"]
