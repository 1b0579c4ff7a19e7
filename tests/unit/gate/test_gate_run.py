"""What a gate run makes of servers that do not come up, die or share: the code's fault is recorded, the machine's not.

launch() and its processes are real; a shell script stands in for the interpreter, an empty package for the tree, and
synthetic recordings for the oracle's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_runs import failed, recording, served
from gate_servers import make_tree, processes, wait_for, write_interpreter

from q4kit import series as series_package
from q4kit.errors import EnvironmentFault, ServerError, UsageError
from q4kit.gate import gpu, judge, probe, trees
from q4kit.gate.judge import Verdict
from q4kit.gate.plan import Config
from q4kit.gate.run import Gate, Ran
from q4kit.gate.store import Store, tree_id
from q4kit.oracle.recording import Recording
from q4kit.server.client import Client

Script = Callable[..., Gate]
CHILD = "RuntimeError: Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9 (SIGKILL), ..."
SPEED = ({"context": 101, "decode_tok_s": 5.0, "prefill_tok_s": 90.0},)


class Bench:
    """Stands in for what is asked of a server: answers once the server itself has, and keeps who was asked what."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.during: dict[int, Callable[[], None]] = {}
        """What happens while a prefix is timed."""
        self.seconds = 0.0
        """How long it takes to time one."""

    def record(self, client: Client, config: Config, like: Recording | None) -> Recording:
        client.model_info()
        self.asked.append("record")
        return recording(len(self.asked))

    def speed(self, client: Client, config: Config, store: Store, prefix: int) -> tuple[dict[str, Any], ...]:
        self.asked.append(f"time {prefix}")
        self.now += self.seconds
        self.during.get(prefix, lambda: None)()
        client.model_info()
        return SPEED


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(probe, "record", made.record)
    monkeypatch.setattr(probe, "speed", made.speed)
    monkeypatch.setattr(probe, "check_served", lambda *_: None)
    return made


