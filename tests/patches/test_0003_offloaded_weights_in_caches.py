"""Weights that --cpu-offload-gb moved are not read from caches made after loading, nor by a neighbouring layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA, HOST
from offload_kit import CopyMeter, model_on_device, on_host
from sglang.srt.models import qwen3_5
from sglang.srt.utils.offloader import OffloaderV1


class InputProjection(torch.nn.Module):
    """The GDN input projections as a module of their own, so that the offloader's hook wraps them alone."""

    def __init__(self, gdn: qwen3_5.Qwen3_5GatedDeltaNet) -> None:
        super().__init__()
        self.gdn = gdn

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gdn._forward_input_proj(x)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.nn.Module]]:
    """The decoder layers of a real model on the fake device, with the CUDA branches of the GDN switched on."""
    monkeypatch.setattr(qwen3_5, "_is_cuda", True)
    # The GEMM is a custom operator, whose fake kernel would take operands from anywhere; the real one is this matmul.
    monkeypatch.setattr(qwen3_5, "bf16_gemm_dispatch", torch.nn.functional.linear)
    with (
        qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *qwen4_modules.TEXT_ONLY) as runtime,
        model_on_device(runtime, monkeypatch) as model,
    ):
        yield list(model.model.layers)


def budget_for(gdn: torch.nn.Module, last: str) -> int:
    """Return the bytes that make the offloader stop right after the parameter `last`, in the order it walks them."""
    total = 0
    for name, parameter in gdn.named_parameters():
        total += parameter.numel() * parameter.element_size() if name != "conv1d.weight" else 0  # stays: cached view
        if name == last:
            return total
    raise AssertionError(f"no parameter {last}")


@pytest.mark.red_on_stock
@pytest.mark.parametrize("last", ["in_proj_qkvz.weight", "in_proj_ba.weight"], ids=["split", "both"])
def test_offloaded_projections_run_on_the_device(layers: list[torch.nn.Module], last: str) -> None:
    gdn = layers[0].linear_attn
    (projection,) = OffloaderV1(budget_for(gdn, last)).wrap_modules(iter([InputProjection(gdn)]))
    assert f"gdn.{last}" in on_host(projection)
    gdn.finalize_fused_in_proj()
    qkvz, ba = projection(torch.ones(1, 64, dtype=torch.bfloat16, device=CUDA))
    assert (qkvz.device, ba.device) == (CUDA, CUDA)
    assert (qkvz.shape[1], ba.shape[1]) == (gdn.in_proj_qkvz.weight.shape[0], gdn.in_proj_ba.weight.shape[0])


def test_resident_projections_are_still_packed(layers: list[torch.nn.Module]) -> None:
    gdn = layers[0].linear_attn
    gdn.finalize_fused_in_proj()
    rows = gdn.in_proj_qkvz.weight.shape[0] + gdn.in_proj_ba.weight.shape[0]
    assert gdn._fused_in_proj_weight.shape == (rows, 64)
    qkvz, ba = InputProjection(gdn)(torch.ones(1, 64, dtype=torch.bfloat16, device=CUDA))
    assert qkvz.shape[1] + ba.shape[1] == rows


@pytest.mark.red_on_stock
@pytest.mark.parametrize("last", ["in_proj_qkvz.weight", "in_proj_ba.weight"], ids=["split", "both"])
def test_offloaded_projections_follow_a_weight_update(layers: list[torch.nn.Module], last: str) -> None:
    """What the GEMMs read after an update is copied from the updated host memory, none of it from a cache."""
    gdn = layers[0].linear_attn
    (projection,) = OffloaderV1(budget_for(gdn, last)).wrap_modules(iter([InputProjection(gdn)]))
    gdn.finalize_fused_in_proj()
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=CUDA)
    projection(x)
    for parameter in (gdn.in_proj_qkvz.weight, gdn.in_proj_ba.weight):
        parameter.data = torch.empty_like(parameter.data)
    with CopyMeter() as meter:
        projection(x)
    updated = {
        gdn.get_parameter(name).untyped_storage().data_ptr() for name in on_host(gdn) if name.startswith("in_proj")
    }
    assert updated
    assert updated <= meter.sources
    assert gdn._fused_in_proj_weight is None


def test_packed_projections_follow_a_weight_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders write in place, and the resident projections are views of the packed weight: real numbers, on the CPU."""
    monkeypatch.setattr(qwen3_5, "_is_cuda", True)
    monkeypatch.setattr(qwen3_5, "bf16_gemm_dispatch", torch.nn.functional.linear)
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *qwen4_modules.TEXT_ONLY) as runtime:
        gdn = runtime.build_model().model.layers[0].linear_attn
        with monkeypatch.context() as on_device:
            on_device.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
            gdn.finalize_fused_in_proj()
        assert gdn._fused_in_proj_weight is not None
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        for seed in (1, 2):  # the first load, and an update
            generator = torch.Generator().manual_seed(seed)
            weights = [
                torch.randn(p.weight.shape, generator=generator).bfloat16() for p in (gdn.in_proj_qkvz, gdn.in_proj_ba)
            ]
            for projection, weight in zip((gdn.in_proj_qkvz, gdn.in_proj_ba), weights, strict=True):
                projection.weight.data.copy_(weight)
            for got, weight in zip(gdn._forward_input_proj(x), weights, strict=True):
                torch.testing.assert_close(got, torch.nn.functional.linear(x, weight))


@pytest.fixture
def fused_combine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the SM100 combine kernels; return the list of those that ran."""
    ran: list[str] = []

    def combine_norm(block, streams, gate, weight, eps):  # type: ignore[no-untyped-def]
        assert weight.device == block.device, f"the kernel got a norm weight on {weight.device}"
        ran.append("combine+norm")
        return streams, streams

    def combine(block, streams, gate):  # type: ignore[no-untyped-def]
        ran.append("combine")
        return streams

    kernels = ModuleType("sglang.kernels.ops.elementwise.hc_combine_decode")
    kernels.hc_combine_apply_norm, kernels.hc_combine_apply = combine_norm, combine
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    return ran


@pytest.mark.parametrize(
    ("where", "kernels"),
    [
        pytest.param(HOST, ["combine"], marks=pytest.mark.red_on_stock),
        pytest.param(CUDA, ["combine+norm"]),
    ],
    ids=["offloaded", "resident"],
)
def test_the_next_layers_norm_is_fused_only_when_it_is_here(
    layers: list[torch.nn.Module], fused_combine: list[str], where: torch.device, kernels: list[str]
) -> None:
    residual, next_norm = layers[0].mlp_hyper_connection, layers[3].attn_hyper_connection.hc_norm
    next_norm.weight.data = next_norm.weight.data.to(where)
    block = torch.ones(1, 64, dtype=torch.bfloat16, device=CUDA)
    streams = torch.ones(1, 256, dtype=torch.bfloat16, device=CUDA)
    gate = SimpleNamespace(record_stream=lambda stream: None)
    out, normalized = residual.combine_and_normalize(block, (streams, streams, gate), next_norm)
    assert fused_combine == kernels
    assert out.shape == streams.shape
    assert (normalized is None) == (where == HOST)
