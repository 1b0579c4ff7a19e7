"""The device's side of the miniature decode step: CUDA graphs, or a thread that stands in for them on a CPU.

Modes, by how a step gets its rows:

* ``pinned``: the graph gathers them from a pinned table (the pin's own Triton kernel);
* ``gate``: the host waits for the ids, reads, and only then launches the graph, which uploads the rows;
* ``memop``: the graph is launched first and waits on a flag in host memory (stream memory operations);
* ``spin``: the same with a kernel that polls the flag.
"""

from __future__ import annotations

import queue
import threading
import time
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from tests.gpu.step_chain import HEADS, ROW_BYTES, VOCAB, Chain
from tests.gpu.step_watchdog import PAGE, Flags

WAITING_MODES = ("memop", "spin")
SPIN_POLLS = 4_000_000
"""Polls of one spin wait; each is a read over PCIe of a microsecond or so, so some seconds."""


class Engine(Protocol):
    """One step's graph, and what the driver needs of it."""

    host_ids: np.ndarray
    host_rows: np.ndarray

    def reset(self, token: int = 1) -> None: ...
    def launch(self) -> None: ...
    def read_back(self) -> None: ...
    def wait_for_previous(self) -> None: ...
    def finish(self) -> tuple[np.ndarray, list[float]]: ...


class CpuEngine:
    """A thread that runs launched steps in order, with the graphs' flag protocol. For tests of the host's side."""

    def __init__(self, mode: str, chain: Chain, table: np.ndarray, flags: Flags, before_s: float = 0.0) -> None:
        self._mode, self._chain, self._table, self._flags = mode, chain, table, flags
        self._before_s = before_s
        self.host_ids = np.zeros(HEADS, np.int64)
        self.host_rows = np.zeros((HEADS, ROW_BYTES), np.uint8)
        self._queue: queue.Queue[bool] = queue.Queue()
        self.reset()
        threading.Thread(target=self._run, daemon=True).start()

    def reset(self, token: int = 1) -> None:
        self._token, self._tokens, self._ends = token, [], []
        self._launched = 0

    def _run(self) -> None:
        while self._queue.get():
            chain, flags = self._chain, self._flags
            ids = chain.ids(self._token, len(self._table))
            if self._mode in WAITING_MODES:
                self.host_ids[:] = ids
                flags.set("ids_ready", 1)
            time.sleep(self._before_s)
            if self._mode in WAITING_MODES:
                while not flags.get("rows_ready"):
                    time.sleep(0)
                flags.set("rows_ready", 0)
            rows = self._table[ids] if self._mode == "pinned" else self.host_rows.copy()
            self._token = chain.next_token(self._token, rows)
            self._tokens.append(self._token)
            self._ends.append(time.perf_counter())

    def launch(self) -> None:
        self._launched += 1
        self._queue.put(True)

    def read_back(self) -> None:
        self._wait_for(self._launched)
        self.host_ids[:] = self._chain.ids(self._token, len(self._table))

    def wait_for_previous(self) -> None:
        self._wait_for(self._launched - 1)

    def _wait_for(self, steps: int) -> None:
        while len(self._ends) < steps:
            time.sleep(0)

    def finish(self) -> tuple[np.ndarray, list[float]]:
        self._wait_for(self._launched)
        return np.array(self._tokens, np.int64), [(b - a) * 1e6 for a, b in pairwise(self._ends)]

    def close(self) -> None:
        self._queue.put(False)


