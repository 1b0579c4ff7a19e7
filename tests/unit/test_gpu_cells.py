"""The GPU matrix covers what it claims to cover, and turns a cell into the arguments SGLang gets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from q4kit.errors import ServerError
from q4kit.server.launch import HANG_MARK
from tests.gpu import matrix, timing
from tests.gpu.cells import CELLS, Cell, uncovered_pairs
from tests.gpu.inputs import fingerprint, with_modules
from tests.gpu.matrix import COLUMNS, Run, bits_fault, failure, parse, table, update_fault
from tests.gpu.wave import Seat


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


def test_an_in_place_cell_is_the_offload_cell_with_the_flag() -> None:
    cells = {cell.name: cell for cell in CELLS}
    budgets = {("mid", "half"): 2}
    in_place, copied = (cells[name].server_args(budgets) for name in ("half-full-in-place", "half-full-pinned"))
    assert in_place == [*copied, "--cpu-offload-experts-in-place"]


def test_weights_are_updated_where_the_server_can_be_asked() -> None:
    asked = {cell.name for cell in CELLS if cell.updates_weights}
    assert {"reference", "half-full-pinned", "half-full-in-place", "all-breakable-pinned"} <= asked
    assert not asked & {"nvme-full", "half-full-nvme", "paged-experts", "paged-experts-nvme", "stock-full-pinned"}


def scored(*logprobs: float) -> list[dict[str, Any]]:
    return [{"prompt": list(logprobs), "ids": [1]}]


@pytest.mark.parametrize(
    ("floor", "update", "fault"),
    [
        (0.0, None, None),
        (0.0, {"success": True, "run": scored(-1.0, -2.0)}, None),
        (0.1, {"success": True, "run": scored(-1.0, -2.2)}, None),
        (0.1, {"success": True, "run": scored(-1.0, -2.3)}, "moved by 0.3"),
        (0.0, {"success": True, "run": scored(-1.0, -2.0001)}, "moved by 0.0001"),
        (0.0, {"success": False, "message": "no", "run": scored(-1.0, -2.0)}, "weight update refused: no"),
    ],
)
def test_an_update_to_the_same_weights_must_not_move_the_answers(
    floor: float, update: dict[str, Any] | None, fault: str | None
) -> None:
    result: dict[str, Any] = {"runs": [scored(-1.0, -2.0), scored(-1.0, -2.0 - floor)]}
    found = update_fault(result | ({"update": update} if update else {}))
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"success": True, "run": scored(-1.0, -2.5)}, None),
        ({"success": True, "run": scored(-1.0, -2.0)}, "an update to other weights did not move the logprobs"),
        ({"success": False, "message": "no"}, "weight update refused: no"),
    ],
)
def test_an_update_to_other_weights_must_move_the_answers(other: dict[str, Any], fault: str | None) -> None:
    result = {"runs": [scored(-1.0, -2.0), scored(-1.0, -2.0)], "other": other}
    assert update_fault(result) == fault


def test_inputs_are_contents_and_options_not_places(tmp_path: Path) -> None:
    def tree(name: str, text: str) -> Path:
        (tmp_path / name / "sglang").mkdir(parents=True)
        (tmp_path / name / "sglang" / "a.py").write_text(text)
        return tmp_path / name

    def checkpoint(name: str, weights: bytes) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "w.safetensors").write_bytes(weights)
        return tmp_path / name

    one, same, other = tree("one", "x"), tree("same", "x"), tree("other", "y")
    first, second = checkpoint("first", b"1"), checkpoint("second", b"2")
    found = fingerprint([one, first], ["--half-gb", "1"])
    assert found == fingerprint([same, first], ["--half-gb", "1"])
    assert len(
        {
            found,
            fingerprint([other, first], ["--half-gb", "1"]),
            fingerprint([one, second], ["--half-gb", "1"]),
            fingerprint([one, first], ["--half-gb", "2"]),
            fingerprint([one, tmp_path / "none"], ["--half-gb", "1"]),
        }
    ) == 5  # fmt: skip


def test_a_script_stands_for_the_modules_that_it_imports(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json\nfrom tests.gpu.one import x\nfrom tests.gpu import two\n")
    (tmp_path / "one.py").write_text("def late():\n    from tests.gpu.three import y\n")
    (tmp_path / "two.py").write_text("from tests.gpu.one import x\n")
    (tmp_path / "three.py").write_text("from tests.gpu.script import main\n")
    (tmp_path / "other.py").write_text("")
    names = [path.name for path in with_modules(tmp_path / "script.py")]
    assert names == ["script.py", "one.py", "three.py", "two.py"]
    assert with_modules(tmp_path / "none.py") == [tmp_path / "none.py"]


def test_a_twin_is_resident_under_the_same_graphs() -> None:
    cells = {cell.name: cell for cell in CELLS}
    for cell in CELLS:
        twin = cells[cell.twin]
        same = "full" if cell.name == "breakable-resident" else cell.graph
        assert (twin.graph, twin.budget, twin.tree, twin.held_to_twin) == (same, "0", "patched", True)
    assert cells["half-full-in-place"].held_to_twin
    assert cells["paged-experts-nvme"].held_to_twin
    assert cells["stock-full-pinned"].held_to_twin
    assert not cells["stock-breakable"].held_to_twin
    assert [cell.name for cell in CELLS if cell.twin == cell.name] == ["reference", "full-pinned"]


def test_every_failure_of_stock_says_what_it_is() -> None:
    assert all(bool(cell.fails_with) == (cell.expect == "fails") for cell in CELLS)


@pytest.mark.parametrize(
    ("error", "holds"),
    [("TypeError: Unsupported BCG output type: X", True), ("the server was not healthy after 400 s", False)],
)
def test_another_failure_than_stocks_does_not_pass_for_it(stand: Stand, error: str, holds: bool) -> None:
    run = Run(parse([*stand.arguments()[:4], f"--stock={stand.tree}", "--only", "stock-breakable"]))
    run.results["stock-breakable"] = {"error": error}
    bad, unknown = run.judge()
    assert (bad == [], unknown) == (holds, [])


def answer(*logprobs: float, ids: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"prompt": list(logprobs), "output": [], "ids": list(ids)}


def served(first: float, second: float, tokens: tuple[int, ...] = (1, 2), again: tuple[int, ...] = (1, 2)) -> Any:
    """Return a record whose two runs score -1, then `first` and `second`; two greedy answers."""
    return {
        "runs": [[answer(-1.0, first)], [answer(-1.0, second)]],
        "long": answer(ids=tokens),
        "long_again": answer(ids=again),
        "pair": [answer(), answer()],
        "rss_gib": 1.0,
    }


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (served(-2.0, -2.0), None),
        (served(-2.5, -2.0), None),
        (served(-2.0000001, -2.0000001), "1 of 2 logprobs are not half's bits, first [3, 'prompt', 1"),
        (served(-2.0, -2.0, tokens=(1, 3), again=(1, 3)), "greedy tokens are not half's"),
        (served(-2.0, -2.0, tokens=(1, 3), again=(1, 4)), "greedy tokens are not repeated"),
        (
            served(-2.0, -2.0) | {"pair": [answer(), answer(ids=(2,))]},
            "two requests at once are not answered as by half",
        ),
        (served(-2.0, -2.0) | {"other": {"run": [answer(-3.0)]}}, None),
        (served(-2.0, -2.0) | {"other": {"run": [answer(-3.1)]}}, "1 logprobs are not half's bits after an update"),
    ],
)
def test_a_cell_is_held_to_the_bits_of_its_twin(result: Any, fault: str | None) -> None:
    class Half(Cell):
        twin = "half"  # type: ignore[assignment]

    twin = served(-2.0, -2.0) | {"other": {"run": [answer(-3.0)]}}
    found = bits_fault(Half("x", "patched", "mid", "half", "full", "pinned"), result, twin)
    assert found is None if fault is None else fault in str(found)


class Stand:
    """Stands for servers of a matrix: which were asked and timed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.turns: list[str] = []
        self.model, self.tree, self.out = folder / "model", folder / "tree", folder / "out"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.tree / "sglang").mkdir(parents=True)
        monkeypatch.setattr(Run, "boot", self.boot)
        monkeypatch.setattr(Run, "answer", self.answer)
        monkeypatch.setattr(matrix, "take_sample", self.sample)

    def boot(self, seat: Any) -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        seat.server = SimpleNamespace(
            pid=process.pid,
            stop=process.wait,
            pause=lambda: os.killpg(process.pid, signal.SIGSTOP),
            resume=lambda: os.killpg(process.pid, signal.SIGCONT),
        )

    def answer(self, seat: Any) -> None:
        self.asked.append(seat.cell.name)
        seat.record |= served(-2.0, -2.0) | {"update": {"success": True, "run": [answer(-1.0, -2.0)]}}

    def sample(self, seat: Any, number: int, session: float, method: Any) -> dict[str, Any]:
        self.turns.append(f"{seat.cell.name} {number}")
        figures = {"step_us": 1000.0, "p50_us": 1000.0, "p95_us": 1000.0, "ttft_s": 0.1}
        return {
            "session": session, "gpu": seat.gpu, "round": number, "method": method.to_json(), "decode": figures,
            "pcie_rx_bytes_s": 1e9,
        }  # fmt: skip

    def arguments(self, *more: str) -> list[str]:
        paths = [str(self.out), f"--model={self.model}", f"--patched={self.tree}", "--half-gb=2", "--rounds=2"]
        return [*paths, *more, "--only", "reference", "full-pinned", "half-full-pinned"]

    def run(self, *more: str) -> int:
        self.asked.clear()
        self.turns.clear()
        return matrix.main(self.arguments(*more))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def test_a_matrix_with_answers_is_timed_later_and_then_done(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    assert stand.run("--answers-only") == 0
    assert (len(stand.asked), stand.turns) == (3, [])
    assert stand.run("--answers-only") == 0
    assert (stand.asked, stand.turns) == ([], [])
    assert stand.run() == 0
    names = ["reference", "full-pinned", "half-full-pinned"]
    assert (stand.asked, stand.turns) == ([], [f"{n} 0" for n in names] + [f"{n} 1" for n in names[::-1]])
    assert stand.run("--answers-only", "--repeatable") == 0  # other answers, in a folder of their own on a real run
    capsys.readouterr()


def test_a_matrix_can_be_timed_alone_and_asked_later(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    assert stand.run("--timings-only") == 0
    assert (stand.asked, len(stand.turns)) == ([], 6)
    row = "| served | - | - | - | - | - | - | 1000.0 | 1.000 (1.000..1.000) | 1.00 | - | - | - |"
    assert capsys.readouterr().out.count(row) == 3
    assert stand.run("--timings-only") == 0
    assert (stand.asked, stand.turns) == ([], [])
    assert stand.run() == 0
    assert (len(stand.asked), stand.turns) == (3, [])


def test_timings_alone_that_are_missing_are_not_known(stand: Stand) -> None:
    run = Run(parse(stand.arguments("--timings-only")))
    assert run.judge() == ([], [f"{cell.name}: 2 of 2 rounds missing" for cell in run.cells])


def test_a_matrix_without_rounds_is_incomplete_and_still_prints(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix.Clock, "admits", lambda self, stage, who: stage != "turn")
    assert stand.run() == 3
    printed = capsys.readouterr()
    assert "reference: 2 of 2 rounds missing" in printed.err
    assert printed.out.count("| served |") == 3


def test_the_ratio_is_that_of_the_rounds(stand: Stand) -> None:
    assert stand.run() == 0
    text = (stand.out / "table.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.splitlines()]
    assert {len(row) for row in rows[:1] + rows[2:]} == {len(COLUMNS)}
    column = COLUMNS.index("decode / full-pinned (min..max)")
    assert [row[column].strip() for row in rows[2:]] == ["1.000 (1.000..1.000)"] * 3


def test_a_servers_first_request_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles kernels for seconds, in which nothing is copied."""
    steps: list[tuple[int, bool]] = []
    metered: list[bool] = [False]

    class Meter(contextlib.nullcontext[Any]):
        mean, samples = 1.0, (1,)

        def __init__(self, gpu: int) -> None:
            super().__init__(self)
            metered[0] = True

    def decode(client: Any, seed: int, how: timing.Method) -> dict[str, float]:
        steps.append((how.decode_tokens, metered[0]))
        return {"step_us": 1.0}

    monkeypatch.setattr(matrix.timing, "decode", decode)
    monkeypatch.setattr(matrix, "PcieMeter", Meter)
    seat = SimpleNamespace(gpu="0", server=SimpleNamespace(base_url="http://127.0.0.1:9"))
    for number in (0, 1):
        metered[0] = False
        sample = matrix.take_sample(seat, number, 1.0, timing.Method(40, 10, 0, 500))  # type: ignore[arg-type]
        assert (sample["pcie_rx_bytes_s"], sample["decode"]) == (1.0, {"step_us": 1.0})
    assert steps == [(4, False), (40, True), (40, True)]


def test_the_first_turn_does_not_decide_the_traffic() -> None:
    step = {"step_us": 1000.0, "ttft_s": 0.1}
    found = matrix.speeds([{"decode": step, "pcie_rx_bytes_s": traffic} for traffic in (1e6, 8e9, 9e9, None)])
    assert found["pcie_rx_bytes_s"] == 8e9
    assert "pcie_rx_bytes_s" not in matrix.speeds([{"decode": step, "pcie_rx_bytes_s": None}])


def test_a_cell_that_failed_is_a_row_and_a_verdict(stand: Stand) -> None:
    results: dict[str, dict[str, Any]] = {"reference": {"error": "dead"}}
    (reference,) = [cell for cell in CELLS if cell.name == "reference"]
    assert table(results, (reference,)).splitlines()[2].count("|") == len(COLUMNS) + 1
    run = Run(parse(stand.arguments()))
    run.results["reference"] = {"error": "dead"}
    bad, unknown = run.judge()
    assert bad == ["reference: dead"]
    assert unknown == ["full-pinned: no answers", "half-full-pinned: no answers"]


def test_by_bits_a_cell_without_its_twin_is_not_known_and_the_floor_is_held(stand: Stand) -> None:
    run = Run(parse(stand.arguments("--repeatable", "--answers-only", "--floor=0.1")))
    moved = served(-2.5, -2.5)
    run.results |= {"reference": served(-2.0, -2.0), "half-full-pinned": moved, "full-pinned": {"error": "dead"}}
    bad, unknown = run.judge()
    assert bad == ["full-pinned: dead", "half-full-pinned: 0.5 from the reference, floor 0.1"]
    assert unknown == ["half-full-pinned: full-pinned did not serve, so no bits compared"]
    run.results["full-pinned"] = served(-2.0, -2.0)
    assert "half-full-pinned: 1 of 2 logprobs are not full-pinned's bits" in run.judge()[0][0]
    run.results["full-pinned"] = served(-2.0, -2.0, tokens=(1, 3), again=(1, 3))
    assert "full-pinned: 1 of 200 greedy tokens are the reference's" in run.judge()[0]
    del run.results["reference"]
    run.results["reference"] = {}
    assert "full-pinned: no reference, so no tokens compared" in run.judge()[1]


def test_the_record_of_a_server_that_hung_says_so_and_holds_its_stacks() -> None:
    hung = f"the server was not healthy after 400 s (log: x)\n{HANG_MARK}\npid 1: state S\n  File 'PipeError.py'\n"
    record = failure(Seat(None, None), ServerError(hung + "Extension modules: " + "x" * 9000))
    assert record["error"] == "the server was not healthy after 400 s (log: x)"
    assert f"{HANG_MARK}\npid 1: state S\n" in record["full"]
    spoken = f"the server was not healthy after 400 s (log: x)\nValueError: no\nwaiting\n{HANG_MARK}\npid 1: state S"
    assert failure(Seat(None, None), ServerError(spoken))["error"] == "ValueError: no"
    crash = "exited\nRuntimeError: mat2 is on cpu\n[02:40:46] Pyspy failed (py-spy). Error: py-spy: not found"
    assert failure(Seat(None, None), ServerError(crash))["error"] == "RuntimeError: mat2 is on cpu"
