"""The module that makes a server repeat its answers: what it replaces, when, and that it says so."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.repeatable.sitecustomize import exact_topk  # noqa: E402
from tests.gpu.repeatable_kernels import TOPK, distinct, judge, judge_replacement, missing, replacement  # noqa: E402

SHIM = Path(__file__).parents[1] / "gpu" / "repeatable"
HC_MIX = "def fused_hc_mix_supported(x, w_down, w_up):\n    return True\n"
FAST_TOPK = """
import torch
def fast_topk(score, lengths, topk, row_starts=None):
    return torch.tensor([[4, 2, 0], [1, 0, -1]], dtype=torch.int32)  # as the kernel may: either 1 or 4 of the first
"""
CODE = """
from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix_supported
from sglang.kernels.ops.attention.fast_topk import fast_topk
import torch
scores = torch.tensor([[7.0, 1.0, 5.0, 0.0, 1.0], [0.0, 9.0, 9.0, 9.0, 9.0]])
out = fast_topk(scores, torch.tensor([5, 2], dtype=torch.int32), topk=3)
print(fused_hc_mix_supported(1, 2, 3), out.tolist(), out.dtype)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"gemm/hc_mix": HC_MIX, "attention/fast_topk": FAST_TOPK}.items():
        path = tmp_path / "sglang" / "kernels" / "ops" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def served(tree: Path, words: str | None) -> subprocess.CompletedProcess[str]:
    """Run CODE as a server's process would import it."""
    environment = {name: value for name, value in os.environ.items() if name != "Q4_REPEATABLE"}
    environment["PYTHONPATH"] = f"{SHIM}{os.pathsep}{tree}"
    if words is not None:
        environment["Q4_REPEATABLE"] = words
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=120)


ARRIVED, EXACT = "[[4, 2, 0], [1, 0, -1]]", "[[0, 1, 2], [0, 1, -1]]"


@pytest.mark.parametrize(
    ("words", "printed", "told"),
    [
        (None, f"True {ARRIVED}", []),
        ("", f"True {ARRIVED}", []),
        ("hc", f"False {ARRIVED}", ["fused_hc_mix_supported"]),
        ("topk", f"True {EXACT}", ["fast_topk"]),
        ("hc,topk", f"False {EXACT}", ["fused_hc_mix_supported", "fast_topk"]),
    ],
)
def test_it_replaces_what_was_asked_for_and_tells_it(
    tree: Path, words: str | None, printed: str, told: list[str]
) -> None:
    done = served(tree, words)
    assert done.stdout == f"{printed} torch.int32\n", done.stderr
    assert [line for line in done.stderr.splitlines() if "Q4_REPEATABLE" in line] == [
        f"Q4_REPEATABLE replaced {name}" for name in told
    ]


def test_an_unknown_word_is_refused(tree: Path) -> None:
    done = served(tree, "hc,topq")
    assert done.returncode != 0
    assert "unknown ['topq'], expected some of ['hc', 'topk']" in done.stderr


def test_results_are_told_apart_by_their_bits() -> None:
    values = iter([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0.5])])
    assert distinct(lambda: next(values), 3) == {"distinct": 3, "of": 3, "max_abs": 0.5}
    assert distinct(lambda: torch.tensor([1]), 2)["distinct"] == 1


def test_a_kernel_fails_only_where_it_must_repeat() -> None:
    once, twice = {"alone": {"distinct": 1}}, {"alone": {"distinct": 2}}
    assert [judge("k", "repeats", counts)["ok"] for counts in (once, twice)] == [True, False]
    assert [judge("k", "may vary", counts)["ok"] for counts in (once, twice)] == [True, True]


def test_an_index_that_is_not_among_the_largest_is_missed() -> None:
    scores = torch.arange(600.0).repeat(2, 1)
    right = scores.topk(512, dim=1).indices.int()
    wrong = right.clone()
    wrong[1, 0] = 3
    assert (missing(right, scores), missing(wrong, scores)) == (0, 1)


def by_hand(row: list[float], start: int, length: int, k: int) -> list[int]:
    """Choose as the kernel's source orders scores (convert_to_uint32 of fast_topk.cuh), of equal ones the first."""
    if length <= k:
        return [i if i < length else -1 for i in range(k)]

    def key(score: float) -> int:
        (bits,) = struct.unpack("<I", struct.pack("<f", score))
        return ~bits & 0xFFFFFFFF if bits >> 31 else bits | 0x80000000

    chosen = sorted(range(length), key=lambda i: (-key(row[start + i]), i))[:k]
    return sorted(chosen)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


