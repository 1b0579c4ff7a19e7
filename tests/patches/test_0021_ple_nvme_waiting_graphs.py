"""Decode graphs that are launched before their rows are read: a native thread answers them in order, and always."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ple_checkpoints
import pytest
import torch
from ple_checkpoints import loaded, ple_modules, refuse_row
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.models import qwen4_exp
from sglang.srt.models.qwen4_exp import Qwen4ExpPLELayer

HEADS = 16
# Where the flag is missing, its model does not start: the fixture shows the fault.
pytestmark = [
    pytest.mark.red_on_stock(setup=True),
    # The thread that recovers failed reads must not end by an exception.
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ple_checkpoints.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    with loaded(folder, "--ple-offload-backend", "nvme", "--ple-offload-graph-sync", "wait") as model:
        yield model
        for module in ple_modules(model).values():
            module.ngram_embedding.waiting_graphs.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What a capture would record of stream memory operations: (name, address, value)."""
    from sglang.srt.models import qwen4_exp_ple_wait

    log: list[tuple[str, int, int]] = []
    monkeypatch.setattr(qwen4_exp_ple_wait, "_record_memop", lambda *operation: log.append(operation))
    return log


class Device:
    """Runs launched graphs in order, as a stream does: publish the ids, work, wait for the rows, use them."""

    def __init__(self, graphs: Any) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self._graphs, self._queue = graphs, []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, step: int, tokens: int, ids: torch.Tensor) -> None:
        with self._changed:
            self._queue.append((step, tokens, ids))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                step, tokens, ids = self._queue.pop(0)
            shared = self._graphs[tokens]
            flags = shared.flags.numpy()
            ids_ready, rows_ready = ((a - shared.flags.data_ptr()) // 8 for a in (shared.ids_ready, shared.rows_ready))
            shared.ids.copy_(ids)
            flags[ids_ready] = 1
            time.sleep(0.001)
            while not flags[rows_ready]:
                time.sleep(0)
            flags[rows_ready] = 0
            with self._changed:
                self.rows[step] = shared.rows.clone()
                self._changed.notify_all()

    def result(self, step: int) -> torch.Tensor:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.rows, 30), f"the graph of step {step} hangs"
            return self.rows[step]


def waiting(model: Any, *sizes: int) -> tuple[Any, Any]:
    """Return the embedding of the first PLE layer and its graphs, with graphs of `sizes` tokens reserved."""
    embedding = ple_modules(model)[1].ngram_embedding
    for tokens in sizes:
        assert embedding.waiting_graphs.reserve(tokens, HEADS)
    return embedding, embedding.waiting_graphs


def random_ids(embedding: Any, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, embedding.org_vocab_size, (tokens, HEADS), generator=generator)


