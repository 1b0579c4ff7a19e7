"""Make a served Qwen4-Exp repeat its answers bit by bit: two of the pin's kernels sum in a varying order.

Python imports a module of this name at start. With this folder on PYTHONPATH and Q4_REPEATABLE=hc,topk in the
environment, a server's processes replace, right after the stock module was imported:

* hc: `fused_hc_mix_supported` of sglang.kernels.ops.gemm.hc_mix says no, so that the eager mix runs for up to 16 rows
  too (the fused kernel adds partial sums with fp32 atomics);
* topk: `fast_topk` of sglang.kernels.ops.attention.fast_topk returns each row in ascending order, padding (-1) last
  (the kernel fills the row in the order in which its threads arrive; the set is always the same).

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


def no_fused_mix(module: ModuleType) -> str:
    """Let no input take the fused kernel; return the function's name."""

    def fused_hc_mix_supported(*_args: Any, **_options: Any) -> bool:
        return False

    module.fused_hc_mix_supported = fused_hc_mix_supported  # type: ignore[attr-defined]
    return "fused_hc_mix_supported"


def sorted_topk(module: ModuleType) -> str:
    """Sort what fast_topk returns, int32 [rows, topk]; return the function's name."""
    import torch

    stock = module.fast_topk
    last = torch.iinfo(torch.int32).max

    def fast_topk(*args: Any, **options: Any) -> Any:
        chosen = stock(*args, **options)
        ordered = torch.where(chosen < 0, last, chosen).sort(dim=1).values
        return torch.where(ordered == last, -1, ordered).to(torch.int32)

    module.fast_topk = fast_topk  # type: ignore[attr-defined]
    return "fast_topk"


REPLACEMENTS: dict[str, tuple[str, Callable[[ModuleType], str]]] = {
    "sglang.kernels.ops.gemm.hc_mix": ("hc", no_fused_mix),
    "sglang.kernels.ops.attention.fast_topk": ("topk", sorted_topk),
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