K = 8
FEW = (0.0, -0.0, 1.5, -1.5, float("inf"), float("-inf"))
"""So few different scores that most places are tied for."""
LENGTHS = [0, 1, K - 1, K, K + 1, 3 * K, 40]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("starts", [None, [5, 0, 3, 24, 1, 16, 0]])
def test_of_equal_scores_the_first_are_chosen_whatever_the_lengths(seed: int, starts: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.tensor(FEW)[torch.randint(len(FEW), (len(LENGTHS), 40), generator=generator)]
    got = exact_topk(score, int32(LENGTHS), K, None if starts is None else int32(starts))
    want = [by_hand(*row, K) for row in zip(score.tolist(), starts or [0] * len(LENGTHS), LENGTHS, strict=True)]
    assert got.dtype == torch.int32
    assert got.tolist() == want


@pytest.mark.parametrize("width", [K + 1, 100, 5000])
def test_without_ties_the_set_is_that_of_the_largest(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    score = torch.stack([torch.randperm(width, generator=generator) for _ in range(5)]).float() - width / 2
    got = exact_topk(score, int32([width] * 5), K)
    assert torch.equal(got.long(), score.topk(K, dim=1).indices.sort(dim=1).values)


def test_what_lies_outside_a_row_is_not_looked_at() -> None:
    score = torch.full((2, 20), float("inf"))
    score[:, 4:14] = torch.tensor([float("nan"), *range(9)])  # the kernel too puts NaN above all
    wide = torch.full((2, 30), float("nan"))
    wide[:, :20] = score
    for given in (score, wide[:, :20]):  # rows of a wider table
        assert exact_topk(given, int32([10, 3]), 4, int32([4, 4])).tolist() == [[0, 7, 8, 9], [0, 1, 2, -1]]


def test_rows_that_fit_need_no_scores() -> None:
    """Decode leaves scores of such rows unwritten, and a table may be narrower than k."""
    assert exact_topk(torch.full((2, 3), float("nan")), int32([3, 2]), 5).tolist() == [
        [0, 1, 2, -1, -1],
        [0, 1, -1, -1, -1],
    ]
    assert exact_topk(torch.empty(1, 2), int32([4]), 5).tolist() == [[0, 1, 2, 3, -1]]
    assert exact_topk(torch.empty(1, 0), int32([0]), 2).tolist() == [[-1, -1]]
    assert exact_topk(torch.empty(0, 9), int32([]), 2).shape == (0, 2)


def test_scores_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"score is torch\.bfloat16, expected torch\.float32"):
        exact_topk(torch.zeros(1, 4, dtype=torch.bfloat16), int32([4]), 2)


ROWS, KEYS = 3, 700


def right(scores: torch.Tensor) -> torch.Tensor:
    return exact_topk(scores, int32([scores.shape[1]] * len(scores)), TOPK)


def last_of_equal(scores: torch.Tensor) -> torch.Tensor:
    """Choose exactly, but of equal scores the last."""
    return (scores.shape[1] - 1 - right(scores.flip(1))).flip(1)


def one_off(scores: torch.Tensor) -> torch.Tensor:
    """Choose the best but one."""
    return right(torch.where(scores == scores.amax(dim=1, keepdim=True), -1.0, scores))


def by_arrival(scores: torch.Tensor) -> torch.Tensor:
    """Choose exactly, of equal scores any, in any order: as the kernel."""
    order = torch.randperm(scores.shape[1])
    return order[scores[:, order].topk(TOPK, dim=1).indices].int()


def in_any_order(scores: torch.Tensor) -> torch.Tensor:
    return right(scores)[:, torch.randperm(TOPK)]


@pytest.mark.parametrize(
    ("exact", "stock", "found"),
    [
        (right, by_arrival, set()),
        (last_of_equal, by_arrival, {"wrong"}),
        (one_off, by_arrival, {"unlike_stock", "wrong"}),
        (right, one_off, {"unlike_stock"}),
        (by_arrival, by_arrival, {"unlike_stock", "wrong", "alone", "busy"}),
        (in_any_order, by_arrival, {"unlike_stock", "wrong", "alone", "busy"}),
    ],
)
def test_a_replacement_is_held_to_the_definition_to_the_kernel_and_to_itself(
    exact: Callable[[torch.Tensor], torch.Tensor], stock: Callable[[torch.Tensor], torch.Tensor], found: set[str]
) -> None:
    scores = torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(1))
    counts = replacement(exact, stock, scores, repeats=4)
    assert counts["tied"] == ROWS
    seen = {name for name in ("unlike_stock", "wrong") if counts[name]}
    assert seen | {leg for leg in ("alone", "busy") if counts[leg]["distinct"] > 1} == found
    case = judge_replacement("k", ROWS, KEYS, counts)
    assert (case["case"], case["ok"]) == ("k", not found)


@pytest.mark.parametrize(
    ("change", "keys", "ok"),
    [
        ({}, KEYS, True),
        ({"graph": True}, KEYS, True),
        ({"graph": False}, KEYS, False),
        ({"tied": ROWS - 1}, KEYS, False),  # then nothing was shown
        ({"tied": 0}, TOPK, True),
    ],
)
def test_a_replacement_passes_only_with_ties_and_from_a_graph(change: dict[str, Any], keys: int, ok: bool) -> None:
    once = {"distinct": 1}
    counts = {"unlike_stock": 0, "wrong": 0, "tied": ROWS, "alone": once, "busy": once} | change
    assert judge_replacement("k", ROWS, keys, counts)["ok"] is ok


def test_rows_that_fit_are_no_case_of_ties() -> None:
    scores = torch.rand(ROWS, TOPK)
    counts = replacement(right, lambda some: right(some).flip(1), scores, repeats=2)
    assert judge_replacement("k", ROWS, TOPK, counts)["ok"]
    assert counts["tied"] == 0
