"""The soak's verdict tells growth from noise, and its load is what it says."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from q4kit.errors import ServerError
from tests.gpu import ple_soak
from tests.gpu.memory_trend import Sample, files_of, group_memory, judge, kept, parse_smaps, trend, verdict
from tests.gpu.ple_soak import CPU_ENV, KINDS, Run, Sampler, flags_of, main, plan, record_of

TIMES = [0.5 * i for i in range(240)]


def walk(seed: int, growth: float = 0.0, noise: float = 5.0) -> list[float]:
    """Return correlated noise (as an allocator's) around a line that gains `growth` over the window."""
    rng = random.Random(seed)
    value, out = 0.0, []
    for i in range(len(TIMES)):
        value = 0.7 * value + rng.gauss(0, noise)
        out.append(3000 + value + growth * i / (len(TIMES) - 1))
    return out


def test_a_straight_line_gives_its_growth_exactly() -> None:
    found = trend(TIMES, [100 + 2 * t for t in TIMES])
    assert found.growth == pytest.approx(2 * TIMES[-1])
    assert found.low == pytest.approx(found.high)
    assert found.span == TIMES[-1]


def test_memory_that_never_changes_is_flat() -> None:
    found = trend(TIMES, [300.0] * len(TIMES))
    assert (found.growth, found.low, found.high) == (0.0, 0.0, 0.0)
    assert verdict(found, 0.0) == "flat"


def test_interval_covers_the_true_growth_about_as_often_as_it_says() -> None:
    covered = sum(1 for seed in range(400) if (t := trend(TIMES, walk(seed, 20))).low <= 20 <= t.high)
    assert 0.90 <= covered / 400 <= 0.99


@pytest.mark.parametrize(("growth", "expected"), [(0.0, "flat"), (200.0, "grows")])
def test_verdicts_of_noisy_runs(growth: float, expected: str) -> None:
    verdicts = [verdict(trend(TIMES, walk(seed, growth)), 32) for seed in range(100)]
    assert verdicts.count(expected) >= 98


def test_too_much_noise_is_inconclusive() -> None:
    verdicts = [verdict(trend(TIMES, walk(seed, 32, noise=60)), 32) for seed in range(100)]
    assert verdicts.count("inconclusive") > 80


@pytest.mark.parametrize(("times", "values"), [([1.0] * 15, [1.0] * 15), ([1.0] * 20, [1.0] * 19)])
def test_too_few_samples_are_refused(times: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        trend(times, values)


def figures(anonymous: float, table: float = 0.0, other: float = 0.0) -> dict[str, float]:
    """Return the memory of a process that maps `table` MiB of the table and `other` of anything else."""
    mapped = table + other
    return {"rss": anonymous + mapped, "anonymous": anonymous, "mapped": mapped, "table": table}


def samples(
    growth: float = 0.0, mapped: float = 100.0, lost_at: int | None = None, came_at: range = range(0)
) -> list[Sample]:
    anonymous = walk(1, growth)
    out = []
    for i, seconds in enumerate(TIMES):
        processes = {
            "scheduler 2": figures(anonymous[i], mapped),
            "http 1": figures(50.0),
        }
        if lost_at is not None and i >= lost_at:
            del processes["http 1"]
        if i in came_at:
            processes["ptxas 3"] = figures(900.0)
        out.append(Sample(seconds, i // 2, processes))
    return out


def test_judge_names_every_process_and_holds_when_flat() -> None:
    found = judge(samples(), 20, 32, 1000)
    assert found["verdict"] == "flat"
    assert set(found["processes"]) == {"scheduler 2", "http 1"}
    assert found["processes"]["http 1"]["rss_growth"]["growth"] == 0
    json.dumps(found, allow_nan=False)
    assert found["mapped_mib_max"] == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"growth": 300.0}, {"mapped": 1001.0}, {"lost_at": 200}, {"lost_at": 239},
        {"came_at": range(100, 140)}, {"came_at": range(238, 240)},
    ],
    ids=["grows", "maps too much", "a process died", "one died at the end", "one came for long", "one came to stay"],
)  # fmt: skip
def test_judge_does_not_hold(changes: dict[str, Any]) -> None:
    assert judge(samples(**changes), 20, 32, 1000)["verdict"] == "grows"


def test_a_process_that_comes_and_goes_is_named_and_not_counted() -> None:
    found = judge(samples(came_at=range(150, 160)), 20, 32, 1000)
    assert (found["verdict"], found["brief_processes"]) == ("flat", ["ptxas 3"])
    assert found["anonymous_growth_mib"] == judge(samples(), 20, 32, 1000)["anonymous_growth_mib"]


def with_table(pages: Callable[[float], float], libraries: float = 500.0) -> list[Sample]:
    """Return samples of flat anonymous memory whose scheduler maps `pages(seconds)` MiB of the table."""
    return [
        Sample(seconds, i // 2, {"scheduler 2": figures(3000.0, pages(seconds), libraries), "http 1": figures(50.0)})
        for i, seconds in enumerate(0.5 * i for i in range(600))
    ]


def test_pages_that_are_given_back_at_every_look_are_not_kept() -> None:
    # Looks are 30 s and what a look takes apart, and find the two readers by turns; some give little back.
    sawtooth = judge(with_table(lambda seconds: 50 + 60 * (seconds % 30.5) + 900 * (seconds // 30.5 % 2)), 20, 32, 1000)
    assert sawtooth["verdict"] == "flat"
    assert sawtooth["mapped_mib_max"] > 3000
    assert sawtooth["table_mib_kept"] < 150
    assert sawtooth["other_mapped_mib_max"] == 500


@pytest.mark.parametrize(
    ("pages", "libraries"),
    [(lambda seconds: 1001.0 + seconds % 30, 1.0), (lambda seconds: 60 * (seconds % 90), 1.0), (lambda _: 1.0, 1001.0)],
    ids=["given back too little", "too seldom", "something else grows"],
)
def test_mapped_pages_that_are_kept_do_not_hold(pages: Callable[[float], float], libraries: float) -> None:
    assert judge(with_table(pages, libraries), 20, 32, 1000)["verdict"] == "grows"


def test_what_is_kept_is_the_largest_floor_of_a_minute() -> None:
    axis = [float(second) for second in range(200)]
    assert kept(axis, [second % 30 for second in axis]) == 0
    assert kept(axis, [min(second, 100) for second in axis]) == 100
    assert kept([0.0, 1.0], [7.0, 5.0]) == 5
    assert kept([0.0, 100.0, 200.0], [0.0, 14000.0, 0.0]) == 0, "one sample is no stretch"


def test_no_sample_after_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample after 600 s"):
        judge(samples(), 600, 32, 1000)


def test_growth_during_the_warm_up_does_not_count() -> None:
    grown = samples()
    for seconds, _, processes in grown:
        processes["scheduler 2"]["anonymous"] -= max(0, 40 - seconds) * 30
    assert judge(grown, 40, 32, 1000)["verdict"] == "flat"
    assert judge(grown, 0, 32, 1000)["verdict"] == "grows"


def steps(seed: int, rate: float, leak: float = 0.0) -> list[Sample]:
    """Return what a server gains that keeps 5 MiB for each new one of 128 shapes and leaks `leak` MiB a request."""
    rng = random.Random(7)  # both servers get the same requests
    order = [rng.randrange(128) for _ in range(500)]
    noise = walk(seed, noise=1)
    out = []
    for i, seconds in enumerate(TIMES):
        ended = min(int(seconds * rate), len(order))
        mib = noise[i] + 5 * len(set(order[:ended])) + leak * ended
        out.append(Sample(seconds, ended, {f"scheduler {seed}": figures(mib)}))
    return out


@pytest.mark.parametrize("rate", [2.0, 4.0], ids=["as fast", "twice as fast"])
def test_growth_that_the_control_shares_is_not_the_tables(rate: float) -> None:
    assert judge(steps(1, 2), 40, 32, 1000)["verdict"] == "grows"
    found = judge(steps(1, 2), 40, 32, 1000, steps(2, rate))
    assert found["verdict"] == "flat"
    assert found["control_growth_mib"]["growth"] > 100
    assert found["excess_growth_mib"]["span"] == 239 - 80
    json.dumps(found, allow_nan=False)


def test_growth_beside_the_controls_is_found() -> None:
    found = judge(steps(1, 2, leak=0.5), 40, 32, 1000, steps(2, 3))
    assert found["verdict"] == "grows"
    assert found["excess_growth_mib"]["growth"] == pytest.approx(0.5 * (239 - 80), abs=10)


def test_a_control_does_not_excuse_mapped_memory() -> None:
    assert judge(samples(mapped=1001), 20, 32, 1000, samples(mapped=1001))["verdict"] == "grows"


def test_a_control_that_ended_before_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        judge(samples(), 20, 32, 1000, samples()[:30])


SMAPS = (
    "7f00-7f10 r--s 00000000 fe:00 11   /models/a b/x.safetensors\nSize: 9 kB\nRss: 2048 kB\nAnonymous: 0 kB\n"
    "VmFlags: rd mr\n"
    "7f10-7f20 r--s 00000000 fe:00 12   /models/ab/x.safetensors\nRss: 4096 kB\nAnonymous: 0 kB\n"
    "7f20-7f30 rw-p 00000000 00:00 0 \nRss: 8192 kB\nAnonymous: 7168 kB\n"
    "a000-b000 r--p 00000000 fe:01 13   /gone (deleted)\nRss: 1024 kB\nAnonymous: 0 kB\n"
)


def test_smaps_are_added_up_and_the_tables_files_told_by_inode_or_path() -> None:
    found = parse_smaps(SMAPS, frozenset({"fe:01 13", "/models/a b/x.safetensors", "fe:00 99"}))
    assert found == {"rss": 15.0, "anonymous": 7.0, "mapped": 8.0, "table": 3.0}
    assert parse_smaps(SMAPS)["table"] == 0
    with pytest.raises(ValueError, match="without a mapping"):
        parse_smaps("")


@pytest.mark.parametrize("linked", ["nothing", "folder", "file"])
def test_group_memory_tells_the_tables_pages(tmp_path: Path, linked: str) -> None:
    """As Hugging Face's cache has them, too: links of a folder to files that lie elsewhere."""
    folder, blobs = tmp_path / "snap shot", tmp_path / "blobs"
    blobs.mkdir()
    if linked == "folder":
        folder.symlink_to(blobs)
    else:
        folder.mkdir()
    path = folder / "model.safetensors"
    if linked == "file":
        path.symlink_to(blobs / "abc")
    path.write_bytes(b"x" * (8 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[i] for i in range(0, len(pages), 4096)) == 2048 * ord("x")
        group = group_memory(os.getpgrp(), files_of(folder))
    mine = next(value for name, value in group.items() if name.endswith(f" {os.getpid()}"))
    assert mine["table"] == 8
    assert mine["mapped"] > 8


@pytest.mark.parametrize("given", ["table", "model"])
def test_a_soak_tells_the_tables_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    for name in ("table", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    asked: list[frozenset[str]] = []
    monkeypatch.setattr(ple_soak, "Client", Dying)
    monkeypatch.setattr(ple_soak, "SAMPLE_S", 0.001)
    monkeypatch.setattr(ple_soak, "group_memory", lambda group, table: asked.append(table) or {})
    monkeypatch.setattr(ple_soak, "run_one", lambda *_: time.sleep(0.05) or "prefill")
    table = tmp_path / "table" if given == "table" else None
    args = arguments(longest=40, vocab=500, table=table, model=tmp_path / "model", seconds=0.2)
    ple_soak.soak(SimpleNamespace(base_url="http://127.0.0.1:9", pid=os.getpgrp()), args)  # type: ignore[arg-type]
    assert set(asked) == {files_of(tmp_path / given)}


def test_a_soak_that_is_told_to_end_judges_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At SIGTERM the request in flight is answered, then the load ends, and the last answer is still compared."""
    before = signal.getsignal(signal.SIGTERM)

    def request(_: object, number: int, *rest: object) -> str:
        time.sleep(0.1)
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return "prefill"

    monkeypatch.setattr(ple_soak, "Client", Dying)
    monkeypatch.setattr(ple_soak, "SAMPLE_S", 0.01)
    monkeypatch.setattr(ple_soak, "group_memory", lambda *_: {"server 1": figures(3000)})
    monkeypatch.setattr(ple_soak, "run_one", request)
    args = arguments(longest=40, vocab=500, table=None, model=tmp_path, seconds=60)
    run = ple_soak.soak(SimpleNamespace(base_url="http://127.0.0.1:9", pid=os.getpgrp()), args)  # type: ignore[arg-type]
    record = record_of(run, None, args)  # type: ignore[arg-type]
    assert (run.told_to_end, record["requests"], record["seconds"]) == (True, {"prefill": 5}, 60)
    assert 0.5 <= record["loaded_s"] < 5
    assert record["verdict"] == "flat"
    assert signal.getsignal(signal.SIGTERM) is before


def test_group_memory_finds_this_process() -> None:
    found = group_memory(os.getpgrp())
    mine = [figures for name, figures in found.items() if name.endswith(f" {os.getpid()}")]
    assert len(mine) == 1
    assert mine[0]["rss"] > 5


def test_the_load_has_every_kind_repeats_and_is_unique() -> None:
    plans = [plan(number, 500, 400) for number in range(40)]
    assert {kind for kind, _, _ in plans} == set(KINDS)
    assert plans[7] == plan(7, 500, 400)
    prompts = [tuple(ids) for kind, many, _ in plans for ids in many if kind == "prefill"]
    assert len(set(prompts)) == len(prompts)
    assert all(200 <= len(ids) <= 400 for ids in prompts)
    assert all(3 <= token < 500 for ids in prompts for token in ids)


class Dying:
    """A client whose server answers the two probes and is gone under load."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self.answers = 0

    def __enter__(self) -> Dying:
        return self

    def __exit__(self, *_: object) -> None: ...

    def flush_cache(self) -> None:
        self.generate({"sampling_params": {"max_new_tokens": 0}}, counted=False)

    def generate(self, payload: dict[str, Any], counted: bool = True) -> dict[str, Any]:
        self.answers += counted
        if self.answers > 2:
            raise ServerError("connection refused", remedy="look at its log")
        return {"output_ids": [7] * payload["sampling_params"]["max_new_tokens"]}

    def stream_generate(self, payload: dict[str, Any]) -> Iterator[None]:
        self.generate(payload)
        yield None


def arguments(**more: Any) -> SimpleNamespace:
    defaults = {
        "device": "cpu", "graphs": "full", "patched": Path("none"), "control_path": None, "seconds": 60,
        "limit_mib": 32, "mapped_mib": 1000, "raw": None,
    }  # fmt: skip
    return SimpleNamespace(**defaults | more)


def test_a_server_that_dies_under_load_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ple_soak, "Client", Dying)
    raw = tmp_path / "raw.json"
    args = arguments(longest=40, vocab=500, raw=raw, table=None, model=tmp_path)
    run = ple_soak.soak(SimpleNamespace(base_url="http://127.0.0.1:9", pid=os.getpgrp()), args)  # type: ignore[arg-type]
    record = record_of(run, None, args)  # type: ignore[arg-type]
    assert (record["ok"], record["verdict"], record["answer_same"]) == (False, "inconclusive", False)
    assert [line.partition(":")[0] for line in record["failed"]] == [
        *(f"request {i}" for i in range(5)),
        "after the load",
    ]
    assert json.loads(raw.read_text())["failed"] == record["failed"]


def test_too_short_a_run_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "x", "--seconds", "5"])
    assert stopped.value.code == 2
    assert "at least 30" in capsys.readouterr().err


def test_samples_say_how_many_requests_had_ended() -> None:
    with Sampler(lambda: {}, 0.01) as sampler:
        for number in range(3):
            sampler.requests = number
            time.sleep(0.1)
    assert {sample.requests for sample in sampler.samples} == {0, 1, 2}
    assert [sample.seconds for sample in sampler.samples] == sorted(sample.seconds for sample in sampler.samples)


@pytest.mark.parametrize(
    ("control", "ok"),
    [
        (Run(before=[1], again=[1], after=[1]), True),
        (Run(before=[1], again=[1], after=[2]), False),
        (Run(failed=["request 0: gone"], before=[1], again=[1], after=[1]), False),
    ],
    ids=["sound", "another answer", "a failed request"],
)
def test_a_control_must_be_sound(control: Run, ok: bool) -> None:
    args = arguments(control_path=Path("none/of-control"))
    control.samples = samples()
    run = Run(before=[1], again=[1], after=[1], table={"rows": 1.0}, samples=samples())
    record = record_of(run, control, args)  # type: ignore[arg-type]
    assert record["series"]["reason"] == record["control"]["series"]["reason"] == "unknown: no Python package in sglang"
    assert (record["ok"], record["verdict"]) == (ok, "flat")


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", "--ple-offload-embedding"), ("cpu", "--no-ple-offload-embedding")]
)
def test_the_control_keeps_the_table_in_memory_and_shares_the_other_flags(device: str, expected: str) -> None:
    args = SimpleNamespace(device=device, graphs="full", reader="auto", table=Path("flat"), arg=["--sleep-on-idle"])
    disk, control = (set(flags_of(args, control)) for control in (False, True))  # type: ignore[arg-type]
    assert disk - control == {"--ple-offload-embedding", "--ple-offload-backend=nvme", "--ple-offload-reader=auto",
                              "--ple-offload-dir=flat"} - control  # fmt: skip
    assert expected in control
    assert not any("nvme" in flag for flag in control)


def test_a_control_package_without_a_control_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "x", "--control-path", "stock"])
    assert stopped.value.code == 2
    assert "needs --control" in capsys.readouterr().err


PRODUCTS = """
import torch
def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Anonymous"))
torch.set_num_threads(1)
weight = torch.ones(256, 64, dtype=torch.bfloat16)
def product(rows):
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
product(1)
before = anonymous()
for rows in range(2, 129):
    product(rows)
print(anonymous() - before)
"""


def test_the_environment_of_a_cpu_server_keeps_no_kernel_for_each_shape() -> None:
    pytest.importorskip("torch")
    grown = []
    for more in ({}, CPU_ENV):
        env = {name: value for name, value in os.environ.items() if name not in CPU_ENV} | more
        done = subprocess.run([sys.executable, "-c", PRODUCTS], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        grown.append(float(done.stdout))
    assert grown[1] < 8  # MiB
    if grown[0] < 4 * grown[1]:
        pytest.skip("this processor's kernels are too small to tell")
