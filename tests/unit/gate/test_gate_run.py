"""What a gate run makes of servers that do not come up: the code's fault is recorded, the machine's is not.

launch() is real; a shell script stands in for the interpreter, and an empty package for the tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_runs import failed, served

from q4kit import series as series_package
from q4kit.errors import EnvironmentFault
from q4kit.gate import gpu, trees
from q4kit.gate.plan import Config
from q4kit.gate.run import Gate, Ran
from q4kit.gate.store import Store, tree_id

Script = Callable[..., Gate]
CHILD = "RuntimeError: Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9 (SIGKILL), ..."


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a gate over the pin whose servers are a shell script."""
    model, tree, python = tmp_path / "model", tmp_path / "stand-in", tmp_path / "python"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tree / "python" / "sglang").mkdir(parents=True)
    made: list[Path] = []

    def open_tree(*_: object) -> Path:
        made.append(tree)
        return tree

    @contextmanager
    def at_prefix(*_: object) -> Iterator[Path]:
        yield tree / "python"

    monkeypatch.setattr(trees, "open_tree", open_tree)
    monkeypatch.setattr(trees, "at_prefix", at_prefix)

    def build(script: str, **settings: Any) -> Gate:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        config = replace(Config(model, str(python), (0, 7), short=True, floor_runs=0), **settings)
        gate = Gate(config, series_package.load(), Store(tmp_path / "out"), said.append)
        gate.made = made  # type: ignore[attr-defined]
        return gate

    said: list[str] = []
    return build


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'ValueError: no'; exit 1", "status 1 before it was healthy: ValueError: no"),
        # SGLang's main process ends itself like this when its scheduler failed.
        (
            "echo 'ValueError: no'; echo 'Received sigquit from a child process. It means'; kill -9 $$",
            "status -9 before it was healthy: ValueError: no",
        ),
        (f"echo 'ValueError: no'; echo '{CHILD.format(-9)}'; exit 1", "healthy: ValueError: no"),
        (f"echo '{CHILD.format(-11)}'; exit 1", "status 1 before"),
        ("kill -SEGV $$", "status -11 before it was healthy: the log is empty"),
    ],
)
def test_a_server_that_fails_by_itself_is_recorded_with_how_it_ended(gate: Script, script: str, reason: str) -> None:
    run = gate(script)
    assert run.run() == Ran(True, ())
    for prefix in (0, 7):
        record = run.store.read(prefix)
        assert record is not None
        assert (record.outcome, record.stage) == ("failed", "boot")
        assert record.reason.startswith("the server exited with status ")
        assert reason in record.reason
        assert "log:" not in record.reason


@pytest.mark.parametrize(
    ("script", "message", "remedy"),
    [
        ("echo loading; exec sleep 60", r"prefix-0000: the server was not healthy after 1 s; .*: loading", "--timeout"),
        ("kill -9 $$", r"prefix-0000: the server exited with status -9", "dmesg"),
        ("kill -TERM $$", r"exited with status -15", "outside killed it"),
        (f"echo '{CHILD.format(-9)}'; exit 1", r"exited with status 1 .*; .*scheduler died", "dmesg"),
        ("echo 'OSError: [Errno 98] address already in use'; exit 1", r"exited with status 1 .*in use", "ports"),
    ],
)
def test_a_fault_of_the_machine_is_no_record(gate: Script, script: str, message: str, remedy: str) -> None:
    run = gate(script, timeout_s=1.0 if "sleep" in script else 60.0)
    with pytest.raises(EnvironmentFault, match=message) as caught:
        run.run()
    assert remedy in caught.value.remedy
    assert run.store.read(0) is None


def test_an_interpreter_that_does_not_run_is_no_record(gate: Script, tmp_path: Path) -> None:
    run = gate("exit 0", python=str(tmp_path / "none"))
    with pytest.raises(EnvironmentFault, match=r"cannot start .*none") as caught:
        run.run()
    assert "--python" in caught.value.remedy
    assert run.store.read(0) is None


def test_a_budget_that_ends_while_a_server_starts_leaves_the_prefix_for_the_next_call(gate: Script) -> None:
    run = gate("exec sleep 60", budget_s=1.0)
    assert run.run() == Ran(False, (0, 7))
    assert run.store.read(0) is None


def test_the_stored_records_say_that_one_more_server_does_not_fit(gate: Script) -> None:
    run = gate("exit 1", budget_s=100.0)
    record = replace(failed(0), tree=tree_id(run.series, 0), seconds=150.0)
    run.store.folder.mkdir()
    run.store.write(record)
    lines: list[str] = []
    run.progress = lines.append
    assert run.run() == Ran(False, (7,))
    assert lines == ["stopped: of 100 s (--budget) 100 s are left; the longest server took 150 s"]
    assert run.made == []  # type: ignore[attr-defined]


def test_a_tree_that_takes_the_time_of_a_server_starts_none(gate: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gate("exit 1", budget_s=100.0)
    run.store.folder.mkdir()
    run.store.write(replace(served(0), tree="of another base", seconds=50.0))

    def slow(*_: object) -> Path:
        run._began -= 70.0
        return Path("nowhere")

    monkeypatch.setattr(trees, "open_tree", slow)
    assert run.run() == Ran(False, (0, 7))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["0"]),
        ("3", ["3"]),
        (" 2, 0", ["2", "0"]),
        ("GPU-8932f937-d72c", ["GPU-8932f937-d72c"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
    ],
)
def test_the_gpus_that_a_server_may_use(visible: str | None, gpus: list[str]) -> None:
    assert gpu.listed(visible) == gpus
    assert bool(gpu.several(visible)) == (len(gpus) > 1)


def test_the_memory_is_read_from_the_gpu_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *--id=3) echo 512 ;; *) echo 99999 ;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert gpu.used_mib() == 512.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.used_mib() is None


def test_several_gpus_are_warned_about(gate: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    run = gate("exit 1", device="cuda")
    lines: list[str] = []
    run.progress = lines.append
    run.run()
    assert lines[0] == "warning: CUDA_VISIBLE_DEVICES=3,1 lists 2 GPUs; memory is read from the first, 3"
