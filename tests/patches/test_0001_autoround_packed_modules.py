"""AutoRound checkpoints: a fused layer takes the bits that the checkpoint gives its unfused parts.

The quantization_config under test is written by a real AutoRound run on a tiny Qwen4-Exp, and reaches SGLang through
the loader's own path, which injects the model's packed_modules_mapping.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen4
import torch

pytest.importorskip("auto_round", reason="auto-round is not installed: pip install auto-round==0.16.1")

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
from sglang.srt.model_loader.loader import _get_quantization_config
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.models.qwen3_5 import Qwen3_5ForCausalLM

HERE = Path(__file__).parent
GDN = "model.language_model.layers.0.linear_attn"
MLP = "model.language_model.layers.0.mlp"
DEFAULT = (2, 32, True)
MIXED = {"in_proj_a": 16, "in_proj_b": 16, "in_proj_qkv": 8, "in_proj_z": 8}

Bits = dict[str, int]
Quantize = Callable[[Bits], Path]


@pytest.fixture(scope="module")
def quantize(tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """Return a function: bits per leaf name -> the directory of a checkpoint that AutoRound wrote with them."""
    source = tiny_qwen4.write_checkpoint(tmp_path_factory.mktemp("source"))
    done: dict[str, Path] = {}

    def run(bits: Bits) -> Path:
        key = json.dumps(bits, sort_keys=True)
        if key not in done:
            out = tmp_path_factory.mktemp("autoround")
            subprocess.run([sys.executable, HERE / "autoround_tiny.py", source, out, key], check=True)
            (config,) = out.rglob("config.json")
            done[key] = config.parent
        return done[key]

    return run


def load(checkpoint: Path, mapping: dict[str, Any] | None = None) -> AutoRoundConfig:
    """Return what the model loader makes of the checkpoint; `mapping` stands in for the model class's own."""
    model_config = ModelConfig(str(checkpoint))
    if mapping is None:
        config = _get_quantization_config(model_config, LoadConfig())
    else:
        config = get_quant_config(model_config, LoadConfig(), mapping)
    assert isinstance(config, AutoRoundConfig)
    return config


def written(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())["quantization_config"]


def layer_config(config: AutoRoundConfig, name: str, layer: torch.nn.Module | None = None) -> tuple[int, int, bool]:
    return config.get_layer_config(layer or torch.nn.Module(), name)


def test_the_checkpoint_declares_the_unfused_layers(quantize: Quantize) -> None:
    """Guards the fixture: AutoRound names in_proj_a and never in_proj_ba, and 2 bits is the default."""
    config = written(quantize(MIXED))
    assert (config["quant_method"], config["bits"]) == ("auto-round", 2)
    assert config["extra_config"][f"{GDN}.in_proj_a"]["bits"] == 16
    assert config["extra_config"][f"{GDN}.in_proj_qkv"]["bits"] == 8
    assert f"{GDN}.in_proj_ba" not in config["extra_config"]


@pytest.mark.red_on_stock
@pytest.mark.parametrize(("fused", "bits"), [("in_proj_ba", 16), ("in_proj_qkvz", 8)])
def test_fused_gdn_projection_has_the_bits_of_its_parts(quantize: Quantize, fused: str, bits: int) -> None:
    config = load(quantize(MIXED))
    assert layer_config(config, f"{GDN}.{fused}")[0] == bits


@pytest.mark.red_on_stock
def test_sixteen_bit_projection_is_built_unquantized(quantize: Quantize) -> None:
    """What the bits decide: the method that creates the layer's parameters."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class FusedProjection(LinearBase):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    config = load(quantize(MIXED))
    assert isinstance(config.get_quant_method(FusedProjection(), f"{GDN}.in_proj_ba"), UnquantizedLinearMethod)


@pytest.mark.red_on_stock
def test_parts_with_different_bits_are_refused_by_name(quantize: Quantize) -> None:
    """One weight cannot have two formats: stock silently reads both halves with the default bits."""
    config = load(quantize({"in_proj_qkv": 8, "in_proj_z": 4}))
    with pytest.raises(ValueError, match=rf"{GDN}.in_proj_qkvz.*consistent quant config.*in_proj_qkv'.*in_proj_z'"):
        layer_config(config, f"{GDN}.in_proj_qkvz")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{GDN}.out_proj", DEFAULT),  # no entry: the default
        (f"{MLP}.experts", DEFAULT),  # fused experts: no entry under this prefix
        (f"{MLP}.shared_expert.gate_up_proj", (16, 32, True)),  # fused, and covered by the pattern `.*shared_expert.*`
        (f"{MLP}.shared_expert.down_proj", (16, 32, True)),
        ("model.language_model.layers.3.self_attn.qkv_proj", DEFAULT),
        ("lm_head", (16, -1, True)),  # outside block_name_to_quantize
    ],
)
def test_layers_that_were_right_stay_right(quantize: Quantize, name: str, expected: tuple[int, int, bool]) -> None:
    config = load(quantize(MIXED))
    assert layer_config(config, name) == expected


def test_fused_experts_take_the_bits_of_their_own_entries(quantize: Quantize) -> None:
    """Experts have a rule of their own (every entry below the prefix); the mapping must not shadow it."""

    class FusedMoEStandIn(torch.nn.Module):
        """get_layer_config recognises experts by "fusedmoe" in the class name."""

    config = load(quantize({"mlp.experts": 4}))
    assert layer_config(config, f"{MLP}.experts", FusedMoEStandIn())[0] == 4


def test_model_without_mapping_is_unchanged(quantize: Quantize) -> None:
    config = load(quantize(MIXED), {})
    assert config.packed_modules_mapping == {}
    assert layer_config(config, f"{GDN}.in_proj_ba") == DEFAULT
    assert layer_config(config, f"{GDN}.in_proj_a")[0] == 16


def test_config_without_injected_mapping_is_accepted(quantize: Quantize) -> None:
    """from_config alone, and an explicit null, as a quantization_config.json on disk could have it."""
    for extra in ({}, {"packed_modules_mapping": None}):
        assert AutoRoundConfig.from_config({**written(quantize(MIXED)), **extra}).packed_modules_mapping == {}


def test_nested_npu_mapping_does_not_hide_pattern_entries(quantize: Quantize) -> None:
    """On NPU the loader adds {"model": {...}}: taken for a fused layer, it would swallow every "model." name."""
    mapping = {**Qwen3_5ForCausalLM.packed_modules_mapping, "model": {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}}
    config = load(quantize(MIXED), mapping)
    assert layer_config(config, f"{MLP}.gate") == (16, 32, True)  # by the pattern `.*mlp\.gate.*`
    assert "model" in mapping, "the class's own mapping must not be edited"
