"""--cpu-offload-gb and --enable-paged-experts: refused together with the remedy, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import qwen4_modules
import tiny_qwen4
from sglang.srt.layers.moe.paged_experts.method import check_paged_experts_compat

PAGED = ("--enable-paged-experts", "--paged-experts-num-resident=4", *qwen4_modules.TEXT_ONLY)


class Layer:
    """What check_paged_experts_compat reads of a FusedMoE layer."""

    top_k = 2
    num_fused_shared_experts = 0


@pytest.mark.red_on_stock
@pytest.mark.parametrize("flag", ["--cpu-offload-gb=1", "--offload-group-size=2"])
def test_generic_offload_is_refused_with_the_remedy(tmp_path: Path, flag: str) -> None:
    flags = (*PAGED, "--no-ple-offload-embedding", flag)
    refusal = pytest.raises(RuntimeError, match=r"--cpu-offload-gb and --offload-group-size.*num-resident to free")
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags), refusal:
        check_paged_experts_compat(layer=Layer(), expert_format=object())


@pytest.mark.red_on_stock
def test_the_model_is_refused_while_it_is_built(tmp_path: Path) -> None:
    flags = (*PAGED, "--no-ple-offload-embedding", "--cpu-offload-gb=1")
    refusal = pytest.raises(RuntimeError)
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags) as runtime, refusal as refused:
        runtime.build_model()
    assert "--cpu-offload-gb" in str(refused.value)


def test_paged_experts_alone_pass_the_check(tmp_path: Path) -> None:
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *PAGED):
        check_paged_experts_compat(layer=Layer(), expert_format=object())


def test_cpu_offload_alone_builds(tmp_path: Path) -> None:
    flags = ("--cpu-offload-gb=1", "--no-ple-offload-embedding", *qwen4_modules.TEXT_ONLY)
    with qwen4_modules.runtime(tiny_qwen4.write_config(tmp_path), *flags) as runtime:
        assert len(runtime.build_model().model.layers) == len(tiny_qwen4.LAYER_TYPES)
