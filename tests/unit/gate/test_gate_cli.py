"""The gate's command line: exit codes and messages of everything that starts no server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType

import pytest
from gate_runs import recording, served

from q4kit import series as series_package
from q4kit.gate.store import Store, tree_id
from q4kit.oracle import recording as recordings

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gate.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gate_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_measured_is_judged_without_a_server(
    tool: ModuleType, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, series = tmp_path / "out", series_package.load()
    arguments = [str(out), "--model", str(model), "--short", "--prefixes", "0,7,19", "--table-only"]
    assert tool.main(arguments) == 3
    assert "NOT MEASURED" in capsys.readouterr().out
    store = Store(out)
    for prefix, shift in ((0, 0.0), (7, 0.0), (19, 1e-3)):
        record = served(prefix)
        store.write(type(record)(**{**record.__dict__, "tree": tree_id(series, prefix)}))
        recordings.write(recording(prefix, shift=shift), store.oracle(prefix))
    recordings.write(recording(100), store.floor_run(0, 0))
    assert tool.main([*arguments, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in data["rows"]] == ["REFERENCE", "EQUIVALENT", "DIFFERENT", "DIFFERENT"]
    assert data["evidence"].startswith("prefix 19: DIFFERENT")
    assert (out / "table.md").read_text().count("| DIFFERENT |") == 2
    assert tool.main([*arguments[:-2], "0,7", "--table-only"]) == 0


def test_a_record_of_other_code_does_not_count(tool: ModuleType, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for prefix in (0, 7):
        Store(out).write(served(prefix))  # tree "tree": no prefix of this series
    assert tool.main([str(out), "--model", str(model), "--prefixes", "0,7", "--table-only"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefixes", "0,99"], "the series has"),
        (["--server-args=word"], "follows no flag"),
        (["--serves-from", "3"], "belong together"),
        (["--floor", "-1"], "must be 0 or more"),
        (["--ballast-free-gib", "24"], "needs --device cuda"),
        (["--gpus", "0,1"], "--gpus needs --device cuda"),
        (["--device", "cuda", "--gpus", "0,0"], "expected different GPUs"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--plant", "nowhere.patch"], "nowhere.patch"),
    ],
)
def test_wrong_usage_is_refused(
    tool: ModuleType,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert tool.main([str(tmp_path / "out"), "--model", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "remedy:" in error


def test_a_gpu_gets_a_floor_that_can_decide(tool: ModuleType, model: Path) -> None:
    def floor(*options: str) -> int:
        arguments = tool.build_parser().parse_args(["OUT", "--model", str(model), *options])
        return int(tool.config_of(arguments, series_package.load()).floor_runs)

    assert [floor(), floor("--device=cuda", "--gpus=0"), floor("--floor=2", "--device=cuda", "--gpus=0")] == [1, 5, 2]
    assert floor("--short") == floor("--short", "--device=cuda", "--gpus=0") == 0


def test_a_model_that_is_none_is_refused(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for model, said in (
        (tmp_path, f"{tmp_path} holds no config.json"),
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: no such folder"),
        (file, f"{file} is a file, expected a checkpoint folder"),
    ):
        assert tool.main([str(tmp_path / "out"), "--model", str(model)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "remedy: " in error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_in_order(
    tool: ModuleType,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    ended = []

    def run(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            ended.append(number)  # where servers are stopped

    monkeypatch.setattr(tool.commands, "run", run)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each in before:
        signal.signal(each, signal.SIG_DFL)  # not what nohup left to this process
    try:
        assert tool.main([str(tmp_path / "out"), "--model", str(model)]) == 130
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended == [number]
    assert "interrupted" in capsys.readouterr().err
