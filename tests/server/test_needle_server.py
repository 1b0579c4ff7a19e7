"""The needle test against the real server. Its random model retrieves nothing, and the tool must say just
that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from q4kit.needle.codes import ALPHABET
from q4kit.needle.plan import Config, Control, Mode
from q4kit.needle.runner import Ended, RunResult, run
from q4kit.needle.score import RETRIEVAL, Outcome
from q4kit.needle.summary import Verdict, judge, summarise
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "needle_test.py"
SMALL: dict[str, Any] = {"depths": (0.0, 1.0), "distractors": 1, "short_length": 512, "answer_tokens": 4}


class ForcingClient(Client):
    """The real server, made to answer right: a grammar lets only the code pass that the prompt states.

    Retrieval is thereby given, so scoring, controls and verdict are tested on real output of a model that
    could never produce it by itself. Where the prompt states no code the grammar allows only NONE.
    """

    def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        text = self.detokenize(list(payload["input_ids"]))
        asked = re.findall(r"access code of depot (\w+) is stated", text)
        if not asked:  # the request that opens a haystack
            return super().generate(payload)
        code = re.search(rf"depot {asked[-1]} is ([{ALPHABET}-]{{14}})\.", text)
        params = {**payload["sampling_params"], "max_new_tokens": 40, "ignore_eos": False}
        params["regex"] = f" {code[1]}" if code else " NONE"
        return super().generate({**payload, "sampling_params": params})


@pytest.mark.parametrize("mode", list(Mode))
def test_random_model_retrieves_nothing_and_every_mechanism_works(client: Client, mode: Mode) -> None:
    forced = mode is Mode.IGNORE_EOS
    result = run(client, Config((1024,), mode=mode, logprob=forced, **SMALL), RunResult())
    assert result.ended is Ended.COMPLETE, result.fault
    assert [(t.control, t.length) for t in result.trials] == [
        (Control.SHORT, 512), (Control.SHORT, 512), (Control.NONE, 1024), (Control.NONE, 1024),
        (Control.ABSENT, 1024), (Control.ABSENT, 1024), (Control.SHIFTED, 1024), (Control.SHIFTED, 1024),
    ]  # fmt: skip
    # By the server's own count, to the token.
    assert [t.prompt_tokens for t in result.trials] == [t.length for t in result.trials]
    # Every question finds the haystack in the prefix cache, recurrent state included, and computes only its tail.
    for trial in result.trials:
        assert trial.cached_tokens is not None
        assert trial.cached_tokens >= trial.length // 3
    assert not any(t.score.outcome is Outcome.FOUND for t in result.trials)
    summary = summarise(result, mode)
    assert summary.overall.found == 0
    # The logprob needle gives a number where retrieval gives none.
    assert result.logprob_faults == []
    assert [t.cell_depth for t in result.logprobs] == ([0.0, 1.0] if forced else [])
    for logprob in result.logprobs:
        # Random weights over 512 tokens: about ln 512 = 6.2 nats a token.
        assert -9.0 < logprob.present / logprob.tokens < -4.0
        assert -9.0 < logprob.absent / logprob.tokens < -4.0
        assert logprob.gain != 0.0
    if forced:
        assert all(t.score.outcome in RETRIEVAL for t in result.trials)
        assert judge(result, summary).verdict is Verdict.LOST
        assert "not even over a short context" in judge(result, summary).evidence
        assert judge(result, summary, expect="none").verdict is Verdict.NONE_FOUND
    else:
        # Four tokens are no room for an answer, and the tool does not call that a miss.
        assert {t.score.outcome for t in result.trials} == {Outcome.TRUNCATED}
        assert judge(result, summary).verdict is Verdict.INVALID


def test_flushing_makes_every_prompt_whole(client: Client) -> None:
    config = Config((1024,), share_prefix=False, logprob=False, **SMALL)
    result = run(client, config, RunResult())
    assert {t.cached_tokens for t in result.trials} == {0}


def test_forced_right_answers_are_found_with_all_controls(server: ServerProcess) -> None:
    with ForcingClient(server.base_url) as forcing:
        result = run(forcing, Config((1024,), logprob=False, **SMALL), RunResult())
    assert result.ended is Ended.COMPLETE, result.fault
    real = [t for t in result.trials if t.control is not Control.ABSENT]
    assert {t.score.outcome for t in real} == {Outcome.FOUND}, [t.text for t in real]
    absent = [t for t in result.trials if t.control is Control.ABSENT]
    assert {t.score.outcome for t in absent} == {Outcome.SAID_NONE}
    summary = summarise(result, Mode.IGNORE_EOS)
    assert all(c.passed for c in summary.controls)
    assert judge(result, summary).verdict is Verdict.RETRIEVED
    assert judge(result, summary, require=0.9).verdict is Verdict.INCONCLUSIVE


def needle(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *args], capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize(("expect", "code"), [("found", 1), ("none", 0)])
def test_tool_reports_honestly(server: ServerProcess, tmp_path: Path, expect: str, code: int) -> None:
    done = needle(
        "--base-url", server.base_url, "-l", "1024", "--grid", "2", "--distractors", "1", "--answer-tokens", "4",
        "--no-logprob", "--expect", expect, "-q", "--json", str(tmp_path / "n.json"), "--plot", str(tmp_path / "n.png"),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "0/2 retrieved, at least 0%" in done.stdout
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((tmp_path / "n.json").read_text())
    assert data["overall"]["found"] == 0
    assert data["provenance"]["sglang"]["version"] == "0.5.23"
    assert data["config"]["seed"] == 0
    assert str(tmp_path) not in (tmp_path / "n.json").read_text()


def test_length_beyond_the_server_is_refused_in_words(server: ServerProcess) -> None:
    done = needle("--base-url", server.base_url, "-l", "200000", "-q")
    assert done.returncode == 2, done.stdout
    assert "a prompt of 200000 tokens and 64 for the answer do not fit" in done.stderr


def test_no_server_is_exit_code_4() -> None:
    done = needle("--base-url", "http://127.0.0.1:9")
    assert done.returncode == 4
    assert "remedy:" in done.stderr
