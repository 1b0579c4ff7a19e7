"""--language-model-only serves the text part of Qwen4-Exp: accepted, and no vision tower is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import qwen4_modules
import tiny_qwen4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen4.write_config(tmp_path_factory.mktemp("tiny"))


@pytest.mark.red_on_stock
def test_flag_is_accepted_and_no_vision_weight_is_allocated(checkpoint: Path) -> None:
    with qwen4_modules.runtime(checkpoint, "--language-model-only") as runtime:
        assert runtime.model_config.is_lm_only
        assert not runtime.model_config.is_multimodal
        model = runtime.build_model()
    assert model.visual is None
    assert [name for name, _ in model.named_parameters() if "visual" in name] == []
    assert not model.is_mrope_enabled, "text positions are one-dimensional"


@pytest.mark.red_on_stock
def test_text_part_is_the_same_as_with_the_tower(checkpoint: Path) -> None:
    def shapes(*flags: str) -> dict[str, tuple[int, ...]]:
        with qwen4_modules.runtime(checkpoint, *flags) as runtime:
            return {name: tuple(p.shape) for name, p in runtime.build_model().named_parameters()}

    whole, text = shapes(), shapes("--language-model-only")
    tower = {name for name in whole if name.startswith("visual.")}
    assert tower, "the reference must have a vision tower, or this test compares nothing"
    assert text == {name: shape for name, shape in whole.items() if name not in tower}


@pytest.mark.red_on_stock
def test_checkpoint_with_vision_tensors_loads_without_unknown_names(tmp_path: Path) -> None:
    """The checkpoint still carries the tower: its tensors are skipped and everything else is filled."""
    from safetensors.torch import load_file

    directory = tiny_qwen4.write_checkpoint(tmp_path)
    weights = load_file(directory / "model.safetensors")
    assert any("visual" in name for name in weights)
    with qwen4_modules.runtime(directory, "--language-model-only") as runtime:
        model = runtime.build_model()
        loaded = model.load_weights(iter(weights.items()))
    assert {name for name, _ in model.named_parameters()} <= loaded


@pytest.mark.parametrize("other", ["--encoder-only", "--language-only", "--enable-prefix-mm-cache"])
def test_contradicting_flags_are_still_refused(checkpoint: Path, other: str) -> None:
    refusal = pytest.raises(ValueError, match=f"--language-model-only cannot be combined with {other}")
    with refusal, qwen4_modules.runtime(checkpoint, "--language-model-only", other):
        pass


def test_other_architectures_are_still_refused_by_name(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
    ).save_pretrained(tmp_path)
    refusal = pytest.raises(ValueError, match=r"--language-model-only does not support.*Qwen3ForCausalLM")
    with refusal, qwen4_modules.runtime(tmp_path, "--language-model-only"):
        pass
