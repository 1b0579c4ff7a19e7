"""The fault script's judgement: every kind of fault is named, and the row it fails is the one the request reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from q4kit.errors import EnvironmentFault, NotComparableError
from q4kit.server.client import StreamEvent
from q4kit.tinymodel import PRESETS, generate
from tests.gpu import failing_rows, ple_faults
from tests.gpu.failing_rows import Table
from tests.gpu.ple_faults import CASES, EARLY, check_log, faults_of, flags_of, main, parse, point_of_failure, shown

HEALTHY, DOOMED = list(range(100, 140)), list(range(200, 216))
ROW = {"file": "model-2.safetensors", "first": 4096, "last": 4351}
ERROR = (
    "aborted: [Errno 5] PLE row read failed at byte 4096 (errno 5 EIO: Input/output error): '/m/model-2.safetensors'"
)


def good(name: str) -> dict[str, Any]:
    """Return what a case observes when all is well."""
    case: dict[str, Any] = {
        "case": name, "expected_healthy": HEALTHY, "expected_doomed": DOOMED,
        "after_healthy": HEALTHY, "after_doomed": DOOMED, "alive": True,
    }  # fmt: skip
    if name != "aborts":
        case |= {"healthy": HEALTHY, "healthy_error": "", "beside": True}
    if name.startswith("abort"):
        case |= {"wanted": 20 if name == "aborts" else 1, "stream_errors": [], "rest_s": 8.0, "idle_s": 0.02}
        case["aborted"] = case["wanted"]
    else:
        at = 8 if name.startswith("decode") else 0
        case |= {"row": ROW, "error": ERROR, "at": at, "sent": DOOMED[:at]}
    return copy.deepcopy(case)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_with_a_good_case(name: str) -> None:
    assert faults_of(good(name)) == []


READS, ABORTS, BESIDE = CASES[:4], CASES[4:], CASES[:5]
BAD: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (CASES, {"alive": False}, "the server is gone"),
    (CASES, {"failed": "HTTP 503"}, "failed: HTTP 503"),
    (CASES, {"after_healthy": HEALTHY[:-1]}, "after_healthy: 39 of 40 tokens"),
    (CASES, {"after_doomed": [*DOOMED[:3], 7]}, "after_doomed: 4 of 16 tokens, other than alone from token 3"),
    (CASES, {"after_doomed": None}, "after_doomed: no answer"),
    (BESIDE, {"healthy": [1, *HEALTHY[1:]]}, "healthy: 40 of 40 tokens, other than alone from token 0"),
    (BESIDE, {"healthy": [*HEALTHY, 1]}, "healthy: 41 of 40 tokens"),
    (BESIDE, {"healthy": []}, "healthy: 0 of 40 tokens"),
    (BESIDE, {"healthy_error": "errno 5"}, "healthy: errno 5"),
    (BESIDE, {"beside": False}, "had ended before"),
    (READS, {"error": ""}, "ended without an error"),
    (READS, {"error": ERROR.replace("model-2", "model-3")}, "does not name model-2.safetensors"),
    (READS, {"error": ERROR.replace("4096", "4095")}, "names no byte of 4096 to 4351"),
    (READS, {"error": ERROR.replace("at byte 4096 ", "")}, "names no byte of 4096 to 4351"),
    (READS, {"error": ERROR.replace("errno 5 EIO", "EIO")}, "does not name errno 5 EIO"),
    (READS, {"sent": DOOMED[:9]}, "9 tokens were sent"),
    (READS[:1], {"sent": [DOOMED[0], 9]}, "other tokens than alone"),
    (READS[:1], {"sent": []}, "did not fail while decoding"),
    (ABORTS, {"stream_errors": ["HTTP 500"]}, "a stream to be aborted: HTTP 500"),
    (ABORTS, {"aborted": 0}, "0 streams were closed in mid-stream"),
    (ABORTS, {"idle_s": 7.5}, "idle 7.5 s after the last token"),
    (ABORTS, {"idle_s": None}, "idle None s"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "changes", "message"), BAD, ids=[message for _, _, message in BAD])
def test_each_fault_is_named(names: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    for name in names:
        found = faults_of(good(name) | changes)
        assert any(message in fault for fault in found), (name, found)


@pytest.mark.parametrize("name", CASES)
def test_a_case_that_broke_off_does_not_hold(name: str) -> None:
    begun = {"case": name, "expected_healthy": HEALTHY, "alive": True}
    assert "failed: gone" in faults_of(begun | {"failed": "gone"})[0]
    assert "nothing was learned" in faults_of(begun)[0]


def test_a_case_is_shown_without_its_tokens() -> None:
    line = shown(good("abort") | {"faults": ["one"]})
    assert (line["healthy"], line["faults"], line["stream_errors"], line["beside"]) == (40, ["one"], [], True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "mini"
    generate(folder, replace(PRESETS["mini"], dtype="float32"))
    return folder


def stored_rows(model: Path) -> np.ndarray:
    """Return the table of the first PLE layer, its tensors one after the other."""
    parts: dict[int, np.ndarray] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name.startswith(f"{failing_rows.LAYER}ngram_embedding.shard_"):
                    parts[int(name.split("shard_")[1].split(".")[0])] = file.get_tensor(name)
    return np.concatenate([parts[number] for number in sorted(parts)])


def test_a_row_is_where_the_checkpoint_has_it(model: Path) -> None:
    table, rows = Table(model), stored_rows(model)
    for row in (0, 1, len(rows) // 8 - 1, len(rows) // 8, len(rows) - 1):
        place = table.place(row)
        content = place.path.read_bytes()[place.first : place.last + 1]
        assert content == rows[row].tobytes()


def test_rows_are_those_of_pairs_of_tokens(model: Path) -> None:
    table, text = Table(model), [5, 9, 400, 9, 400]
    rows = table.rows(text)
    assert rows == [table.row(text, position) for position in (1, 2, 3, 4)]
    assert rows[1] == rows[3] != rows[2]
    assert all(0 <= row < 2 * PRESETS["mini"].table_rows for row in rows)


class Pairs(Table):
    """A table of which each pair of tokens has a row of its own."""

    def __init__(self) -> None: ...

    def rows(self, ids: list[int]) -> list[int]:
        return [1000 * before + newest for before, newest in pairwise(ids)]


def test_the_row_that_fails_is_the_newest_tokens_and_nobody_elses() -> None:
    prompt, tokens = [1, 2, 3], list(range(10, 30))
    at, row = point_of_failure(Pairs(), [5, 6], prompt, tokens) or (0, 0)
    assert (at, row) == (EARLY, 1000 * tokens[EARLY - 2] + tokens[EARLY - 1])
    at, row = point_of_failure(Pairs(), [tokens[EARLY - 2], tokens[EARLY - 1]], prompt, tokens) or (0, 0)
    assert (at, row) == (EARLY + 1, 1000 * tokens[EARLY - 1] + tokens[EARLY])
    assert point_of_failure(Pairs(), [5, 6], prompt, [7] * 20) is None
    assert point_of_failure(Pairs(), tokens, prompt, tokens) is None


def test_the_control_file_is_what_the_shim_reads(tmp_path: Path) -> None:
    control = tmp_path / "poison"
    failing_rows.poison(control, failing_rows.Row(Path("/m/model-2.safetensors"), 10, 17))
    assert control.read_text() == "/model-2.safetensors 10 17\n"
    failing_rows.heal(control)
    failing_rows.heal(control)
    assert not control.exists()


def test_without_a_compiler_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="gcc is not on PATH"):
        failing_rows.build_shim(tmp_path)


def arguments(*more: str) -> Any:
    return parse(["--model=m", "--patched=p", *more])


def test_the_gpu_server_waits_in_full_graphs_and_reads_with_pread() -> None:
    flags = flags_of(arguments())
    for flag in (
        "--cuda-graph-backend-decode=full", "--ple-offload-graph-sync=wait", "--ple-offload-backend=nvme",
        "--ple-offload-reader=pread", "--cuda-graph-bs-decode=2", "--triton-attention-num-kv-splits=1",
    ):  # fmt: skip
        assert flag in flags
    assert "--ple-offload-graph-sync=gate" in flags_of(arguments("--sync=gate"))
    assert not [flag for flag in flags_of(arguments("--device=cpu")) if "graph" in flag]


NATIVE = "PLE rows: pread (pread asked for), O_DIRECT, 8000 rows of 4 B in 2 file(s)\n"
REPLACED = "Q4_REPEATABLE replaced fast_topk\n"
GATED = "PLE rows: decode graphs are launched after the read: CUDA_LAUNCH_BLOCKING is set\n"


def test_a_log_says_what_was_served(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(NATIVE + REPLACED)
    assert check_log(log, arguments()) == {"readers": 1, "gated": [], "replaced": ["fast_topk"]}
    log.write_text(NATIVE + REPLACED + GATED)
    assert check_log(log, arguments("--sync=gate"))["gated"] == [GATED.strip()]


@pytest.mark.parametrize(
    ("text", "message"), [(NATIVE + REPLACED + GATED, "launched after the read"), (REPLACED, "no 'PLE rows: pread")]
)
def test_another_server_than_the_one_asked_for_is_not_judged(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(NotComparableError, match=message):
        check_log(log, arguments())


def test_without_a_gpu_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--model=m", "--patched=p"]) == 4
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["--aborts=0", "--vocab=10"])
def test_bad_arguments_are_named(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(more)
    assert more.replace("=", " ") in capsys.readouterr().err


class Hangs:
    """Stands for a client whose stream brings three tokens and then `end`s."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __call__(self, *_: Any, **__: Any) -> Hangs:
        return self

    def __enter__(self) -> Hangs:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream_generate(self, _: Any) -> Any:
        for token in (4, 5, 6):
            yield event(token)
        self.end()


def event(token: int) -> Any:
    return StreamEvent(float(token), "", [token])


def test_a_stream_is_told_as_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EnvironmentFault("errno 5")

    monkeypatch.setattr(ple_faults, "Client", Hangs(fail))
    whole = ple_faults.Talk("http://x", [1], 9).join()
    assert (whole.tokens, whole.error, whole.step_s) == ([4, 5, 6], "errno 5", 1.0)
    with pytest.raises(Exception, match="after 3 of 4 tokens: errno 5"):
        whole.reach(4)
    stopped = ple_faults.Talk("http://x", [1], 9, stop_after=2).join()
    assert (stopped.tokens, stopped.error) == ([4, 5], "")
