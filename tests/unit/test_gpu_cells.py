"""The GPU matrix covers what it claims to cover, and turns a cell into the arguments SGLang gets."""

from __future__ import annotations

from tests.gpu.cells import CELLS, Cell, uncovered_pairs


def test_every_pair_of_settings_is_served_by_a_patched_cell() -> None:
    assert uncovered_pairs() == []


def test_a_missing_pair_is_named() -> None:
    kept = tuple(cell for cell in CELLS if not (cell.budget == "half" and cell.graph == "eager"))
    assert ("budget=half", "graph=eager") in uncovered_pairs(kept)


def test_names_are_unique_and_the_reference_is_resident_and_eager() -> None:
    names = [cell.name for cell in CELLS]
    assert len(names) == len(set(names))
    (reference,) = [cell for cell in CELLS if cell.expect == "reference"]
    assert (reference.budget, reference.graph, reference.ple, reference.tree) == ("0", "eager", "resident", "patched")


def test_a_cell_becomes_server_arguments() -> None:
    cell = Cell("x", "patched", "mid", "half", "breakable", "pinned", extra=("--foo",))
    assert cell.server_args({("mid", "half"): 3}) == [
        "--cuda-graph-backend-decode=breakable",
        "--cuda-graph-backend-prefill=breakable",
        "--ple-offload-embedding",
        "--cpu-offload-gb=3",
        "--foo",
    ]
    assert "--cpu-offload-gb" not in " ".join(cell.server_args({("mid", "half"): 0}))
