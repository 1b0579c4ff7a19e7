"""--cpu-offload-experts-in-place: a small batch reads its few routed experts from pinned memory, a large one copies.

The view of pinned memory itself needs a GPU (tests/gpu); here it is a fake device tensor that costs no copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA, HOST
from offload_kit import CopyMeter, model_on_device, nbytes, on_host
from sglang.srt.arg_groups import memory_hook
from sglang.srt.utils import offloader as offloader_module
from sglang.srt.utils.offloader import OffloaderV1

EXPERTS, TOP_K = 8, 2  # of the tiny model: 3 tokens route to at most 6 experts, 4 tokens to all 8
GIB = 1 << 30
MID_SIZE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "layer_types": tiny_qwen4.LAYER_TYPES * 3,
    "hidden_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
}
EXPERT_BYTES = 3 * 1024 * 1024 * 2  # gate, up and down projection in bf16

pytestmark = pytest.mark.red_on_stock


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A decoder layer on the fake device whose forward reports what is on the host during it."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.device == HOST)
    monkeypatch.setattr(
        offloader_module, "_device_view", lambda pinned, device: torch.empty_like(pinned, device=device), raising=False
    )
    with (
        qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *qwen4_modules.TEXT_ONLY) as runtime,
        model_on_device(runtime, monkeypatch) as model,
    ):
        layer = model.model.layers[1]
        assert (layer.mlp.experts.num_local_experts, layer.mlp.experts.top_k) == (EXPERTS, TOP_K)
        layer.forward = lambda hidden_states: on_host(layer)
        yield layer


def copied(layer: Any, tokens: int) -> int:
    """Return the bytes that the hook copies for a batch of `tokens`."""
    with CopyMeter() as meter:
        inside = layer(hidden_states=torch.empty(tokens, 256, device=CUDA))
    assert inside == set(), "every weight must be on the device during the forward"
    return meter.bytes


def expert_names(layer: Any) -> set[str]:
    return {f"mlp.experts.{name}" for name, _ in layer.mlp.experts.named_parameters()}


@pytest.mark.parametrize(("tokens", "in_place"), [(1, True), (3, True), (4, False), (100, False)])
def test_experts_are_copied_only_when_the_batch_may_need_them_all(layer: Any, tokens: int, in_place: bool) -> None:
    OffloaderV1(GIB, experts_in_place=True).wrap_modules(iter([layer]))
    moved = on_host(layer)
    assert expert_names(layer) <= moved
    expected = moved - expert_names(layer) if in_place else moved
    assert copied(layer, tokens) == nbytes(layer, expected)


def test_a_budget_within_the_experts_needs_no_copy_for_a_token(layer: Any) -> None:
    OffloaderV1(1, experts_in_place=True).wrap_modules(iter([layer]))
    assert on_host(layer) < expert_names(layer)
    assert copied(layer, tokens=1) == 0


def test_bus_traffic_of_one_token_on_a_mid_size_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the routed experts offloaded: a copy moves all of them, reading in place at most the routed ones.

    Of 64 experts a token routes to 8: an eighth of the bytes, 0.28 instead of 2.25 GiB.
    """
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.device == HOST)
    views: list[torch.Tensor] = []

    def view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
        views.append(pinned)
        return torch.empty_like(pinned, device=device)

    monkeypatch.setattr(offloader_module, "_device_view", view, raising=False)
    traffic: dict[bool, float] = {}
    for in_place in (False, True):
        with (
            qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path, **MID_SIZE), *qwen4_modules.TEXT_ONLY) as runtime,
            model_on_device(runtime, monkeypatch) as model,
        ):
            layers = model.model.layers
            for layer in layers:
                layer.forward = lambda hidden_states: None
            budget = 12 * 64 * EXPERT_BYTES // 2
            OffloaderV1(budget, experts_in_place=in_place).wrap_modules(iter(layers))
            assert nbytes(layers, on_host(layers)) == budget
            views.clear()
            with CopyMeter() as meter:
                for layer in layers:
                    layer(hidden_states=torch.empty(1, 4096, device=CUDA))
            routed = sum(pinned.numel() * pinned.element_size() * 8 // 64 for pinned in views)
            traffic[in_place] = meter.bytes + routed
    assert traffic == {False: budget, True: budget // 8}


def test_off_by_default_every_batch_copies(layer: Any) -> None:
    OffloaderV1(GIB, experts_in_place=False).wrap_modules(iter([layer]))
    assert copied(layer, tokens=1) == nbytes(layer, on_host(layer))


def test_pageable_memory_is_copied(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU can address pinned memory only."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    OffloaderV1(GIB, experts_in_place=True).wrap_modules(iter([layer]))
    assert copied(layer, tokens=1) == nbytes(layer, on_host(layer))


def test_experts_under_another_name_are_still_read_in_place(layer: Any) -> None:
    """LoRA wraps the experts after the offloader did: the names of their parameters change, the parameters do not."""
    OffloaderV1(GIB, experts_in_place=True).wrap_modules(iter([layer]))
    moved = nbytes(layer, on_host(layer) - expert_names(layer))
    layer.mlp.experts = torch.nn.ModuleDict({"base_layer": layer.mlp.experts})
    assert copied(layer, tokens=1) == moved


COMPILED = """
import torch
from sglang.srt.utils import offloader

views = []
offloader._device_view = lambda pinned, device: views.append(pinned)
experts = [torch.nn.Linear(4, 4)]
experts[0].top_k, experts[0].num_local_experts = 2, 8


def run(x):
    return x + len(offloader._ids_to_read_in_place(experts, (x,)))


x = torch.zeros(1, 4)
assert run(x).unique().tolist() == [2.0]  # weight and bias
assert torch.compile(run, backend="eager", fullgraph=True)(x).unique().tolist() == [0.0]
"""


def test_under_torch_compile_experts_are_copied() -> None:
    """Dynamo cannot trace the view of pinned memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def arguments(**changed: Any) -> SimpleNamespace:
    """Return the arguments that the offload checks read, on CUDA with the flag given."""
    given = dict(cpu_offload_gb=1, cpu_offload_experts_in_place=True, device="cuda", offload_group_size=0)
    ple = dict(ple_offload_embedding=True, ple_offload_backend="pinned", ple_offload_reader="auto")
    ple["ple_offload_graph_sync"] = "wait"  # of a later patch, which checks it too
    return SimpleNamespace(**given | ple | changed)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the checks see an NVIDIA GPU with pinned memory, and take plain objects for arguments."""
    monkeypatch.setattr(memory_hook, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(memory_hook, "is_cuda", lambda: True, raising=False)
    monkeypatch.setattr(memory_hook, "is_pin_memory_available", lambda: True, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cpu_offload_gb": 0}, r"set --cpu-offload-gb \(got 0\) or remove --cpu-offload-experts-in-place"),
        ({"device": "xpu"}, r"NVIDIA GPU.*--device xpu\): remove --cpu-offload-experts-in-place"),
    ],
    ids=["nothing is offloaded", "another device"],
)
def test_the_flag_alone_or_elsewhere_is_refused(
    on_cuda: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    memory_hook.handle_offload_compatibility(arguments())
    memory_hook.handle_offload_compatibility(arguments(**changed, cpu_offload_experts_in_place=False))
    with pytest.raises(ValueError, match=message):
        memory_hook.handle_offload_compatibility(arguments(**changed))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("is_cuda", "NVIDIA GPU"), ("is_pin_memory_available", "confidential computing")],
)
def test_the_flag_without_pinned_memory_is_refused(on_cuda: pytest.MonkeyPatch, missing: str, message: str) -> None:
    on_cuda.setattr(memory_hook, missing, lambda: False)
    with pytest.raises(ValueError, match=rf"{message}.*remove --cpu-offload-experts-in-place"):
        memory_hook.handle_offload_compatibility(arguments())


@pytest.mark.parametrize("flags", [(), ("--cpu-offload-gb=1",)], ids=["no budget", "on the CPU"])
def test_the_server_refuses_it_at_start(tmp_path: Path, flags: tuple[str, ...]) -> None:
    every = ("--cpu-offload-experts-in-place", *flags, *qwen4_modules.TEXT_ONLY)
    refusal = pytest.raises(ValueError, match="remove --cpu-offload-experts-in-place")
    with refusal, qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *every):
        pass


def test_the_argument_reaches_the_offloader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_hook, "_check_experts_in_place", lambda cfg: None, raising=False)  # this is a CPU
    flags = ("--cpu-offload-gb=1", "--cpu-offload-experts-in-place", *qwen4_modules.TEXT_ONLY)
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags):
        offloader = offloader_module.create_offloader()
    assert isinstance(offloader, OffloaderV1)
    assert offloader._experts_in_place
