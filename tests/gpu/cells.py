"""Which configurations the GPU matrix serves, and which pairs of settings they cover (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

BUDGETS = ("0", "part", "half", "all")
GRAPHS = ("eager", "full", "breakable")
PLES = ("resident", "pinned")

UNSUPPORTED: dict[tuple[str, str, str], str] = {}
"""(budget, graph, ple) -> reason, for combinations that the series refuses on purpose."""

GRAPH_ARGS: dict[str, tuple[str, ...]] = {
    "eager": ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    "full": ("--cuda-graph-backend-decode=full", "--cuda-graph-backend-prefill=breakable"),
    "breakable": ("--cuda-graph-backend-decode=breakable", "--cuda-graph-backend-prefill=breakable"),
}
PLE_ARGS: dict[str, tuple[str, ...]] = {
    "resident": ("--no-ple-offload-embedding",),
    "pinned": ("--ple-offload-embedding",),
    "nvme": ("--ple-offload-embedding", "--ple-offload-backend=nvme"),
}


@dataclass(frozen=True)
class Cell:
    """One server boot: which tree serves which model with which settings."""

    name: str
    tree: str
    """"stock" or "patched"."""
    model: str
    """"tiny" or "mid"."""
    budget: str
    graph: str
    ple: str
    extra: tuple[str, ...] = ()
    expect: str = "same"
    """"same": answers equal the reference; "reference"; "refused": a clear error at start; "fails": stock's failure."""
    fails_with: str = ""
    """With "fails": a regular expression that the error must match, so that no other fault passes for stock's."""

    def __str__(self) -> str:
        return self.name

    @property
    def twin(self) -> str:
        """Name of the cell whose bits are expected: the one under the same graphs that offloads no layer.

        Of that under breakable graphs the one under full graphs; of that under full graphs and of the reference itself.
        """
        if self.name == "breakable-resident":
            return "full-pinned"
        return {"eager": "reference", "full": "full-pinned", "breakable": "breakable-resident"}[self.graph]

    @property
    def held_to_twin(self) -> bool:
        """Whether the cell must give its twin's bits: it computes the same, from another place or without patches."""
        return self.expect in ("same", "reference")

    @property
    def updates_weights(self) -> bool:
        """Whether the cell is asked again after other weights, and then its own, were loaded into it.

        Not where the server cannot be asked: stock is not under test, the table on storage refuses an update, and
        paged experts were never updated here.
        """
        return self.tree == "patched" and self.ple != "nvme" and "--enable-paged-experts" not in self.extra

    def server_args(self, offload_gb: dict[tuple[str, str], int]) -> list[str]:
        """Return the SGLang arguments; `offload_gb`: (model, budget) -> whole GB, the unit of --cpu-offload-gb."""
        args = [*GRAPH_ARGS[self.graph], *PLE_ARGS[self.ple]]
        gigabytes = offload_gb[self.model, self.budget]
        if gigabytes:
            args.append(f"--cpu-offload-gb={gigabytes}")
        return args + list(self.extra)


CELLS: tuple[Cell, ...] = (
    Cell("reference", "patched", "mid", "0", "eager", "resident", expect="reference"),
    Cell("full-pinned", "patched", "mid", "0", "full", "pinned"),
    Cell("breakable-resident", "patched", "mid", "0", "breakable", "resident"),
    Cell("part-eager-pinned", "patched", "mid", "part", "eager", "pinned"),
    Cell("part-full-resident", "patched", "mid", "part", "full", "resident"),
    Cell("half-full-pinned", "patched", "mid", "half", "full", "pinned"),
    Cell("half-breakable-pinned", "patched", "mid", "half", "breakable", "pinned"),
    Cell("all-eager-resident", "patched", "mid", "all", "eager", "resident"),
    Cell("all-full-pinned", "patched", "mid", "all", "full", "pinned"),
    Cell("part-breakable-resident", "patched", "mid", "part", "breakable", "resident"),
    Cell("all-breakable-pinned", "patched", "mid", "all", "breakable", "pinned"),
    Cell("half-eager-resident", "patched", "mid", "half", "eager", "resident"),
    Cell("half-full-in-place", "patched", "mid", "half", "full", "pinned", extra=("--cpu-offload-experts-in-place",)),
    Cell(
        "paged-experts",
        "patched",
        "mid",
        "0",
        "full",
        "pinned",
        extra=("--enable-paged-experts", "--paged-experts-num-resident=16"),
    ),
    Cell(
        "paged-experts-nvme",
        "patched",
        "mid",
        "0",
        "full",
        "nvme",
        extra=("--enable-paged-experts", "--paged-experts-num-resident=16"),
    ),
    Cell("nvme-eager", "patched", "mid", "0", "eager", "nvme"),
    Cell("nvme-full", "patched", "mid", "0", "full", "nvme"),
    Cell("nvme-breakable", "patched", "mid", "0", "breakable", "nvme"),
    Cell("half-full-nvme", "patched", "mid", "half", "full", "nvme"),
    *(
        Cell(name, "stock", "mid", budget, graph, ple, expect="fails", fails_with=error)
        for name, budget, graph, ple, error in (
            ("stock-offload", "half", "full", "pinned", "cannot be combined with --cpu-offload-gb"),
            ("stock-offload-no-ple", "all", "full", "resident", "Cannot copy between CPU and CUDA tensors"),
            ("stock-offload-eager", "part", "eager", "resident", "is on cpu|CPU and CUDA tensors"),
            ("stock-breakable-offload", "half", "breakable", "resident", "Unsupported BCG output type|is on cpu"),
            ("stock-breakable", "0", "breakable", "resident", "Unsupported BCG output type"),
        )
    ),
    Cell("stock-eager", "stock", "mid", "0", "eager", "resident"),
    Cell("stock-full-pinned", "stock", "mid", "0", "full", "pinned"),
)


def uncovered_pairs(cells: tuple[Cell, ...] = CELLS) -> list[tuple[str, str]]:
    """Return the pairs of settings, like ("budget=half", "graph=eager"), that no patched cell serves."""
    levels = {"budget": BUDGETS, "graph": GRAPHS, "ple": PLES}
    seen = {
        frozenset(((a, getattr(cell, a)), (b, getattr(cell, b))))
        for cell in cells
        if cell.tree == "patched" and not cell.extra
        for a, b in combinations(levels, 2)
    }
    return [
        (f"{a}={x}", f"{b}={y}")
        for a, b in combinations(levels, 2)
        for x in levels[a]
        for y in levels[b]
        if frozenset(((a, x), (b, y))) not in seen
    ]