@pytest.fixture
def gate(tmp_path: Path, model: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a gate whose servers are a shell script that becomes a stand-in server unless it leaves."""

    def open_tree(folder: Path, *_: object, like: Path | None = None) -> Path:
        made.append(folder)
        return folder

    @contextmanager
    def at_prefix(tree: Path, series: object, prefix: int, plant: object) -> Iterator[Path]:
        yield make_tree(tree, prefix)

    monkeypatch.setattr(trees, "open_tree", open_tree)
    monkeypatch.setattr(trees, "at_prefix", at_prefix)

    def build(script: str, **settings: Any) -> Gate:
        python = write_interpreter(tmp_path, script)
        config = replace(Config(model, str(python), (0, 7), short=True, floor_runs=0), **settings)
        gate = Gate(config, series_package.load(), Store(tmp_path / "out"), said.append, clock=lambda: bench.now)
        gate.made = made  # type: ignore[attr-defined]
        return gate

    made: list[Path] = []
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
        (
            "echo 'ValueError: no'; echo 'SIGQUIT received. signum=None. It usually means one child'; kill -9 $$",
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
        ("echo loading; exec sleep 60", r"prefix-0000: the server was not healthy after 1 s;.*: loading$", "--timeout"),
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
    run = gate("exec sleep 60", budget_s=1.0)  # launch() waits for a second of its own clock
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
    assert lines == ["stopped: of 100 s (--budget) 100 s are left; the longest wave took 150 s"]
    assert run.made == []  # type: ignore[attr-defined]


def test_a_tree_that_takes_the_time_of_a_server_starts_none(
    gate: Script, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gate("exit 1", budget_s=100.0)
    run.store.folder.mkdir()
    run.store.write(replace(served(0), tree="of another base", seconds=50.0))

    def slow(*_: object, **__: object) -> Path:
        bench.now += 70.0
        return Path("nowhere")

    monkeypatch.setattr(trees, "open_tree", slow)
    assert run.run() == Ran(False, (0, 7))


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("0",)),
        ("3", ("3",)),
        (" 2, 0", ("2", "0")),
        ("GPU-8932f937-d72c", ("GPU-8932f937-d72c",)),
        ("", ()),
        ("-1", ()),
        ("1,-1,2", ("1",)),
    ],
)
def test_the_gpus_that_a_server_may_use(
    visible: str | None, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.listed(visible) == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if gpus:
        assert gpu.chosen(None) == gpus
        assert gpu.chosen("5,4") == ("5", "4")
    else:
        with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
            gpu.chosen(None)


@pytest.mark.parametrize("given", ["", "1,1", "-1"])
def test_gpus_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        gpu.chosen(given)


def test_servers_are_spread_over_gpus_and_say_how_many_share_one(
    gate: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in nvidia-smi counts the servers: what one gives back when it ends is its own share."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    seen = f"grep -alE '{tmp_path}/server[.]py' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"
    tool.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\necho $(($({seen}) * 1024))\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    run = gate("echo gpu $CUDA_VISIBLE_DEVICES", prefixes=(0, 3, 7), device="cuda", gpus=("3", "1"), jobs=3)
    assert run.run().complete
    records = [run.store.read(prefix) for prefix in (0, 3, 7)]
    assert [(r.gpu, r.sharing, r.gpu_gib) for r in records if r] == [("3", 2, 1.0), ("1", 1, 1.0), ("3", 2, 1.0)]
    assert run._log("prefix-0003").startswith("gpu 1\n")
    assert {line.rsplit("--id=")[1] for line in (tmp_path / "asked").read_text().split("\n") if line} == {"3", "1"}


OUT_OF_MEMORY = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.'; exit 1"


def test_a_gpu_that_is_too_small_for_two_is_nothing_that_a_patch_did(gate: Script) -> None:
    run = gate(OUT_OF_MEMORY, device="cuda", gpus=("0",), jobs=2)
    with pytest.raises(EnvironmentFault, match="CUDA out of memory") as caught:
        run.run()
    assert "2 servers share its GPU: --jobs fewer" in caught.value.remedy
    assert run.store.read(0) is None


def test_a_gpu_that_is_too_small_for_one_is_a_result(gate: Script) -> None:
    run = gate(OUT_OF_MEMORY, device="cuda", gpus=("0", "1"), jobs=2)
    assert run.run() == Ran(True, ())
    record = run.store.read(7)
    assert record is not None
    assert "CUDA out of memory" in record.reason


def verdicts(run: Gate) -> dict[int, tuple[Verdict, int | None]]:
    records = {k: record for k in run.config.prefixes if (record := run.store.read(k)) is not None}
    rows = judge.judge_all(run.config.prefixes, records, run.store.recording, None)
    return {row.prefix: (row.verdict, row.against) for row in reversed(rows)}  # not the whole way, which is last


def test_a_prefix_that_fails_in_the_middle_of_a_wave_is_its_own_result(gate: Script, bench: Bench) -> None:
    run = gate("[ $K = 3 ] && echo 'ValueError: no' && exit 1", prefixes=(0, 3, 7), jobs=3)
    assert run.run() == Ran(True, ())
    found = verdicts(run)
    assert found[0] == (Verdict.REFERENCE, None)
    assert found[3] == (Verdict.BROKEN, None)
    assert found[7][1] == 0  # compared with the one before it that served
    assert [word for word in bench.asked if word.startswith("time")] == ["time 0", "time 7"]
    record = run.store.read(7)
    assert record is not None
    assert (record.sharing, record.speed, record.boot_s is None) == (3, SPEED, False)


def test_a_server_that_dies_while_it_is_paused_costs_the_others_nothing(
    gate: Script, bench: Bench, tmp_path: Path
) -> None:
    def kill() -> None:
        victims = [pid for pid in processes(str(tmp_path / "server.py")) if b"k3" in environment(pid)]
        wait_for(lambda: [processes(str(tmp_path))[pid] for pid in victims] == ["T"])
        os.kill(victims[0], signal.SIGKILL)

    bench.during[0] = kill
    run = gate("", prefixes=(0, 3, 7), jobs=3)
    with pytest.raises(EnvironmentFault, match="prefix-0003: the server was killed") as caught:
        run.run()
    assert "something outside killed it" in caught.value.remedy
    assert {k for k in run.config.prefixes if run.store.read(k)} == {0, 7}
    assert not processes(str(tmp_path / "server.py"))

    del bench.during[0], bench.asked[:]
    assert gate("", prefixes=(0, 3, 7), jobs=3).run() == Ran(True, ())
    assert bench.asked == ["record", "time 3"]


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_a_wave_of_which_half_is_recorded_goes_on_with_the_rest(gate: Script, bench: Bench) -> None:
    gate("", prefixes=(3,)).run()
    del bench.asked[:]
    run = gate("", prefixes=(0, 3, 7), jobs=3)
    assert run.run() == Ran(True, ())
    assert bench.asked.count("record") == 3  # 0, its repeat, and 7
    assert [word for word in bench.asked if word.startswith("time")] == ["time 0", "time 7"]
    assert {prefix: against for prefix, (_, against) in verdicts(run).items()} == {0: None, 3: 0, 7: 3}


def test_no_wave_starts_that_would_end_after_the_budget(gate: Script, bench: Bench) -> None:
    bench.seconds = 30.0
    run = gate("", prefixes=(0, 3, 5, 7), jobs=2, budget_s=100.0)
    assert run.run() == Ran(False, (5, 7))
    assert [k for k in run.config.prefixes if (record := run.store.read(k)) and record.timed] == [0, 3]
    assert len(run.made) == 2  # type: ignore[attr-defined]


def test_who_is_not_timed_in_the_budget_keeps_the_recording_and_is_timed_by_the_next_call(
    gate: Script, bench: Bench
) -> None:
    bench.seconds = 30.0
    run = gate("", prefixes=(0, 3, 7), jobs=3, budget_s=50.0)
    assert run.run() == Ran(False, (3, 7))
    records = {k: record for k in (0, 3, 7) if (record := run.store.read(k))}
    assert [record.timed for record in records.values()] == [True, False, False]
    rows = judge.judge_all(run.config.prefixes, records, run.store.recording, run.store.floor(0))
    assert [row.verdict for row in rows] == ["REFERENCE", *["EQUIVALENT"] * 3]
    assert judge.conclusion(rows) == ("PARTIAL", "2 prefixes are not timed", 3)

    del bench.asked[:]
    run = gate("", prefixes=(0, 3, 7), jobs=3)
    assert run.run() == Ran(True, ())
    assert bench.asked == ["time 3", "time 7"]
    assert all(record is not None and record.timed for record in map(run.store.read, (0, 3, 7)))


def test_a_restart_for_the_floor_boots_beside_the_reference(gate: Script, bench: Bench) -> None:
    run = gate("", prefixes=(0, 3), floor_runs=2, jobs=4)
    assert run.run() == Ran(True, ())
    assert [path.name[-10] for path in run.store.floor_runs(0)] == ["0", "1", "2"]
    assert [run.store.log(name).exists() for name in ("floor-1", "floor-2")] == [True, True]
    assert len([word for word in bench.asked if word.startswith("time")]) == 2


def test_a_reference_that_fails_takes_its_restart_with_it(gate: Script) -> None:
    run = gate("[ $K = 0 ] && echo 'ValueError: no' && exit 1", prefixes=(0, 3), floor_runs=1, jobs=3)
    assert run.run() == Ran(True, ())
    assert run.store.floor_runs(0) == []
    assert [path.name for path in run.store.floor_runs(3)] == [f"floor-0003-run-{n}.jsonl.gz" for n in (0, 1)]


def test_a_restart_that_does_not_come_up_beside_its_reference_is_a_fault(gate: Script, tmp_path: Path) -> None:
    run = gate(f"mkdir {tmp_path}/first || {{ echo 'ValueError: no'; exit 1; }}", prefixes=(0,), floor_runs=1)
    with pytest.raises(ServerError, match="status 1 before it was healthy"):
        run.run()
    assert run.store.read(0) is not None


def test_an_interrupt_while_one_is_timed_leaves_no_paused_server(gate: Script, bench: Bench, tmp_path: Path) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    bench.during[3] = interrupt
    run = gate("", prefixes=(0, 3, 7), jobs=3)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert not processes(str(tmp_path / "server.py"))
    assert [k for k in run.config.prefixes if run.store.read(k)] == [0]