def stored(embedding: Any, ids: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((*ids.shape, embedding.row_bytes), dtype=torch.uint8)
    embedding.reader.read_rows(ids.reshape(-1), rows.view(-1, embedding.row_bytes))
    return rows


def first_failure(embedding: Any, graphs: Any, device: Device) -> dict[int, str]:
    """Return the failures of the first step of one token that fails within 30 s."""
    failed: dict[int, str] = {}
    step = 0
    deadline = time.monotonic() + 30
    while not failed and time.monotonic() < deadline:
        step += 1
        graphs.push(step, 1, torch.arange(1))
        device.launch(step, 1, random_ids(embedding, 1, step))
        failed = graphs.take_failures(step)
        time.sleep(0.05)
    return failed


def test_graphs_get_their_rows_with_the_host_steps_ahead(model: Any) -> None:
    embedding, graphs = waiting(model, 1, 2, 4)
    device = Device(graphs)
    launched = {}
    for step in range(1, 61):
        tokens = (1, 2, 4)[step % 3]
        live = tokens - 1 if tokens > 1 and step % 2 else tokens
        ids = random_ids(embedding, tokens, step)
        graphs.push(step, tokens, torch.arange(live))
        device.launch(step, tokens, ids)
        launched[step] = live, ids
        if step > 2:
            assert graphs.take_failures(step - 2) == {}
    for step, (live, ids) in launched.items():
        rows = device.result(step)
        assert torch.equal(rows[:live], stored(embedding, ids[:live])), step
        assert not rows[live:].any(), "padding gets the rows of other tokens"
    asked = sum(live * HEADS for live, _ in launched.values())
    # The rows read to compare with come on top.
    assert embedding.read_stats()["rows"] == 2 * asked


def test_an_idle_batch_is_answered_too(model: Any) -> None:
    embedding, graphs = waiting(model, 2)
    device = Device(graphs)
    graphs.push(1, 2, torch.arange(0))
    device.launch(1, 2, random_ids(embedding, 2, 1))
    assert not device.result(1).any()


def test_a_failed_read_fails_its_own_sequence_of_its_own_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, graphs = waiting(model, 2)
    device = Device(graphs)
    good, bad = (random_ids(embedding, 2, seed) for seed in (1, 2))
    poisoned = int(bad[1, 3])
    assert poisoned not in bad[0]
    expected = stored(embedding, bad[:1])
    refuse_row(embedding.reader, poisoned, monkeypatch)
    server = graphs._server
    monkeypatch.setattr(server, "_check_paths", lambda: None)
    for step, ids in ((1, good), (2, bad), (3, good)):
        # The native read cannot be made to fail for one row, so it is distrusted for one step.
        server._native.serve_suspect(server._handle, step == 2)
        graphs.push(step, 2, torch.arange(2))
        device.launch(step, 2, ids)
        device.result(step)
    assert graphs.take_failures(1) == {}
    assert graphs.take_failures(3) == {}
    failed = graphs.take_failures(2)
    assert list(failed) == [1]
    assert "Input/output error" in failed[1]
    assert torch.equal(device.result(2)[:1], expected)
    assert not device.result(2)[1].any(), "stale rows of the step before"


def test_a_truncated_shard_fails_the_step_by_name_and_the_graph_goes_on(model: Any, folder: Path) -> None:
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    ids = random_ids(embedding, 1, 1)
    shard = Path(embedding.reader.source.files[0].path)
    os.truncate(shard, shard.stat().st_size - 1)
    graphs.push(1, 1, torch.arange(1))
    device.launch(1, 1, ids)
    failed = graphs.take_failures(1)
    assert shard.name in failed[0]
    assert not device.result(1).any()


def test_an_exception_of_the_recovery_releases_the_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    ids = random_ids(embedding, 1, 1)
    ids[0, 0] = embedding.org_vocab_size  # no such row: not an I/O error
    graphs.push(1, 1, torch.arange(1))
    device.launch(1, 1, ids)
    assert "outside the table" in graphs.take_failures(1)[0]
    assert not device.result(1).any()


def test_rows_that_nobody_could_recover_are_zeros(model: Any) -> None:
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    good = random_ids(embedding, 1, 1)
    bad = good.clone()
    bad[0, 0] = embedding.org_vocab_size
    for step, ids in ((1, good), (2, bad)):
        graphs.push(step, 1, torch.arange(1))
        device.launch(step, 1, ids)
    assert device.result(1).any()
    assert not device.result(2).any(), "rows of the step before"


def test_two_steps_ahead_the_older_one_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    good = random_ids(embedding, 1, 1)
    bad = good.clone()
    bad[0, 0] = embedding.org_vocab_size
    graphs.push(1, 1, torch.arange(1))
    graphs.push(2, 1, torch.arange(1))
    device.launch(1, 1, bad)
    device.launch(2, 1, good)
    assert "outside the table" in graphs.take_failures(1)[0]
    assert graphs.take_failures(2) == {}
    assert torch.equal(device.result(2), stored(embedding, good))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_recovery_that_fails_ends_the_scheduler(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph goes on with whatever is in its buffer: nothing of that may be served."""
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)

    def out_of_memory(step: int) -> None:
        raise MemoryError(step)

    monkeypatch.setattr(graphs._server, "_recover", out_of_memory)
    ids = random_ids(embedding, 1, 1)
    ids[0, 0] = embedding.org_vocab_size
    graphs.push(1, 1, torch.arange(1))
    device.launch(1, 1, ids)
    device.result(1)
    with pytest.raises(RuntimeError, match="rows of a decode step are lost"):
        graphs.take_failures(1)


def test_failures_that_nobody_asks_for_are_dropped(model: Any) -> None:
    from sglang.srt.models.qwen4_exp_ple_wait import _STEPS_KEPT

    _, graphs = waiting(model, 1)
    graphs._failures[1] = {0: "of a step whose result was dropped"}
    graphs.push(1 + _STEPS_KEPT, 1, torch.arange(1))
    assert 1 not in graphs._failures


def test_a_change_of_metadata_is_noted_once(model: Any) -> None:
    """A chmod moves ctime, as replacing the file does; afterwards reads are native again."""
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    for file in embedding.reader.source.files:
        os.chmod(file.path, 0o600)
    native = []
    for step in range(1, 6):
        graphs.push(step, 1, torch.arange(1))
        device.launch(step, 1, random_ids(embedding, 1, step))
        assert graphs.take_failures(step) == {}
        native.append(graphs.stats()["batches"])
    assert native[-1] >= 3, f"steps that needed no recovery, after each step: {native}"


def test_a_link_pointed_elsewhere_is_noticed(folder: Path) -> None:
    """Neither the open file nor its metadata change then: only a look at the path tells."""
    for path in sorted(folder.glob("*.safetensors")):
        real = path.with_suffix(".real")
        path.rename(real)
        path.symlink_to(real)
    with loaded(folder, "--ple-offload-backend", "nvme") as model:
        embedding, graphs = waiting(model, 1)
        device = Device(graphs)
        shard = Path(embedding.reader.source.files[0].path)
        copy = shard.with_suffix(".copy")
        copy.write_bytes(shard.read_bytes())
        link = shard.with_suffix(".link")
        link.symlink_to(copy)
        link.replace(shard)
        failed = first_failure(embedding, graphs, device)
        graphs.close()
    assert "replaced while it was open" in failed[0]


def test_a_replaced_shard_is_noticed_without_a_failed_read(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that leads to another file leaves no trace on the file that is open."""
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    shard = Path(embedding.reader.source.files[0].path)
    replacement = shard.with_suffix(".new")
    replacement.write_bytes(shard.read_bytes())
    replacement.replace(shard)
    failed = first_failure(embedding, graphs, device)
    assert "replaced while it was open" in failed[0]


def test_closing_gives_up_a_graph_that_never_asks(model: Any) -> None:
    """Afterwards the thread looks at the graph's memory no more: it may be somebody else's by then."""
    _, graphs = waiting(model, 1)
    graphs.push(1, 1, torch.arange(1))
    closed = threading.Thread(target=graphs._server.close)
    closed.start()
    closed.join(20)
    assert not closed.is_alive()
    flags = graphs[1].flags
    flags.fill_(1)
    time.sleep(0.1)
    assert flags.eq(1).all(), "a flag was taken back after the server had been closed"


def test_a_graph_that_comes_after_the_close_does_not_hang(model: Any) -> None:
    embedding, graphs = waiting(model, 1, 2)
    graphs.push(1, 1, torch.arange(1))
    graphs.push(2, 2, torch.arange(2))
    graphs._server.close()
    device = Device(graphs)
    for step, tokens in ((1, 1), (2, 2)):
        device.launch(step, tokens, random_ids(embedding, tokens, step))
        device.result(step)


def test_closing_answers_what_was_launched(model: Any) -> None:
    """A graph that is left waiting would hang the device, and with it the end of the process."""
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    graphs.push(1, 1, torch.arange(1))
    graphs.push(2, 1, torch.arange(1))
    ids = random_ids(embedding, 1, 1)
    closing = threading.Thread(target=graphs._server.close)
    closing.start()
    device.launch(1, 1, ids)
    device.launch(2, 1, ids)
    assert torch.equal(device.result(2), stored(embedding, ids))
    closing.join(20)
    assert not closing.is_alive()


def test_a_process_with_an_open_server_ends_in_order(folder: Path) -> None:
    import importlib

    kit = importlib.import_module("ple_checkpoints")
    program = f"""
import sys
sys.path.insert(0, {str(Path(kit.__file__).parent)!r})
import torch
from pathlib import Path
from ple_checkpoints import loaded, ple_modules, refuse_row
with loaded(Path({str(folder)!r}), "--ple-offload-backend", "nvme", "--ple-offload-graph-sync", "wait") as model:
    graphs = ple_modules(model)[1].ngram_embedding.waiting_graphs
    graphs.reserve(1, {HEADS})
    graphs[1].flags[0] = 1
    graphs.push(1, 1, torch.arange(1))
    assert graphs.take_failures(1) == {{}}
print("served", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "served" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_recovery_survives_whatever_a_check_raises(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, graphs = waiting(model, 1)
    device = Device(graphs)
    called = threading.Event()

    def broken() -> None:
        called.set()
        raise IndexError("a reader that was closed")

    monkeypatch.setattr(graphs._reader, "_check_file", lambda index: broken())
    assert called.wait(10)
    ids = random_ids(embedding, 1, 1)
    ids[0, 0] = embedding.org_vocab_size
    graphs.push(1, 1, torch.arange(1))
    device.launch(1, 1, ids)
    assert "outside the table" in graphs.take_failures(1)[0]


def test_without_the_recovery_the_scheduler_gets_an_error_and_no_hang(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graphs = waiting(model, 1)
    server = graphs._server
    monkeypatch.setattr(server, "_thread", SimpleNamespace(is_alive=lambda: False))
    with pytest.raises(RuntimeError, match="nobody recovers failed reads"):
        server.wait(1)


def test_storage_that_does_not_answer_ends_in_an_error_and_no_hang(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.ple_rows import server

    monkeypatch.setattr(server, "_LONGEST_WAIT_S", 0.5)
    embedding, graphs = waiting(model, 1)
    graphs.push(1, 1, torch.arange(1))  # and no graph that asks: no answer either
    errors: list[str] = []

    def wait() -> None:
        try:
            graphs.take_failures(1)
        except RuntimeError as error:
            errors.append(str(error))

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(20)
    assert ["has not answered a decode step for" in error for error in errors] == [True]
    assert embedding.reader.source.name in errors[0]


def test_graphs_do_not_queue_behind_a_prefill_chunk(model: Any) -> None:
    embedding, graphs = waiting(model, 1)
    assert graphs._reader is not embedding.reader
    assert graphs._reader._handle != embedding.reader._handle
    assert [f.path for f in graphs._reader.source.files] == [f.path for f in embedding.reader.source.files]


def decode_batch(tokens: int) -> Any:
    return SimpleNamespace(
        mode=ForwardMode.DECODE, processed_tokens=tokens, state_indices=SimpleNamespace(is_cuda=True)
    )


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make the model believe that a CUDA stream captures, or only warms up; its ids are given."""
    monkeypatch.setattr(qwen4_exp, "graphs_can_wait", lambda: True)
    given = torch.zeros((2, HEADS), dtype=torch.long)
    monkeypatch.setattr(qwen4_exp.Qwen4ExpNGramEmbedding, "compute_ngram_ids", lambda self, batch: given)

    def set_capturing(capturing: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    return set_capturing


def test_a_graph_asks_before_the_layer_in_front_and_waits_right_before_the_rows(
    model: Any, recorded: list[tuple[str, int, int]], capture: Callable[[bool], None]
) -> None:
    module = ple_modules(model)[1]
    layer = Qwen4ExpPLELayer.__new__(Qwen4ExpPLELayer)
    torch.nn.Module.__init__(layer)
    layer.ple_embedding, layer._staged_rows = module, None
    graphs = module.ngram_embedding.waiting_graphs
    batch = decode_batch(2)
    with model_capture_mode():
        capture(False)
        layer.start_prefetch(batch, None)
        module(batch, None)
        assert not recorded, "a warm-up run has nobody to answer it"
        assert 2 not in graphs
        capture(True)
        layer.start_prefetch(batch, None)
        shared = graphs[2]
        assert recorded == [("cuStreamWriteValue64", shared.ids_ready, 1)]
        recorded.clear()
        module(batch, None)
        assert recorded == [
            ("cuStreamWaitValue64", shared.rows_ready, 1),
            ("cuStreamWriteValue64", shared.rows_ready, 0),
        ]
        assert 2 in graphs
        recorded.clear()
        module(batch, None)  # the first layer of a model: nothing in front published the ids
        assert recorded[0] == ("cuStreamWriteValue64", shared.ids_ready, 1)


def test_the_flags_frame_the_copies(model: Any, recorded: list[tuple[Any, ...]]) -> None:
    """Ids are there before their flag is; rows are taken after it was waited for, and before the next ids."""
    embedding, graphs = waiting(model, 2)
    shared = graphs[2]
    rows = shared.rows

    class Spy:
        def copy_(self, ids: torch.Tensor, non_blocking: bool) -> None:
            recorded.append(("ids", non_blocking))

        def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
            recorded.append(("rows", non_blocking))
            return rows.to(device)

    shared.ids = shared.rows = Spy()
    shared.record_ids(torch.zeros((2, HEADS), dtype=torch.long))
    embedding.waiting_graph_values(2)
    assert recorded == [
        ("ids", True),
        ("cuStreamWriteValue64", shared.ids_ready, 1),
        ("cuStreamWaitValue64", shared.rows_ready, 1),
        ("cuStreamWriteValue64", shared.rows_ready, 0),
        ("rows", True),
    ]


def test_all_sizes_share_a_thread_and_each_keeps_its_memory(model: Any) -> None:
    """A graph that was captured holds the addresses for ever."""
    _, graphs = waiting(model, 1)
    server, flags, rows = graphs._server, graphs[1].flags.data_ptr(), graphs[1].rows.data_ptr()
    assert graphs.reserve(2, HEADS)
    assert graphs.reserve(1, HEADS)
    assert graphs._server is server
    assert (graphs[1].flags.data_ptr(), graphs[1].rows.data_ptr()) == (flags, rows)


@pytest.mark.parametrize(("blocking", "supported", "waits"), [("0", 1, True), ("1", 1, False), ("0", 0, False)])
def test_where_graphs_can_wait(monkeypatch: pytest.MonkeyPatch, blocking: str, supported: int, waits: bool) -> None:
    from sglang.srt.models import qwen4_exp_ple_wait

    success = SimpleNamespace(name="CUDA_SUCCESS")
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=success),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=122),
        cuDeviceGetAttribute=lambda attribute, device: (success, supported if attribute == 122 else None),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    lines: list[str] = []
    monkeypatch.setattr(qwen4_exp_ple_wait.logger, "warning", lambda text, *values: lines.append(text % values))
    qwen4_exp_ple_wait.graphs_can_wait.cache_clear()
    try:
        assert qwen4_exp_ple_wait.graphs_can_wait() is waits
    finally:
        qwen4_exp_ple_wait.graphs_can_wait.cache_clear()
    assert len(lines) == (not waits)


def test_a_graph_that_waits_for_some_layers_only_is_never_launched(model: Any) -> None:
    first, second = (module.ngram_embedding for module in ple_modules(model).values())
    assert first.waiting_graphs.reserve(2, HEADS)
    first.waiting_graphs[2].recorded = True
    second.waiting_graphs = None
    live = SimpleNamespace(forward_mode=ForwardMode.DECODE, _original_forward_mode=None, input_ids=torch.tensor([5, 6]))
    try:
        with pytest.raises(RuntimeError, match="--ple-offload-graph-sync gate"):
            model.replay_prepare(live, num_tokens=2)
    finally:
        second.waiting_graphs = first.waiting_graphs  # for the fixture to close


def test_failures_of_an_eager_step_are_not_those_of_the_next(model: Any) -> None:
    for module in ple_modules(model).values():
        module.ngram_embedding.waiting_graphs.reserve(1, HEADS)
        module.ngram_embedding.waiting_graphs[1].recorded = True
        module.ngram_embedding.failures = {0: "of a step that was eager"}
    live = SimpleNamespace(forward_mode=ForwardMode.DECODE, _original_forward_mode=None, input_ids=torch.tensor([5]))
    model.replay_prepare(live, num_tokens=1)
    assert model.take_failed_requests() == {}


def test_a_capture_that_failed_half_way_leaves_nothing_to_the_next(
    model: Any, recorded: list[tuple[str, int, int]], capture: Callable[[bool], None]
) -> None:
    module = ple_modules(model)[1]
    graphs = module.ngram_embedding.waiting_graphs
    batch = decode_batch(2)
    with model_capture_mode():
        for _ in range(2):
            capture(False)
            module(batch, None)
            assert 2 not in graphs, "a graph that is gone is answered still"
            capture(True)
            recorded.clear()
            module.publish_graph_ids(batch)
            assert recorded[0][0] == "cuStreamWriteValue64", "the ids are not published"
        module(batch, None)
        assert 2 in graphs
        capture(False)
        module(batch, None)
        assert 2 not in graphs


@pytest.mark.parametrize("status", ["CUDA_SUCCESS", "CUDA_ERROR_NOT_SUPPORTED"])
def test_the_operations_wait_for_at_least_and_write_with_a_barrier(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    from sglang.srt.models import qwen4_exp_ple_wait

    calls: list[tuple[Any, ...]] = []
    results = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    answer = results.CUDA_SUCCESS if status == "CUDA_SUCCESS" else SimpleNamespace(name=status)
    driver = SimpleNamespace(
        CUresult=results,
        cuStreamWaitValue64=lambda *arguments: calls.append(("wait", *arguments)) or (answer,),
        cuStreamWriteValue64=lambda *arguments: calls.append(("write", *arguments)) or (answer,),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(driver=driver)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    # 0 is CU_STREAM_WAIT_VALUE_GEQ and CU_STREAM_WRITE_VALUE_DEFAULT, which has a memory barrier before the write.
    if status == "CUDA_SUCCESS":
        qwen4_exp_ple_wait._record_memop("cuStreamWaitValue64", 4096, 1)
        qwen4_exp_ple_wait._record_memop("cuStreamWriteValue64", 4160, 0)
        assert calls == [("wait", 77, 4096, 1, 0), ("write", 77, 4160, 0, 0)]
    else:
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_NOT_SUPPORTED.*--ple-offload-graph-sync gate"):
            qwen4_exp_ple_wait._record_memop("cuStreamWaitValue64", 4096, 1)


@pytest.mark.parametrize(
    ("mode", "pushed"), [(ForwardMode.DECODE, 3), (ForwardMode.IDLE, 0), (ForwardMode.TARGET_VERIFY, None)]
)
def test_a_replay_is_answered_for_its_live_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch, mode: ForwardMode, pushed: int | None
) -> None:
    pushes: list[tuple[int, int, int]] = []
    gated: list[int] = []
    for module in ple_modules(model).values():
        graphs = module.ngram_embedding.waiting_graphs
        graphs.reserve(4, HEADS)
        graphs[4].recorded = True
        monkeypatch.setattr(graphs, "push", lambda step, size, seq_ids: pushes.append((step, size, len(seq_ids))))
        monkeypatch.setattr(
            module.ngram_embedding, "fill_graph_rows", lambda size, ids, seq_ids: gated.append(len(seq_ids))
        )
    monkeypatch.setattr(qwen4_exp, "_prepare_replay_batch", lambda *_: SimpleNamespace(req_indices=torch.arange(3)))
    monkeypatch.setattr(
        qwen4_exp.Qwen4ExpNGramEmbedding, "compute_ngram_ids", lambda *_: torch.zeros((3, HEADS), dtype=torch.long)
    )
    live = SimpleNamespace(
        forward_mode=mode,
        _original_forward_mode=None,
        input_ids=torch.tensor([5, 6, 7]),
        spec_info=SimpleNamespace(draft_token_num=1, topk=1),
    )
    model.replay_prepare(live, num_tokens=4)
    layers = len(ple_modules(model))
    assert pushes == ([(1, 4, pushed)] * layers if pushed is not None else [])
    assert gated == ([3] * layers if pushed is None else [])
    assert model.take_unread_step() == (1 if pushed is not None else None)


def test_breakable_and_verify_graphs_are_launched_after_the_read(
    model: Any, recorded: list[tuple[str, int, int]], capture: Callable[[bool], None]
) -> None:
    module = ple_modules(model)[1]
    with model_capture_mode():
        capture(False)
        module(decode_batch(2), None)
        capture(True)
        token = qwen4_exp._current_capture_var.set(object())
        try:
            module(decode_batch(2), None)
        finally:
            qwen4_exp._current_capture_var.reset(token)
        verify = decode_batch(2)
        verify.mode = ForwardMode.TARGET_VERIFY
        module(verify, None)
    assert not recorded
    assert 2 not in module.ngram_embedding.waiting_graphs


def test_the_model_names_a_step_that_is_still_being_read(model: Any) -> None:
    devices = []
    for module in ple_modules(model).values():
        graphs = module.ngram_embedding.waiting_graphs
        graphs.reserve(2, HEADS)
        graphs[2].recorded = True
        devices.append(Device(graphs))
    assert model.take_unread_step() is None
    live = SimpleNamespace(forward_mode=ForwardMode.DECODE, _original_forward_mode=None, input_ids=torch.tensor([5, 6]))
    steps = []
    for _ in range(2):
        model.replay_prepare(live, num_tokens=2)
        steps.append(model.take_unread_step())
        for device in devices:
            device.launch(steps[-1], 2, torch.zeros((2, HEADS), dtype=torch.long))
    assert steps == [1, 2]
    assert model.take_unread_step() is None
    assert [model.take_failed_requests(step) for step in steps] == [{}, {}]


def test_a_late_failure_ends_the_request_with_the_result_of_its_step() -> None:
    reason = "rows of shard_3: errno 5"
    worker = object.__new__(TpModelWorker)
    model = SimpleNamespace(
        take_unread_step=lambda: 7, take_failed_requests=lambda step=None: {1: reason} if step == 7 else {}
    )
    worker._model_runner = SimpleNamespace(model=model)
    scheduler = SimpleNamespace(tp_worker=worker, chunked_req=None, _pending_chunked_abort_req=None)
    requests = [SimpleNamespace(rid=name, skip_radix_cache_insert=False) for name in "ab"]
    batch, result = SimpleNamespace(reqs=requests), GenerationBatchResult()
    result.unread_step = worker.take_unread_step()
    Scheduler._collect_failed_requests(scheduler, batch, result)
    assert result.failed_requests == [], "nobody knows yet"
    Scheduler._collect_failed_requests(scheduler, batch, result, result.unread_step)
    ((failed, abort),) = result.failed_requests
    assert failed.rid == "b"
    assert failed.skip_radix_cache_insert
    assert abort.to_json()["status_code"] == HTTPStatus.INTERNAL_SERVER_ERROR
    assert abort.to_json()["message"] == reason
    assert not requests[0].skip_radix_cache_insert


def test_a_result_carries_the_step_whose_reads_are_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import scheduler as module

    monkeypatch.setattr(module, "resolve_forward_inputs", lambda *_: None)
    batch = mock.MagicMock(forward_mode=ForwardMode.DECODE, extend_num_tokens=0, return_logprob=False)
    scheduler = mock.MagicMock(forward_ct=0, enable_overlap=False, enable_pdmux=False, forward_sleep_time=None)
    scheduler.model_worker.forward_batch_generation.return_value = GenerationBatchResult()
    scheduler.tp_worker.take_unread_step.return_value = 7
    assert Scheduler.run_batch(scheduler, batch).unread_step == 7
    scheduler._collect_failed_requests.assert_called_once()


@pytest.mark.parametrize("unread", [None, 7])
def test_a_result_is_processed_once_the_reads_of_its_step_are_known(unread: int | None) -> None:
    order: list[Any] = []
    result = GenerationBatchResult(unread_step=unread)
    batch = mock.MagicMock()
    batch.forward_mode = ForwardMode.DECODE
    scheduler = mock.MagicMock()
    scheduler._collect_failed_requests.side_effect = lambda *arguments: order.append(("collect", *arguments))
    scheduler._discard_failed_requests.side_effect = lambda *arguments: order.append(("discard", *arguments))
    process = scheduler.batch_result_processor.process_batch_result_decode
    process.side_effect = lambda *arguments: order.append(("process", *arguments))
    Scheduler.process_batch_result(scheduler, batch, result)
    assert order == [
        *([("collect", batch, result, unread)] if unread is not None else []),
        ("discard", result),
        ("process", batch, result),
    ]


def test_a_reader_without_native_code_leaves_the_graphs_as_they_were(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[tuple[str, int, int]],
    capture: Callable[[bool], None],
) -> None:
    from sglang.srt.layers.ple_rows import native
    from sglang.srt.models import qwen4_exp_ple_wait

    def no_compiler() -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(native, "_module", no_compiler)
    # SGLang's start-up configures logging and may leave the root's handlers out.
    lines: list[str] = []
    monkeypatch.setattr(qwen4_exp_ple_wait.logger, "warning", lambda text, *values: lines.append(text % values))
    with loaded(folder, "--ple-offload-backend", "nvme", "--ple-offload-graph-sync", "wait") as model:
        module = ple_modules(model)[1]
        with model_capture_mode():
            for capturing in (False, True):
                capture(capturing)
                module(decode_batch(2), None)
        assert module.ngram_embedding.waiting_graphs is None
    assert not recorded
    assert ["launched after the read: the native code cannot be built" in line for line in lines] == [True]


def test_graphs_wait_unless_told_otherwise(folder: Path) -> None:
    """And a server that captures no graph opens no second reader."""
    for flags, expected in (((), True), (("--ple-offload-graph-sync", "gate"), False)):
        with loaded(folder, "--ple-offload-backend", "nvme", *flags) as model:
            graphs = ple_modules(model)[1].ngram_embedding.waiting_graphs
            assert (graphs is not None) is expected
            assert graphs is None or graphs._reader is None


def test_the_flag_belongs_to_the_table_on_storage(folder: Path) -> None:
    with (
        pytest.raises(
            ValueError, match="--ple-offload-graph-sync gate requires --ple-offload-backend nvme, got pinned"
        ),
        loaded(folder, "--ple-offload-graph-sync", "gate"),
    ):
        pass
