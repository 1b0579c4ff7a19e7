"""Findings of the first series that SGLang fixed before 0.5.23: they must stay fixed, on stock and patched.

Device placement is checked with fake tensors (fake_cuda.py), whose operators refuse mixed devices as CUDA kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import qwen4_modules
import tiny_qwen4
import torch
from fake_cuda import CUDA, HOST, fake_cuda
from sglang.srt.configs.qwen4_exp import Qwen4ExpTextConfig
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet
from sglang.srt.models.qwen4_exp import ALL_DECODER_LAYER_TYPES
from sglang.srt.utils import offloader
from torch.func import functional_call


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Qwen3_5GatedDeltaNet]:
    """A real GatedDeltaNet with finite weights, from a real model."""
    checkpoint = tiny_qwen4.write_config(tmp_path_factory.mktemp("tiny"))
    with qwen4_modules.runtime(checkpoint, *qwen4_modules.TEXT_ONLY) as runtime:
        module = runtime.build_model().model.layers[0].linear_attn
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        yield module


def test_gemma_norm_loads_when_its_weight_is_on_the_host() -> None:
    """The derived `1 + weight` buffer stays on the device while CPU offload has moved the parameter."""
    with fake_cuda():
        with CUDA:
            norm = GemmaRMSNorm(8)
        norm.weight.data = torch.zeros(8, device=HOST)
        norm.weight.weight_loader(norm.weight, torch.ones(8, device=HOST))
        assert norm.weight.device == HOST
        assert norm.gemma_weight.device == CUDA


def test_gemma_norm_buffer_is_one_plus_the_loaded_weight() -> None:
    norm = GemmaRMSNorm(4)
    loaded = torch.tensor([0.5, -1.0, 0.0, 2.0])
    norm.weight.weight_loader(norm.weight, loaded)
    assert norm.gemma_weight.tolist() == (1.0 + loaded).tolist()


def test_tied_a_log_goes_through_functional_call(gdn: Qwen3_5GatedDeltaNet) -> None:
    """A_log is registered twice (GDN and its attention): two different copies are refused by functional_call."""
    assert gdn.A_log is gdn.attn.A_log, "not tied any more: this test has nothing to check"
    state = offloader._get_offloaded_device_state(gdn, torch.device("meta"))

    class Probe(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self) -> torch.Tensor:
            return self.inner.A_log + self.inner.attn.A_log

    moved = functional_call(Probe(gdn), {f"inner.{name}": value for name, value in state.items()}, ())
    assert moved.is_meta, "both names must see the moved tensor: a mixed sum would be refused or stay on the host"
    assert not gdn.A_log.is_meta, "the module gets its own tensors back"


def test_conv_weights_follow_the_parameter_through_offload(gdn: Qwen3_5GatedDeltaNet) -> None:
    """The attention caches a view of conv1d.weight; a swapped parameter would leave it reading the old storage."""
    resident = offloader._get_resident_parameter_ids(gdn)
    for parameter in gdn.parameters():  # what OffloaderV1 does to every parameter that may move
        if id(parameter) not in resident:
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        gdn.conv1d.weight.fill_(3.0)
    assert torch.equal(gdn.attn.conv_weights, torch.full_like(gdn.attn.conv_weights, 3.0))
    assert {id(gdn.in_proj_qkvz.weight), id(gdn.out_proj.weight)}.isdisjoint(resident), "the rest may move"


@pytest.mark.parametrize("name", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_every_spelling_of_the_sparse_layer_finds_its_class(name: str) -> None:
    """transformers renames the layer type on load; the model looks the class up by the mapped name."""
    config = Qwen4ExpTextConfig(num_hidden_layers=2, layer_types=["linear_attention", name])
    assert [ALL_DECODER_LAYER_TYPES[kind].__name__ for kind in config.layers_block_type] == [
        "Qwen4ExpLinearDecoderLayer",
        "Qwen4ExpAttentionDecoderLayer",
    ]


def test_unknown_layer_type_is_not_taken_for_attention() -> None:
    config = Qwen4ExpTextConfig(num_hidden_layers=1, layer_types=["no_such_attention"])
    with pytest.raises(KeyError, match="no_such_attention"):
        _ = [ALL_DECODER_LAYER_TYPES[kind] for kind in config.layers_block_type]


def test_fake_devices_do_refuse_mixed_operands() -> None:
    """Guards the method: if FakeTensorMode let mixed devices pass, the placement tests could not fail."""
    with fake_cuda():
        on_device, on_host = torch.ones(2, device=CUDA), torch.ones(2, device=HOST)
        with pytest.raises(RuntimeError, match=r"cuda:0"):
            on_device + on_host
        parameter = torch.nn.Parameter(on_device, requires_grad=False)
        parameter.data = on_host
        assert (parameter.device, (parameter + on_host).device) == (HOST, HOST)
