"""Eager breaks of a breakable CUDA graph run with the device weights of an offloaded layer at replay too.

A CUDA graph cannot be captured without a GPU, so the segments are stand-ins that record nothing; what runs between
them, the offloader's hook and the decorated functions are SGLang's own. tests/gpu runs the same with real graphs.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA, HOST
from offload_kit import model_on_device, on_host
from sglang.srt.layers import radix_linear_attention
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as bcg
from sglang.srt.utils.offloader import OffloaderV1

GIB = 1 << 30


class Segment:
    """A torch.cuda.CUDAGraph that captures nothing."""

    def capture_begin(self, **_: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


class Stream:
    def wait_stream(self, other: Stream) -> None: ...


class WeakViews:
    """Stand in for weak_ref_tensors: a view that does not own its storage. Keeps count of what was asked for."""

    def __init__(self) -> None:
        self.originals: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device != CUDA:
            return value
        self.originals.append(weakref.ref(value))
        return torch.empty_like(value)


@pytest.fixture
def weak_views(monkeypatch: pytest.MonkeyPatch) -> WeakViews:
    stream = Stream()
    views = WeakViews()
    monkeypatch.setattr(bcg, "get_device_module", lambda: SimpleNamespace(Stream=Stream, current_stream=lambda: stream))
    monkeypatch.setattr(bcg, "_is_stream_capturing", lambda stream: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Segment)
    monkeypatch.setattr(bcg, "_weak_ref_if_tensor", views)
    return views


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real decoder layer with PLE and GDN on the fake device."""
    with (
        qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *qwen4_modules.TEXT_ONLY) as runtime,
        model_on_device(runtime, monkeypatch) as model,
    ):
        yield model.model.layers[1]


def capture(layer: Any, body: Callable[..., Any], *args: Any, budget: int = GIB) -> bcg.BreakableCUDAGraph:
    """Offload `layer`, let `body` be its forward, and capture one call of it."""
    layer.forward = body
    OffloaderV1(budget).wrap_modules(iter([layer]))
    graph = bcg.BreakableCUDAGraph()
    with bcg.BreakableCUDAGraphCapture(graph):
        layer(*args)
    assert len(graph._break_fns) >= 1, "the forward must have reached a break"
    return graph


@pytest.mark.red_on_stock
def test_a_projection_in_a_break_replays_on_the_device(layer: Any, weak_views: WeakViews) -> None:
    seen: list[torch.device] = []

    @bcg.eager_on_graph
    def project(x: torch.Tensor) -> torch.Tensor:
        seen.append(layer.ple.key_proj.weight.device)
        return layer.ple.key_proj(x)[0]

    graph = capture(layer, project, torch.ones(2, 64, dtype=torch.bfloat16, device=CUDA))
    assert layer.ple.key_proj.weight.device == HOST, "outside its forward the weight is on the host"
    graph.replay()
    graph.replay()
    assert seen == [CUDA] * 3
    assert layer.ple.key_proj.weight.device == HOST, "and it is again after the replay"


@pytest.mark.red_on_stock
def test_linear_attention_break_sees_its_tied_state_parameters(
    layer: Any, weak_views: WeakViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RadixLinearAttention reads A_log and dt_bias, which the GDN registers as well, inside its own break."""
    seen: list[set[torch.device]] = []

    def kernel(mixed_qkv: Any, a: Any, b: Any, output: Any, attention: Any, forward_batch: Any) -> None:
        seen.append({attention.A_log.device, attention.dt_bias.device, attention.conv_weights.device})

    monkeypatch.setattr(radix_linear_attention, "_linear_attention_with_output_impl", kernel)
    monkeypatch.setattr(radix_linear_attention, "get_forward_batch", lambda: None)
    attention = layer.linear_attn.attn
    # Its capture stub replaces the body while capturing, so only replays reach the kernel.
    graph = capture(layer, attention._eager_linear_attention, *(torch.ones(2, device=CUDA) for _ in range(4)))
    assert attention.A_log.device == HOST
    graph.replay()
    assert seen == [{CUDA}]


@pytest.mark.red_on_stock
def test_the_copies_of_a_captured_layer_are_not_kept_alive(layer: Any, weak_views: WeakViews) -> None:
    """A strong reference per captured layer would put the whole offloaded model back on the GPU."""
    graph = capture(layer, bcg.eager_on_graph(lambda: None))
    gc.collect()
    copied = {id(t) for t in layer.state_dict(keep_vars=True).values() if t.device == HOST}
    assert len(copied) > len(on_host(layer)) // 2
    assert len({id(ref) for ref in weak_views.originals}) == len(copied)
    assert [ref() for ref in weak_views.originals if ref() is not None] == []
    graph.replay()


@pytest.mark.red_on_stock
def test_resident_weights_are_read_live(layer: Any, weak_views: WeakViews) -> None:
    """What was never moved may be replaced by a weight update, which no captured address would follow."""
    seen: list[tuple[torch.device, Any]] = []

    @bcg.eager_on_graph
    def look() -> None:
        moved = attrgetter(*on_host_before)(layer) if on_host_before else layer.ple.key_proj.weight
        seen.append((moved.device, layer.ple.key_proj.weight))

    on_host_before: set[str] = set()
    graph = capture(layer, look, budget=1)  # takes one parameter
    on_host_before |= on_host(layer)
    assert len(on_host_before) == 1
    updated = torch.nn.Parameter(torch.empty_like(layer.ple.key_proj.weight), requires_grad=False)
    layer.ple.key_proj.weight = updated
    graph.replay()
    assert seen[-1][0] == CUDA
    assert seen[-1][1] is updated


def test_breaks_without_offload_are_recorded_as_they_are(layer: Any, weak_views: WeakViews) -> None:
    calls: list[torch.Tensor] = []

    @bcg.eager_on_graph
    def record(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + 1

    graph = bcg.BreakableCUDAGraph()
    with bcg.BreakableCUDAGraphCapture(graph):
        out = record(torch.ones(2, device=CUDA))
    graph.replay()
    assert (len(calls), out.shape) == (2, (2,))
    assert len(weak_views.originals) == 1, "only the argument"


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from sglang.srt.utils import offloader


class ClaimsMeta(torch.nn.Parameter):
    device = property(lambda self: torch.device("meta"))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(4, 4, bias=False, device=d) for d in ("cpu", "meta"))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


mlp = Mlp()
weight = mlp.up.weight
mlp.up.weight = ClaimsMeta(weight.data, requires_grad=False)
offloader.OffloaderV1(1).wrap_modules(iter([mlp]))
mlp.up.weight = weight  # offloaded from "meta", where tensors have no values but may be compiled without a GPU
counter = CompileCounter()
out = torch.compile(mlp, backend=counter)(torch.ones(2, 4, device="meta"))
assert out.device.type == "meta" and counter.op_count == 3, (out.device, counter.op_count)
breaks = [reason for reason in counters["graph_break"] if "ContextVar" in reason]
assert breaks == [], breaks

plain = torch.nn.Linear(4, 4, bias=False)
replaced, x = torch.randn(4, 4), torch.randn(2, 4)
offloader._hook_module_forward_raw(plain, lambda: None, lambda: {"weight": replaced})
compiled = torch.compile(plain, backend="eager", fullgraph=True)
assert torch.equal(compiled(x), torch.nn.functional.linear(x, replaced))
"""


def test_under_torch_compile_the_hook_is_a_plain_functional_call() -> None:
    """Dynamo cannot set a ContextVar: the hooks of both offloaders must not break the graph, as stock's do not."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
