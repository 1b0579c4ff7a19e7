"""--cpu-offload-gb takes the routed experts of every layer before any weight that every token needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA
from offload_kit import CopyMeter, model_on_device, nbytes, on_host
from sglang.srt.layers.moe import fused_moe_triton
from sglang.srt.layers.quantization import marlin_utils
from sglang.srt.utils import offloader as offloader_module
from sglang.srt.utils.offloader import OffloaderV1

# 12 layers with 64 experts of 6 MiB: large enough that the order matters, free because the tensors are fake.
MID_SIZE: dict[str, Any] = dict(
    num_hidden_layers=12,
    layer_types=tiny_qwen4.LAYER_TYPES * 3,
    hidden_size=1024,
    num_experts=64,
    num_experts_per_tok=8,
) | dict(moe_intermediate_size=1024, shared_expert_intermediate_size=1024, head_dim=128, ple_embed_dim=1024)


@contextmanager
def offloaded_model(
    path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, **text: Any
) -> Iterator[tuple[Any, OffloaderV1]]:
    """Yield a real model built as the server builds it under --cpu-offload-gb, and its offloader."""
    offloader = OffloaderV1(budget)
    monkeypatch.setattr(offloader_module, "_instance", offloader)
    with (
        qwen4_modules.runtime(tiny_qwen4.write_config(path, **text), *qwen4_modules.TEXT_ONLY) as runtime,
        model_on_device(runtime, monkeypatch) as model,
    ):
        yield model, offloader


def experts(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters() if ".mlp.experts." in f".{name}"}


def experts_moved(layers: torch.nn.Module, budget: int) -> set[str]:
    """Return what is on the host: routed experts alone, as many as the budget asks for and no whole tensor more."""
    moved = on_host(layers)
    assert moved <= experts(layers), f"needed by every token, yet moved: {sorted(moved - experts(layers))[:5]}"
    largest = max(nbytes(layers, {name}) for name in experts(layers))
    assert budget <= nbytes(layers, moved) < budget + largest
    return moved


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the bytes of all routed experts and of everything else in the layers of the mid-size model."""
    with offloaded_model(tmp_path, monkeypatch, 0, **MID_SIZE) as (model, _):
        layers = model.model.layers
        return {
            "experts": nbytes(layers, experts(layers)),
            "all": nbytes(layers),
            "largest": max(nbytes(layers, {name}) for name in experts(layers)),
        }


@pytest.mark.red_on_stock
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99], ids=["part of a layer", "half", "nearly all"])
def test_a_budget_within_the_experts_moves_experts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], share: float
) -> None:
    budget = int(share * sizes["experts"])
    with offloaded_model(tmp_path, monkeypatch, budget, **MID_SIZE) as (model, offloader):
        layers = model.model.layers
        moved = experts_moved(layers, budget)
        assert offloader._cpu_offload_bytes == nbytes(layers, moved)


FORMATS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "ignored_layers": ["linear_attn", "self_attn", "shared_expert", "ple"],
    },
    "AutoRound int4": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
        "packing_format": "auto_round:auto_gptq", "backend": "marlin",
    },
}  # fmt: skip


@pytest.mark.red_on_stock
@pytest.mark.parametrize("quantized", FORMATS)
def test_quantized_experts_go_first_with_all_that_belongs_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: str
) -> None:
    """Formats whose experts are other parameters: scales, packed weights, group indices."""
    write = tiny_qwen4.write_config

    def write_quantized(directory: Path, **text: Any) -> Path:
        path = write(directory, **text) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FORMATS[quantized]}))
        return directory

    monkeypatch.setattr(tiny_qwen4, "write_config", write_quantized)
    monkeypatch.setattr(marlin_utils, "get_device_capability", lambda *_: (9, 0))  # asked of a GPU, which is faked
    with offloaded_model(tmp_path, monkeypatch, 0, **MID_SIZE) as (model, _):
        layers = model.model.layers
        parts = {name.rsplit(".", 1)[1] for name in experts(layers)}
        assert parts & {"w13_weight_scale_inv", "w13_qweight"}, parts
        budget = nbytes(layers, experts(layers)) // 2
    with offloaded_model(tmp_path, monkeypatch, budget, **MID_SIZE) as (model, _):
        layers = model.model.layers
        assert {name.rsplit(".", 1)[1] for name in experts_moved(layers, budget)} == parts


@pytest.mark.red_on_stock
def test_the_rest_follows_when_the_experts_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    with offloaded_model(tmp_path, monkeypatch, sizes["experts"] + 1, **MID_SIZE) as (model, _):
        layers = model.model.layers
        assert experts(layers) < on_host(layers)
        rest = on_host(layers) - experts(layers)
        assert {name.split(".")[0] for name in rest} == {"0"}, "in layer order"


def test_a_budget_for_everything_moves_everything_that_may_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    with offloaded_model(tmp_path, monkeypatch, sizes["all"], **MID_SIZE) as (model, _):
        layers = model.model.layers
        stays = {name for name, _ in layers.named_parameters()} - on_host(layers)
        assert {name.split(".", 1)[1] for name in stays} == {"linear_attn.conv1d.weight"}, "only the cached view's"


