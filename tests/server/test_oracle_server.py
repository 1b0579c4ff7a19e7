"""The oracle on the real server: repeatable, sensitive to a damaged weight, and blind to nothing it claims to see."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from q4kit import perturb
from q4kit.bench.room import room
from q4kit.errors import NotComparableError, ServerError
from q4kit.oracle import align, judge, measure
from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess, plan

TOOL = Path(__file__).resolve().parents[2] / "tools" / "logprob_diff.py"
# One prompt is longer than 1,024 tokens, where the tiny model's sparse attention begins to select.
OPTIONS = Options(scored=60, decode_tokens=8, max_prompt_tokens=1100, top=8)


@pytest.fixture(scope="module")
def reference(client: Client) -> Recording:
    target = measure.new_recording(client, options=OPTIONS)
    measure.run(client, target)
    return target


@pytest.fixture(scope="module")
def again(client: Client, reference: Recording) -> Recording:
    target = measure.like(client, reference)
    measure.run(client, target)
    return target


def test_both_legs_are_complete_and_nothing_was_cached(reference: Recording) -> None:
    assert reference.complete
    for leg in align.LEGS:
        results = [result for result in reference.results if result.item.leg == leg]
        assert sum(result.item.scored for result in results) == OPTIONS.scored
        assert all(result.cached_tokens == 0 for result in results)


def test_alternatives_are_ranked_and_hold_the_greedy_token(reference: Recording) -> None:
    for result in reference.results:
        for position in result.positions:
            values = [value for _, value in position.top]
            assert values == sorted(values, reverse=True)
            if result.item.leg == "decode":
                assert position.logprob == values[0]


def test_a_second_run_is_equivalent(reference: Recording, again: Recording) -> None:
    align.check_plans(reference, again)
    found = judge.compare(reference, again, None, tolerance=1e-5)
    assert found.verdict == judge.EQUIVALENT, found.evidence


def test_decode_and_prefill_agree_inside_one_server(reference: Recording) -> None:
    rows = [p for result in reference.results if result.item.leg == "decode" for p in result.positions]
    assert max(abs(position.logprob - (position.again or 0.0)) for position in rows) < 2e-3


def test_a_damaged_weight_is_different(
    tiny_model: Path,
    reference: Recording,
    again: Recording,
    start_server: Callable[..., ServerProcess],
    tmp_path: Path,
) -> None:
    damaged = tmp_path / "damaged"
    perturb.perturb(tiny_model, damaged, tensor=r"layers\.1\.linear_attn\.out_proj\.weight$", relative=0.05)
    with start_server(damaged) as server, Client(server.base_url, timeout_s=300) as other:
        candidate = measure.like(other, reference)
        measure.run(other, candidate)
    # Another model is refused unless that is what the comparison is about.
    with pytest.raises(NotComparableError, match=r"model\.weights"):
        align.check_plans(reference, candidate)
    align.check_plans(reference, candidate, vary=["model.weights"])
    found = judge.compare(reference, candidate, floors.build([reference, again]))
    assert found.verdict == judge.DIFFERENT
    assert found.legs["prefill"].nonzero > 0.9 * OPTIONS.scored


def test_the_tool_records_and_compares(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    options = ["--scored", "24", "--decode-tokens", "5", "--max-prompt-tokens", "128", "--prompts", "ids"]
    base = [sys.executable, str(TOOL)]
    done = subprocess.run(
        [*base, "record", "--base-url", server.base_url, "--out", str(path), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "done" in done.stderr
    done = subprocess.run(
        [*base, "compare", str(path), "--base-url", server.base_url, "--tolerance", "1e-5", "--json", "-", "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert data["verdict"] == "EQUIVALENT"
    block = data["provenance"]["candidate"]
    assert block["sglang"]["version"] == "0.5.23"
    assert block["packages"]["sglang"] == "0.5.23"
    assert "/" not in block["model"]["name"]


RESTART = """#!/bin/sh
# Ends the server whose process group is in the file `group`, all of it, and starts it again.
cd "$(dirname "$0")" || exit 1
if [ -f group ]; then
    kill -TERM "-$(cat group)"
    while kill -0 "-$(cat group)" 2>/dev/null; do sleep 0.2; done
