"""--cpu-offload-gb leaves parameters that live on the host anyway (the PLE table) there, and works beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA, HOST
from offload_kit import CopyMeter, model_on_device, nbytes, on_host
from sglang.srt.utils.offloader import OffloaderV1

TABLE = "ple.ple_embedding.ngram_embedding.weight"
GIB = 1 << 30


@pytest.fixture
def ple_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A decoder layer on the fake device whose n-gram table is on the host."""
    with (
        qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *qwen4_modules.TEXT_ONLY) as runtime,
        model_on_device(runtime, monkeypatch, ple_on_host=True) as model,
    ):
        layer = model.model.layers[1]
        assert on_host(layer) == {TABLE}, "the model must keep the table, and nothing else, on the host"
        layer.forward = lambda: on_host(layer)
        yield layer


@pytest.mark.red_on_stock
def test_the_budget_is_not_spent_on_the_table(ple_layer: Any) -> None:
    offloader = OffloaderV1(GIB)
    offloader.wrap_modules(iter([ple_layer]))
    assert offloader._cpu_offload_bytes == nbytes(ple_layer, on_host(ple_layer) - {TABLE})


@pytest.mark.red_on_stock
def test_the_hook_does_not_copy_the_table(ple_layer: Any) -> None:
    OffloaderV1(GIB).wrap_modules(iter([ple_layer]))
    moved = on_host(ple_layer) - {TABLE}
    assert len(moved) > 10
    with CopyMeter() as meter:
        inside = ple_layer()
    assert inside == {TABLE}, "during the forward everything but the table is on the device"
    assert meter.bytes == nbytes(ple_layer, moved)


@pytest.mark.red_on_stock
def test_a_layer_that_starts_with_a_host_parameter_is_still_offloaded(ple_layer: Any) -> None:
    """The device of a layer is not that of its first parameter."""

    class TableFirst(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.empty(4, device=HOST), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.empty(4, device=CUDA), requires_grad=False)

        def forward(self) -> tuple[torch.device, torch.device]:
            return self.table.device, self.weight.device

    (module,) = OffloaderV1(GIB).wrap_modules(iter([TableFirst()]))
    assert on_host(module) == {"table", "weight"}
    assert module() == (HOST, CUDA)


def test_a_layer_entirely_on_the_host_is_left_alone(ple_layer: Any) -> None:
    module = torch.nn.Linear(2, 2, device=HOST)
    forward = module.forward
    offloader = OffloaderV1(GIB)
    assert offloader.wrap_modules(iter([module])) == [module]
    assert (offloader._cpu_offload_bytes, module.forward) == (0, forward)


class Tied(torch.nn.Module):
    """A layer of one parameter, which another layer may own as well, and one of its own."""

    def __init__(self, shared: torch.nn.Parameter, *, own: bool) -> None:
        super().__init__()
        self.shared = shared
        self.own = torch.nn.Parameter(torch.empty(4, device=CUDA), requires_grad=False) if own else None

    def forward(self) -> set[torch.device]:
        return {parameter.device for parameter in self.parameters()}


@pytest.mark.red_on_stock
@pytest.mark.parametrize("own", [True, False], ids=["with its own", "nothing but shared"])
@pytest.mark.parametrize("budget", [1, GIB], ids=["spent on the first layer", "large"])
def test_a_parameter_that_an_earlier_layer_took_along_is_not_host_resident(
    ple_layer: Any, own: bool, budget: int
) -> None:
    """The offloader moved it, not the model: every layer that shares it gets it on the device, and it counts once."""
    shared = torch.nn.Parameter(torch.empty(4, device=CUDA), requires_grad=False)
    offloader = OffloaderV1(budget)
    layers = offloader.wrap_modules(Tied(shared, own=own) for _ in range(2))
    assert shared.device == HOST
    assert offloader._cpu_offload_bytes == nbytes(torch.nn.ModuleList(layers), on_host(torch.nn.ModuleList(layers)))
    assert [layer() for layer in layers] == [{CUDA}, {CUDA}]
    assert shared.device == HOST


@pytest.mark.red_on_stock
def test_both_offloads_are_accepted_together(tmp_path: Path) -> None:
    flags = ("--cpu-offload-gb=1", "--ple-offload-embedding", *qwen4_modules.TEXT_ONLY)
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags) as runtime:
        assert runtime.server_args.cpu_offload_gb == 1


def test_grouped_offload_is_still_refused_with_the_remedy(tmp_path: Path) -> None:
    flags = ("--offload-group-size=2", "--ple-offload-embedding", *qwen4_modules.TEXT_ONLY)
    refusal = pytest.raises(ValueError, match=r"--ple-offload-embedding cannot be combined with.*--offload-group-size")
    with refusal, qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags):
        pass
