"""Answers compared bit by bit: the environment that makes a server repeat them, and what is left to compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHIM = Path(__file__).resolve().parent / "repeatable"
VARIABLE, WORDS, MARK = "Q4_REPEATABLE", "hc,topk", "Q4_REPEATABLE replaced "
"""As tests/gpu/repeatable/sitecustomize.py has them."""

Answers = Sequence[dict[str, Any]]
"""One of {"prompt": logprobs, "output": logprobs, "ids": token ids} a prompt."""


def environment(tree: str | os.PathLike[str]) -> dict[str, str]:
    """Return what a server of the package in `tree` needs in its environment to repeat its answers."""
    path = [str(SHIM), os.path.abspath(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: WORDS}


def replaced(log: Path) -> list[str]:
    """Return the functions that a server's log says were replaced."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return sorted({line.partition(MARK)[2].strip() for line in lines if MARK in line})


def compare(one: tuple[Answers, Answers], other: tuple[Answers, Answers]) -> dict[str, Any]:
    """Return how two servers' logprobs differ, each given by two runs of the same prompts.

    A logprob is compared where both servers repeat it: "unrepeated" counts the others, "differ" those that are not
    equal in every bit, "first" names the first of these (prompt's length, leg, position, both values).
    """
    out: dict[str, Any] = {"compared": 0, "differ": 0, "unrepeated": 0}
    for a, a_again, b, b_again in zip(*one, *other, strict=True):
        for leg in ("prompt", "output"):
            for position, values in enumerate(zip(a[leg], a_again[leg], b[leg], b_again[leg], strict=True)):
                if values[0] != values[1] or values[2] != values[3]:
                    out["unrepeated"] += 1
                    continue
                out["compared"] += 1
                if values[0] != values[2]:
                    out["differ"] += 1
                    out.setdefault("first", [len(a["prompt"]) + 1, leg, position, values[0], values[2]])
    return out


def greedy(one: tuple[list[int], list[int]], other: tuple[list[int], list[int]]) -> bool | None:
    """Return whether two servers choose the same tokens, None where one does not repeat its own."""
    if one[0] != one[1] or other[0] != other[1]:
        return None
    return one[0] == other[0]
