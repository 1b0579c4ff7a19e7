"""The oracle on the real server: repeatable, sensitive to a damaged weight, and blind to nothing it claims to see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from q4kit import perturb
from q4kit.errors import NotComparableError
from q4kit.oracle import align, judge, measure
from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess

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