class MemOps:
    """Wait and write nodes of a graph that torch is capturing; a device address a flag."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.reason = "the device has no 64-bit stream memory operations"
        self.way: str | None = None
        """"capture": the stream calls are captured; "node": nodes are added to the captured graph by hand."""

    def supported(self, device: int = 0) -> bool:
        """Return the device's own attribute for 64-bit stream memory operations."""
        attribute = self.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        status, value = self.driver.cuDeviceGetAttribute(attribute, device)
        self._check(status)
        return bool(value)

    def _check(self, status: Any) -> None:
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA driver: {status.name}")

    def register(self, flags: Flags) -> int:
        """Make the flags visible to the device and return the device address of their page."""
        status = torch.cuda.cudart().cudaHostRegister(flags.base, PAGE, 3)  # portable and mapped
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of the flags: {status}")
        status, address = self.driver.cuMemHostGetDevicePointer(flags.base, 0)
        self._check(status)
        return int(address)

    def probe(self, flags: Flags, page: int) -> str | None:
        """Find out which way works, in a graph of its own; None where neither does.

        Not with torch's capture: one that fails leaves the allocator in the middle of it.
        """
        d = self.driver
        stream = torch.cuda.Stream()
        ids_ready, rows_ready = (page + flags.address(name) - flags.base for name in ("ids_ready", "rows_ready"))
        for way in ("capture", "node"):
            self.way = way
            flags.clear()
            flags.set("rows_ready", 1)
            try:
                with torch.cuda.stream(stream):
                    self._check(
                        d.cuStreamBeginCapture(
                            stream.cuda_stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                        )[0]
                    )
                    try:
                        self.wait(rows_ready, 1)
                        self.write(rows_ready, 0)
                        self.write(ids_ready, 7)
                    finally:
                        status, graph = d.cuStreamEndCapture(stream.cuda_stream)
                    self._check(status)
                    status, executable = d.cuGraphInstantiate(graph, 0)
                    self._check(status)
                    flags.arm(2.0)
                    self._check(d.cuGraphLaunch(executable, stream.cuda_stream)[0])
                    stream.synchronize()
            except RuntimeError as error:
                self.reason = f"{way}: {str(error).splitlines()[0]}"
                continue
            finally:
                fired = flags.disarm()
            if (flags.get("ids_ready"), flags.get("rows_ready"), fired) == (7, 0, 0):
                flags.clear()
                return way
            self.reason = f"{way}: the graph ran and left {flags.get('ids_ready')}, {flags.get('rows_ready')}"
        self.way = None
        return None

    def wait(self, address: int, value: int) -> None:
        """Make the stream wait until the int64 at `address` is at least `value`."""
        self._emit(address, value, wait=True)

    def write(self, address: int, value: int) -> None:
        """Make the stream store `value`, after all that it did before is visible to the host."""
        self._emit(address, value, wait=False)

    def _emit(self, address: int, value: int, wait: bool) -> None:
        d = self.driver
        stream = torch.cuda.current_stream().cuda_stream
        if self.way == "capture":
            call = d.cuStreamWaitValue64 if wait else d.cuStreamWriteValue64
            self._check(call(stream, address, value, 0)[0])
            return
        kinds = d.CUstreamBatchMemOpType
        kind = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_64 if wait else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64
        op = d.CUstreamBatchMemOpParams()
        op.operation = kind
        part = op.waitValue if wait else op.writeValue
        part.operation, part.address, part.value64 = kind, d.CUdeviceptr(address), d.cuuint64_t(value)
        part.flags = 0
        params = d.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        status, params.ctx = d.cuCtxGetCurrent()
        self._check(status)
        params.count, params.paramArray, params.flags = 1, [op], 0
        info = d.cuStreamGetCaptureInfo(stream)
        self._check(info[0])
        graph = next(x for x in info if isinstance(x, d.CUgraph))
        before = next((x for x in info if isinstance(x, list) and x and isinstance(x[0], d.CUgraphNode)), [])
        status, node = d.cuGraphAddBatchMemOpNode(graph, before, len(before), params)
        self._check(status)
        replace = int(d.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        self._check(d.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, replace)[0])

    def node_counts(self, graph: Any) -> dict[str, int]:
        """Return how many nodes of each type a torch graph made with keep_graph has."""
        d = self.driver
        raw = d.CUgraph(int(graph.raw_cuda_graph()))
        status, _, count = d.cuGraphGetNodes(raw, 0)
        self._check(status)
        status, nodes, _ = d.cuGraphGetNodes(raw, count)
        self._check(status)
        counts: dict[str, int] = {}
        for node in nodes:
            status, kind = d.cuGraphNodeGetType(node)
            self._check(status)
            name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            counts[name] = counts.get(name, 0) + 1
        return counts


def cycles_per_us() -> float:
    """Return how many cycles of `torch.cuda._sleep` take a microsecond here."""
    cycles = 2_000_000
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e3)


