"""Make a served Qwen4-Exp repeat its answers bit by bit, where two of the pin's kernels do not.

Python imports a module of this name at start. With this folder on PYTHONPATH and Q4_REPEATABLE=hc,topk in the
environment, a server's processes replace, right after the stock module was imported:

* hc: `fused_hc_mix_supported` of sglang.kernels.ops.gemm.hc_mix says no, so that the eager mix runs for up to 16 rows
  too (the fused kernel adds partial sums with fp32 atomics);
* topk: `fast_topk` of sglang.kernels.ops.attention.fast_topk is `exact_topk` below. The kernel fills a row in the
  order in which its threads arrive, and of scores that tie for the last places it takes those that arrive first. It is
  the only kernel that chooses blocks for Qwen4-Exp (block_topk 512), in prefill and decode.

Each replacement is told on stderr. Without the variable nothing happens. The tree that is served stays as it is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "Q4_REPEATABLE"
MARK = "Q4_REPEATABLE replaced"
"""How the line on stderr begins; the name of the function follows."""
_LOWER = 0xFFFFFFFF
"""The lower half of 64 bits: more than any column."""


def no_fused_mix(module: ModuleType) -> str:
    """Let no input take the fused kernel; return the function's name."""

    def fused_hc_mix_supported(*_args: Any, **_options: Any) -> bool:
        return False

    module.fused_hc_mix_supported = fused_hc_mix_supported  # type: ignore[attr-defined]
    return "fused_hc_mix_supported"


def exact_topk(score: Any, lengths: Any, topk: int, row_starts: Any = None) -> Any:
    """Return what fast_topk promises, and the same for the same scores: of equal scores the smaller index is taken.

    No synchronisation, and shapes that depend on shapes alone: a CUDA graph can capture it. It takes about 20 bytes a
    score for the time of the call, where the kernel takes none.

    Args:
        score: float32 [rows, keys]; of row b, score[b, row_starts[b] : row_starts[b] + lengths[b]] takes part.
        lengths: int32 [rows]. A row of at most `topk` scores is 0, 1, ...; its scores are not looked at.
        row_starts: int32 [rows], None for zeros.

    Returns:
        int32 [rows, topk], relative to row_starts, ascending, -1 last where a row has fewer scores.

    Raises:
        TypeError: for scores that are not float32, as the kernel does.
    """
    import torch

    if score.dtype != torch.float32:
        raise TypeError(f"score is {score.dtype}, expected torch.float32")
    width = score.shape[1]
    lengths = lengths.unsqueeze(1)
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts.unsqueeze(1)
    column = torch.arange(width, device=score.device)
    # One integer a score, no two alike: the score as the kernel orders it (by its bits, so -0.0 before 0.0) in the
    # upper half, the column in the lower half, the smaller the larger.
    bits = score.view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key <<= 32
    key |= _LOWER - column
    nothing = torch.iinfo(torch.int64).min
    key.masked_fill_((column < starts) | (column >= starts + lengths), nothing)
    best = key.topk(min(topk, width), dim=1, sorted=False).values
    index = torch.where(best == nothing, _LOWER, _LOWER - (best & _LOWER) - starts).sort(dim=1).values
    index = torch.nn.functional.pad(index.masked_fill(index == _LOWER, -1), (0, topk - index.shape[1]), value=-1)
    slot = torch.arange(topk, device=score.device)
    return torch.where(lengths <= topk, torch.where(slot < lengths, slot, -1), index).to(torch.int32)


def choose_exactly(module: ModuleType) -> str:
    """Put exact_topk in fast_topk's place; return the function's name."""
    module.fast_topk = exact_topk  # type: ignore[attr-defined]
    return "fast_topk"


REPLACEMENTS: dict[str, tuple[str, Callable[[ModuleType], str]]] = {
    "sglang.kernels.ops.gemm.hc_mix": ("hc", no_fused_mix),
    "sglang.kernels.ops.attention.fast_topk": ("topk", choose_exactly),
}
"""Module -> (word that asks for it, what to do once it is imported)."""


class Finder(MetaPathFinder):
    """Finds the stock modules as usual and has each one changed after its own code ran."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the stock spec with a loader that replaces, None for every other module."""
        if self._looking or name not in REPLACEMENTS or REPLACEMENTS[name][0] not in self.wanted:
            return None
        self._looking = True  # the search below comes through here again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            print(MARK, REPLACEMENTS[name][1](module), file=sys.stderr, flush=True)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(words: str) -> None:
    """Replace what the comma-separated `words` name; an unknown word is refused by name."""
    wanted = frozenset(word for word in words.split(",") if word)
    known = {word for word, _ in REPLACEMENTS.values()}
    if wanted - known:
        raise SystemExit(f"{VARIABLE}={words}: unknown {sorted(wanted - known)}, expected some of {sorted(known)}")
    if wanted:
        sys.meta_path.insert(0, Finder(wanted))


install(os.environ.get(VARIABLE, ""))