fi
setsid {command} >>server.log 2>&1 </dev/null &
echo $! >group
"""


@pytest.fixture
def restartable(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Yield address, restart script and environment of a server that the script started, 2,048 tokens of context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, environment = plan(
        tiny_model,
        python=os.environ.get("Q4_PYTHON", sys.executable),
        port=port,
        pythonpath=os.environ.get("Q4_PYTHONPATH") or None,
        extra_args=("--context-length", "2048"),
    )
    script = tmp_path / "restart.sh"
    script.write_text(RESTART.format(command=shlex.join(command)))
    script.chmod(0o755)
    url = f"http://127.0.0.1:{port}"
    try:
        subprocess.run([script], env=environment, check=True)
        with Client(url, timeout_s=10) as starting:
            for _ in range(600):
                with contextlib.suppress(ServerError):
                    starting.health()
                    break
                time.sleep(0.5)
        yield url, script, environment
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.killpg(int((tmp_path / "group").read_text()), signal.SIGKILL)


@pytest.mark.timeout(900)
def test_a_floor_over_a_real_restart(restartable: tuple[str, Path, dict[str, str]], tmp_path: Path) -> None:
    url, script, environment = restartable
    reference, out, result = tmp_path / "ref.jsonl", tmp_path / "floor.jsonl", tmp_path / "floor.json"

    def oracle(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments), "--quiet"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = oracle(
        "record", "--base-url", url, "--out", reference, "--scored", 24, "--decode-tokens", 5,
        "--max-prompt-tokens", 128, "--prompts", "ids",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "group").read_text()
    done = oracle(
        "floor", "--base-url", url, "--like", reference, "--runs", 2, "--restart-cmd", script, "--out", out,
        "--json", result,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "group").read_text() != first
    found = floors.read(out)
    # Another process, and nothing else: a restart is no variation.
    assert (found.kind, found.restarts, len(found.runs)) == ("repeat", 2, 2)
    recorded = recordings.read(reference).provenance
    assert found.runs[0]["server_started"] == recorded["server_started"] != found.runs[1]["server_started"]
    assert found.provenance["series"]["python_sha256"] == recorded["series"]["python_sha256"]
    assert json.loads(result.read_text())["sizes"].keys() == {"prefill", "decode"}
    done = oracle("compare", reference, "--base-url", url, "--floor", out)
    assert done.returncode == 0, done.stdout + done.stderr

    # The server is small enough to be filled: what the tools call the longest prompt is what it really answers in full.
    with Client(url, timeout_s=300) as client:
        longest = room(client.server_info(), 8)
        assert longest is not None
        assert longest.name == "context_length"
        for length, tokens in ((longest.longest, 8), (longest.longest + 1, 7)):
            ids = [7 + index % 400 for index in range(length)]
            answer = client.generate({"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": 8}})
            assert answer["meta_info"]["completion_tokens"] == tokens


def test_the_openai_route_gives_the_values_of_the_native_one(client: Client, tmp_path: Path) -> None:
    options = replace(OPTIONS, scored=24, max_prompt_tokens=200, decode=False)
    native = measure.new_recording(client, options=options)
    measure.run(client, native)
    client.flush_cache()
    echoed = measure.new_recording(client, options=options, backend="openai")
    measure.run(client, echoed)
    left, right = (
        [position.logprob for result in each.results for position in result.positions] for each in (native, echoed)
    )
    assert left == pytest.approx(right, abs=2e-5)
    recordings.write(echoed, tmp_path / "e.jsonl")
    assert recordings.read(tmp_path / "e.jsonl") == echoed