class GpuEngine:
    """The step as one CUDA graph: `before_us` of work, the rows, `after_us` of work in `nodes` kernels."""

    def __init__(
        self,
        mode: str,
        chain: Chain,
        table: np.ndarray,
        flags: Flags,
        memops: MemOps,
        flags_address: int,
        *,
        pinned_table: torch.Tensor | None = None,
        before_us: float = 300,
        after_us: float = 1500,
        nodes: int = 300,
        steps: int = 10_000,
        cycles: float = 1000,
    ) -> None:
        self._mode, self._memops, self._rows_in_table = mode, memops, len(table)
        self._pinned_table = pinned_table
        self._before, self._after = int(before_us * cycles), int(after_us * cycles / nodes)
        self._nodes, self._cycles = nodes, cycles
        self._address = {name: flags_address + flags.address(name) - flags.base for name in ("ids_ready", "rows_ready")}
        device = {"device": "cuda"}
        self._multipliers, self._offsets, self._weights = (
            torch.from_numpy(x).cuda() for x in (chain.multipliers, chain.offsets, chain.weights)
        )
        self._token = torch.ones(1, dtype=torch.int64, **device)
        self._counter = torch.zeros(1, dtype=torch.int64, **device)
        self._log = torch.zeros(steps + 8, dtype=torch.int64, **device)
        self._status = torch.zeros(1, dtype=torch.int64, **device)
        self._ids = torch.zeros(HEADS, dtype=torch.int64, **device)
        self._rows = torch.zeros(HEADS, ROW_BYTES, dtype=torch.uint8, **device)
        self._host_ids = torch.zeros(HEADS, dtype=torch.int64, pin_memory=True)
        self._host_rows = torch.zeros(HEADS, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
        self.host_ids, self.host_rows = self._host_ids.numpy(), self._host_rows.numpy()
        self._read_back: Any = None
        self._ends: list[torch.cuda.Event] = []
        self._stream = torch.cuda.Stream()
        self._compile_flag_kernels(flags)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # as SGLang warms up before a capture: nobody would answer a wait here
                self._hash()
                self._body(waits=False)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph, stream=self._stream):
            self._body(waits=mode in WAITING_MODES)
        self.graph.instantiate()
        self.reset()

    def _compile_flag_kernels(self, flags: Flags) -> None:
        if self._mode != "spin":
            return
        from tests.gpu import spin_flag

        self._spin = spin_flag
        with torch.cuda.stream(self._stream):
            spin_flag.set_flag[(1,)](self._address["rows_ready"], num_warps=1)
            spin_flag.wait_flag[(1,)](self._address["rows_ready"], self._status, SPIN_POLLS, num_warps=1)
            spin_flag.set_flag[(1,)](self._address["ids_ready"], num_warps=1)
        torch.cuda.synchronize()
        seen = flags.get("ids_ready"), flags.get("rows_ready"), int(self._status.item())
        if seen != (1, 0, 1):
            raise RuntimeError(f"spin kernels: ids_ready, rows_ready, status are {seen}, expected (1, 0, 1)")
        flags.set("ids_ready", 0)

    def _hash(self) -> None:
        self._ids.copy_(torch.remainder(self._token * self._multipliers + self._offsets, self._rows_in_table))

    def _body(self, waits: bool) -> None:
        if self._mode != "gate":
            self._hash()
        if waits:
            self._host_ids.copy_(self._ids, non_blocking=True)
            if self._mode == "memop":
                self._memops.write(self._address["ids_ready"], 1)
            else:
                self._spin.set_flag[(1,)](self._address["ids_ready"], num_warps=1)
        torch.cuda._sleep(self._before)
        if self._mode == "pinned":
            self._gather()
        else:
            if waits and self._mode == "memop":
                self._memops.wait(self._address["rows_ready"], 1)
                self._memops.write(self._address["rows_ready"], 0)
            elif waits:
                self._spin.wait_flag[(1,)](self._address["rows_ready"], self._status, SPIN_POLLS, num_warps=1)
            self._rows.copy_(self._host_rows, non_blocking=True)
        digest = (self._rows.long() * self._weights).sum()
        self._token.copy_(torch.remainder(self._token * 31 + digest + 1, VOCAB))
        self._log.scatter_(0, self._counter, self._token)
        self._counter.add_(1)
        for _ in range(self._nodes):
            torch.cuda._sleep(self._after)

    def _gather(self) -> None:
        """Copy the rows with the pin's kernel; as bf16 pairs, which it stores as they are."""
        import triton
        from sglang.srt.models.qwen4_exp import _gather_ple_embedding_from_pinned_kernel

        assert self._pinned_table is not None
        width = ROW_BYTES // 2
        _gather_ple_embedding_from_pinned_kernel[(HEADS,)](
            self._pinned_table.data_ptr(), self._ids, self._rows.view(torch.bfloat16), embedding_dim=width,
            tp_vocab_start=0, tp_vocab_end=self._rows_in_table, is_fp8=False, BLOCK_D=triton.next_power_of_2(width),
        )  # fmt: skip

    def reset(self, token: int = 1) -> None:
        torch.cuda.synchronize()
        self._token.fill_(token)
        self._counter.zero_()
        self._log.zero_()
        self._ends = []
        torch.cuda.synchronize()

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            self.graph.replay()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        self._ends.append(end)

    def read_back(self) -> None:
        """Put the ids of the newest token into host_ids: hash, copy, wait, as launch gating does."""
        with torch.cuda.stream(self._stream):
            self._hash()
            self._host_ids.copy_(self._ids, non_blocking=True)
            if self._read_back is None:
                self._read_back = torch.cuda.Event()
            self._read_back.record()
        self._read_back.synchronize()

    def wait_for_previous(self) -> None:
        if len(self._ends) > 1:
            self._ends[-2].synchronize()

    def finish(self) -> tuple[np.ndarray, list[float]]:
        """Return the tokens of every step and the microseconds between the ends of consecutive steps."""
        torch.cuda.synchronize()
        ends, steps = self._ends, len(self._ends)
        tokens = self._log[:steps].cpu().numpy()
        return tokens, [a.elapsed_time(b) * 1e3 for a, b in pairwise(ends)]
