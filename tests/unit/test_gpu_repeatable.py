"""The module that makes a server repeat its answers: what it replaces, when, and that it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.repeatable_kernels import distinct, judge, missing  # noqa: E402

SHIM = Path(__file__).parents[1] / "gpu" / "repeatable"
HC_MIX = "def fused_hc_mix_supported(x, w_down, w_up):\n    return True\n"
FAST_TOPK = """
import torch
def fast_topk(score, lengths, topk, row_starts=None):
    return torch.tensor([[7, 2, 5, -1], [3, 0, -1, -1]], dtype=torch.int32)
"""
CODE = """
from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix_supported
from sglang.kernels.ops.attention.fast_topk import fast_topk
out = fast_topk(None, None, topk=4)
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


STOCK_ORDER, SORTED = "[[7, 2, 5, -1], [3, 0, -1, -1]]", "[[2, 5, 7, -1], [0, 3, -1, -1]]"


@pytest.mark.parametrize(
    ("words", "printed", "told"),
    [
        (None, f"True {STOCK_ORDER}", []),
        ("", f"True {STOCK_ORDER}", []),
        ("hc", f"False {STOCK_ORDER}", ["fused_hc_mix_supported"]),
        ("topk", f"True {SORTED}", ["fast_topk"]),
        ("hc,topk", f"False {SORTED}", ["fused_hc_mix_supported", "fast_topk"]),
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
