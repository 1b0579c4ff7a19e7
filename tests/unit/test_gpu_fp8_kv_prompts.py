"""The fp8 KV check sees a missing answer, a logprob that is no number, a server that does not repeat, a far cache."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.fp8_kv_prompts import LONG_TOKENS, NEW_TOKENS, comparable, judge, lengths, prompts

CHUNK = 8


def answer(size: int, new: int = NEW_TOKENS) -> dict[str, Any]:
    return {"prompt": [-2.0] * (size - 1), "output": [-1.0] * new, "ids": [7] * new, "cached": 0}


def record() -> dict[str, Any]:
    runs = [[answer(size) for size in lengths(CHUNK)] for _ in range(2)]
    one_left = {"cached": CHUNK, "output": [-1.0] * NEW_TOKENS}
    return {"runs": runs, "long": answer(1, LONG_TOKENS), "one_left": one_left}


def test_prompts_have_one_token_and_both_sides_of_the_chunk() -> None:
    assert [len(ids) for ids in prompts(CHUNK)] == [1, 2, 3, 7, 8, 9]
    assert prompts(CHUNK) == prompts(CHUNK)


def test_equal_runs_hold() -> None:
    found = judge(record(), record(), CHUNK, 0.1, 0.1)
    assert found["ok"]
    assert found["aa"] == {"max": 0.0, "mean": 0.0}
    assert found["distance"] == {"max": 0.0, "mean": 0.0}


def change_prompt(r: dict[str, Any]) -> None:
    r["runs"][0][4]["prompt"][2] = math.nan


def change_output(r: dict[str, Any]) -> None:
    r["runs"][1][0]["output"][0] = -math.inf


def cut_answer(r: dict[str, Any]) -> None:
    r["runs"][0][0]["ids"] = []


def cut_prompt(r: dict[str, Any]) -> None:
    r["runs"][0][5]["prompt"].pop()


def cut_long(r: dict[str, Any]) -> None:
    r["long"]["output"] = r["long"]["output"][:-1]


def break_one_left(r: dict[str, Any]) -> None:
    r["one_left"]["output"][1] = math.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_prompt, "prompt of 8: a logprob is not finite"),
        (change_output, "prompt of 1: a logprob is not finite"),
        (cut_answer, "prompt of 1: 0 tokens with 4 logprobs, expected 4"),
        (cut_prompt, "prompt of 9: 7 prompt logprobs, expected 8"),
        (cut_long, "prompt of 1: 16 tokens with 15 logprobs, expected 16"),
        (break_one_left, "one token after a cached prefix: a logprob is not finite"),
    ],
)
def test_a_broken_answer_is_named(change: Callable[[dict[str, Any]], None], words: str) -> None:
    broken = record()
    change(broken)
    found = judge(broken, record(), CHUNK, 0.1, 0.1)
    assert not found["ok"]
    assert found["faults"] == [words]


def test_a_server_that_does_not_repeat_and_a_far_cache_do_not_hold() -> None:
    noisy = record()
    noisy["runs"][1][3]["prompt"][0] -= 0.2
    assert not judge(noisy, None, CHUNK, 0.1, 0.1)["ok"]
    assert judge(noisy, None, CHUNK, 0.3, 0.1)["ok"]
    far = copy.deepcopy(record())
    for run in far["runs"]:
        for item in run:
            item["prompt"] = [value - 0.5 for value in item["prompt"]]
    assert not judge(far, record(), CHUNK, 0.1, 0.1)["ok"]


@pytest.mark.parametrize("cached", [CHUNK - 1, CHUNK // 2, 0])
def test_a_prompt_that_had_more_than_one_token_left_does_not_count(cached: int) -> None:
    other = record()
    other["one_left"]["cached"] = cached
    found = judge(other, record(), CHUNK, 0.1, 0.1)
    assert (found["ok"], found["one_left"], found["faults"]) == (False, False, [])
    assert "distance" in found


def test_output_counts_up_to_the_first_token_that_differs() -> None:
    one, other = answer(3), answer(3)
    other["ids"] = [7, 9, 7, 7]
    other["output"] = [-1.0, -9.0, -9.0, -9.0]
    assert comparable([one], [other]) == ([-2.0, -2.0, -1.0], [-2.0, -2.0, -1.0])
