"""What is recorded for a waiting graph: the right operations, addresses and order, by either way of recording them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
real = pytest.importorskip("cuda.bindings.driver")

from tests.gpu.step_engine import MemOps  # noqa: E402
from tests.gpu.step_watchdog import Flags  # noqa: E402

OK = real.CUresult.CUDA_SUCCESS
FAILED = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


class Driver:
    """The driver's own types, with calls that are noted instead of made."""

    def __init__(self, stream_calls: Any = OK, node_calls: Any = OK) -> None:
        self.stream_calls, self.node_calls = stream_calls, node_calls
        self.log: list[tuple[Any, ...]] = []
        self.last: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any]:  # noqa: N802
        self.log.append(("wait", address, value, flags))
        return (self.stream_calls,)

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any]:  # noqa: N802
        self.log.append(("write", address, value, flags))
        return (self.stream_calls,)

    def cuCtxGetCurrent(self) -> tuple[Any, Any]:  # noqa: N802
        return OK, real.CUcontext(0)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        status = real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return OK, status, 1, real.CUgraph(7), list(self.last), None, len(self.last)

    def cuGraphAddBatchMemOpNode(self, graph: Any, before: list[Any], count: int, params: Any) -> tuple[Any, Any]:  # noqa: N802
        if self.node_calls != OK:
            return self.node_calls, None
        (op,) = params.paramArray
        kinds = real.CUstreamBatchMemOpType
        waits = op.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64
        assert waits or op.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64
        part = op.waitValue if waits else op.writeValue
        assert (params.count, count) == (1, len(before))
        name = "wait" if waits else "write"
        self.log.append((name, int(part.address), int(part.value64), int(part.flags), [int(b) for b in before]))
        return OK, real.CUgraphNode(100 + len(self.log))

    def cuStreamUpdateCaptureDependencies(  # noqa: N802
        self, stream: int, nodes: list[Any], edges: Any, count: int, flags: int
    ) -> tuple[Any]:
        assert (count, flags) == (1, 1)
        self.last = nodes
        return (OK,)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any]:  # noqa: N802
        self.log.append(("begin",))
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, Any]:  # noqa: N802
        self.log.append(("end",))
        return OK, real.CUgraph(7)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, Any]:  # noqa: N802
        return OK, real.CUgraphExec(8)

    def cuGraphLaunch(self, executable: Any, stream: int) -> tuple[Any]:  # noqa: N802
        self.launched()
        return (OK,)

    def launched(self) -> None:
        """What the device does when a graph is launched."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: fake)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *a: fake)

    class Context:
        def __init__(self, stream: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "stream", Context)


def make(driver: Driver, way: str | None) -> MemOps:
    memops = MemOps()
    memops.driver, memops.way = driver, way
    return memops


@pytest.mark.usefixtures("stream")
def test_captured_calls_wait_for_at_least_the_value() -> None:
    driver = Driver()
    memops = make(driver, "capture")
    memops.wait(64, 1)
    memops.write(128, 0)
    assert driver.log == [("wait", 64, 1, 0), ("write", 128, 0, 0)]


@pytest.mark.usefixtures("stream")
def test_nodes_follow_each_other() -> None:
    driver = Driver()
    memops = make(driver, "node")
    memops.wait(64, 1)
    memops.write(64, 0)
    memops.write(8, 7)
    assert driver.log == [("wait", 64, 1, 0, []), ("write", 64, 0, 0, [101]), ("write", 8, 7, 0, [102])]


@pytest.mark.usefixtures("stream")
def test_a_refused_call_names_the_status() -> None:
    with pytest.raises(RuntimeError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        make(Driver(FAILED), "capture").wait(64, 1)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("stream_calls", "node_calls", "way"), [(OK, OK, "capture"), (FAILED, OK, "node"), (FAILED, FAILED, None)]
)
def test_probe_takes_the_first_way_whose_graph_did_its_work(
    stream_calls: Any, node_calls: Any, way: str | None
) -> None:
    flags, driver = Flags(), Driver(stream_calls, node_calls)

    def launched() -> None:
        assert flags.get("rows_ready") == 1
        flags.set("rows_ready", 0)
        flags.set("ids_ready", 7)

    driver.launched = launched
    memops = make(driver, None)
    assert memops.probe(flags, 4096) == way
    assert driver.log.count(("begin",)) == driver.log.count(("end",))
    if way is None:
        assert "node: CUDA driver: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in memops.reason
    else:
        assert (flags.get("ids_ready"), flags.get("rows_ready"), flags.get("deadline_ns")) == (0, 0, 0)


@pytest.mark.usefixtures("stream")
def test_probe_does_not_trust_a_graph_that_left_the_flags_alone() -> None:
    memops = make(Driver(), None)
    assert memops.probe(Flags(), 4096) is None
    assert "the graph ran and left 0, 1" in memops.reason
