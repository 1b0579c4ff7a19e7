"""The torch kernels against SGLang's own Triton kernels, which the interpreter runs on this CPU, in
float16.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BOUNDS: dict[str, list[float]] = {
    # outputs of scale 1 or states of scale 1 in half precision: one unit in the last place is 9.8e-4
    "chunk_gated_delta_rule": [1e-3, 2e-3, 2e-3],
    "fused_recurrent_gated_delta_rule_packed_decode": [1e-3, 1e-6],
    "fused_gdn_gating": [2e-6, 1e-3],
    "fused_qkvzba_split_reshape_cat_contiguous": [0, 0, 0, 0],
    "causal_conv1d_fn": [8e-3, 0],  # outputs of scale 10
    "causal_conv1d_update": [8e-3, 0],
    "causal_conv1d_update of a chain": [8e-3, 0, 0],
    "fused_sigmoid_gating_delta_rule_update": [1e-3, 1e-6, 0],
    "assign_draft_cache_locs_contiguous_func": [0],
    "assign_req_to_token_pool_func": [0],
    "build_tree_kernel_efficient_func": [0, 0, 0, 0, 0],
    "verify_tree_greedy_func": [0, 0, 0],
    "fill_bonus_tokens_func": [0],
    "copy_all_layer_kv_cache_func": [0, 0],
    "_layer_norm_fwd": [2e-3],
    "fused_gate_sigmoid_mul": [2e-3],
    "fused_gate_sigmoid_mul_add": [2e-3],
    "gather_qsa_compressed_keys": [0],
}
"""Function (and what it is compared on) -> largest absolute difference allowed of each of its outputs."""


@pytest.fixture(scope="module")
def differences() -> dict[str, list[float]]:
    """Return what the subprocess found."""
    script = Path(__file__).parent / "interpreter_check.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_replaced_kernel_is_compared() -> None:
    """All but the state copies, whose kernels ask for a CUDA device; test_kernels has those."""
    from sglang_cpu_ref.install import REPLACED

    names = {name for _, functions in REPLACED.values() for name in functions}
    copies = {"track_mamba_states_if_needed", "track_mamba_states_all_layers", "scatter_mamba_states_after_mtp_verify"}
    assert names - set(BOUNDS) == copies


@pytest.mark.parametrize("name", BOUNDS)
def test_kernel_equals_sglangs(name: str, differences: dict[str, list[float]]) -> None:
    assert len(differences[name]) == len(BOUNDS[name])
    for difference, bound in zip(differences[name], BOUNDS[name], strict=True):
        assert difference <= bound