def test_the_experts_of_all_layers_are_never_on_the_device_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """They move while the layers are built: waiting for the last layer would need the memory that is missing."""
    resident: list[int] = []
    build = OffloaderV1.wrap_modules

    def watched(self: OffloaderV1, modules: Iterator[torch.nn.Module], **kwargs: Any) -> list[torch.nn.Module]:
        built: list[torch.nn.Module] = []

        def watch() -> Iterator[torch.nn.Module]:
            for module in modules:
                built.append(module)
                layers = torch.nn.ModuleList(built)
                resident.append(nbytes(layers, experts(layers) - on_host(layers)))
                yield module

        return build(self, watch(), **kwargs)

    monkeypatch.setattr(OffloaderV1, "wrap_modules", watched)
    with offloaded_model(tmp_path, monkeypatch, sizes["experts"], **MID_SIZE):
        pass
    assert max(resident) == sizes["experts"] // 12


def device_bytes_while_building(
    path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, *, in_order: bool
) -> list[int]:
    """Return the weights on the device whenever a layer has just been built; `in_order`: with no expert preferred."""
    resident: list[int] = []
    build = OffloaderV1.wrap_modules

    def watched(self: OffloaderV1, modules: Iterator[torch.nn.Module], **kwargs: Any) -> list[torch.nn.Module]:
        built = torch.nn.ModuleList()

        def watch() -> Iterator[torch.nn.Module]:
            for module in modules:
                built.append(module)
                resident.append(nbytes(built) - nbytes(built, on_host(built)))
                yield module

        done = build(self, watch(), **kwargs)
        resident.append(nbytes(built) - nbytes(built, on_host(built)))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(OffloaderV1, "wrap_modules", watched)
        if in_order:  # as stock does it: no module counts as routed experts
            patch.setattr(fused_moe_triton, "FusedMoE", type("Nothing", (), {}))
        with offloaded_model(path, patch, budget, **MID_SIZE):
            return resident


@pytest.mark.parametrize("share", [0.3, 0.9, 1.02, 1.05, 2.0])
def test_loading_needs_no_more_of_the_device_than_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], share: float
) -> None:
    """The order must not cost memory while loading, in particular where the budget takes more than the experts."""
    budget = int(share * sizes["experts"])
    first, in_order = (
        device_bytes_while_building(tmp_path, monkeypatch, budget, in_order=order) for order in (False, True)
    )
    assert len(first) == len(in_order) == 13
    # In order the last parameter to move may be an expert tensor, which overdraws the budget by up to its size.
    overdraw = 0 if share == 2.0 else sizes["largest"]
    assert all(a <= b + overdraw for a, b in zip(first, in_order, strict=True)), list(zip(first, in_order, strict=True))
    assert max(first) < sizes["all"], "something was offloaded"


@pytest.mark.red_on_stock
def test_what_returned_to_the_device_is_whole_and_needs_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Weights that made room for later experts are where and what they were, and cost no copy per forward."""
    budget = sizes["experts"] // 4
    with offloaded_model(tmp_path, monkeypatch, budget, **MID_SIZE) as (model, offloader):
        layers = list(model.model.layers)
        assert on_host(model.model.layers) <= experts(model.model.layers)
        assert offloader._cpu_offload_bytes == nbytes(model.model.layers, on_host(model.model.layers))
        assert {p.device for n, p in model.model.layers.named_parameters() if ".mlp.experts." not in n} == {CUDA}
        hooked = [layer for layer in layers if "forward" in vars(layer)]
        assert hooked == [layer for layer in layers if on_host(layer)]
        assert 0 < len(hooked) < len(layers)


@pytest.mark.parametrize("share", [0.5, 2.0], ids=["half of the experts", "everything"])
def test_one_forward_copies_what_moved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], share: float
) -> None:
    """The hook covers both steps of the offload: whatever the order, each moved byte is copied once per forward."""
    with offloaded_model(tmp_path, monkeypatch, 0, **MID_SIZE) as (model, _):
        layers = list(model.model.layers)
        for layer in layers:
            layer.forward = lambda layer=layer: on_host(layer)
        OffloaderV1(int(share * sizes["experts"])).wrap_modules(iter(layers))
        moved = on_host(model.model.layers)
        with CopyMeter() as meter:
            assert [layer() for layer in layers] == [set()] * len(layers)
        assert meter.bytes == nbytes(model.model.layers, moved)


class DenseLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8, bias=False, device=CUDA)
        self.down = torch.nn.Linear(8, 8, bias=False, device=CUDA)


def test_a_model_without_experts_is_offloaded_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_when_next_is_built: list[set[str]] = []

    def build() -> Iterator[torch.nn.Module]:
        built: list[DenseLayer] = []
        for _ in range(4):
            moved_when_next_is_built.append(on_host(torch.nn.ModuleList(built)))
            built.append(DenseLayer())
            yield built[-1]

    with offloaded_model(tmp_path, monkeypatch, 0):
        layers = torch.nn.ModuleList(OffloaderV1(3 * 256).wrap_modules(build()))
        assert on_host(layers) == {"0.up.weight", "0.down.weight", "1.up.weight"}
    assert moved_when_next_is_built[1] == {"0.up.weight", "0.down.weight"}, "at once, not after the last layer"
