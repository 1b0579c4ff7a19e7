"""Run SGLang's own Triton kernels under TRITON_INTERPRET=1 on CPU tensors, and the torch versions on the same
inputs.

Prints one JSON object: kernel -> largest absolute difference of each output. In float16 only: the interpreter
computes with numpy, which has no bfloat16, and its results there are garbage. A process of its own, because
Triton reads the variable when it is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_PLATFORM": "cpu_ref"}

import torch
import triton.language as tl
import triton.runtime.autotuner as autotuner
from sglang.kernels.ops.attention import triton_gdn_fused_proj
from sglang.kernels.ops.attention.fla import chunk, fused_recurrent, layernorm_gated, op
from sglang.kernels.ops.attention.linear import fused_gdn_gating
from sglang.kernels.ops.elementwise import elementwise
from sglang.kernels.ops.mamba import causal_conv1d_triton
from sglang.srt.layers.attention.qsa import kernel as qsa_kernel
from sglang_cpu_ref.kernels import conv, gdn, moe_gate, norm, qsa

HALF = torch.float16
T, H, HV, K, V = 100, 2, 4, 32, 32
"""Tokens, key heads, value heads, key and value head size; two sequences of 70 and 30 tokens, so two and
one chunks.
"""


def prepare_interpreter() -> None:
    """Make up for what the interpreter lacks on a machine without a GPU."""
    prune = autotuner.Autotuner.prune_configs
    # no driver to time configurations with: take the first
    autotuner.Autotuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[:1]
    torch.cpu.device = lambda index=None: contextlib.nullcontext()
    layernorm_gated._get_sm_count = lambda device: 1
    # `exp = tl.exp`, bound at import, escapes the interpreter, which patches tl: look it up when it is called
    for name in ("exp", "exp2", "log", "log2"):
        early = getattr(op, name, None)
        late = late_lookup(name)
        for module in list(sys.modules.values()):
            if early is not None and module is not tl and getattr(module, "__dict__", {}).get(name) is early:
                setattr(module, name, late)


def late_lookup(name: str) -> Callable[..., Any]:
    """Return a function that calls tl.<name> as it is at call time."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl, name)(*args, **kwargs)

    return call


def random(seed: int) -> Callable[..., torch.Tensor]:
    """Return a seeded torch.randn."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def run_chunk(function: Any) -> list[torch.Tensor]:
    """Return output, states before chunks, final states."""
    r = random(1)
    q, k, v = r(1, T, H, K).to(HALF), r(1, T, H, K).to(HALF), r(1, T, HV, V).to(HALF)
    g, beta, states = -r(1, T, HV).abs() * 0.1, r(1, T, HV).sigmoid(), r(3, HV, V, K) * 0.1
    out, _, before = function(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=states,
        initial_state_indices=torch.tensor([2, 1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 70, T], dtype=torch.int32),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    return [out, before, states]


def run_decode(function: Any) -> list[torch.Tensor]:
    """Return output and states; one row is padding."""
    r = random(2)
    states, out = r(5, HV, V, K) * 0.1, torch.zeros(3, 1, HV, V, dtype=HALF)
    function(
        mixed_qkv=r(3, 2 * H * K + HV * V).to(HALF),
        a=r(3, HV).to(HALF),
        b=r(3, HV).to(HALF),
        A_log=r(HV),
        dt_bias=r(HV),
        scale=K**-0.5,
        initial_state=states,
        out=out,
        ssm_state_indices=torch.tensor([4, -1, 2], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    return [out, states]


def run_conv(function: Any) -> list[torch.Tensor]:
    """Return output and the two touched states; one sequence is fresh, one continues."""
    r = random(3)
    states, x = r(4, 64, 3).to(HALF), r(20, 64).to(HALF).transpose(0, 1)
    out = function(
        x,
        r(64, 4).to(HALF),
        None,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.tensor([False, True]),
        cache_indices=torch.tensor([3, 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 13, 20], dtype=torch.int32),
        seq_lens_cpu=[13, 7],
    )
    return [out, states]


def run_conv_update(function: Any) -> list[torch.Tensor]:
    """Return output and states."""
    r = random(4)
    states = r(4, 64, 3).to(HALF)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    out = function(r(2, 64).to(HALF), states, r(64, 4).to(HALF), None, "silu", conv_state_indices=slots)
    return [out, states]


def run_gating(function: Any) -> list[torch.Tensor]:
    """Return log decay and write strength."""
    r = random(5)
    return list(function(r(HV), r(9, HV).to(HALF), r(9, HV).to(HALF), r(HV)))


def run_split(function: Any) -> list[torch.Tensor]:
    """Return q|k|v, z, b, a."""
    r = random(6)
    return list(function(r(9, 2 * H * K + 2 * HV * V).to(HALF), r(9, 2 * HV).to(HALF), H, HV, K, V))


def run_norm(function: Any) -> list[torch.Tensor]:
    """Return the gated norm."""
    r = random(7)
    x, z = r(12, 32).to(HALF), r(12, 32).to(HALF)
    return [function(x, r(32).to(HALF), None, 1e-6, z=z, is_rms_norm=True, activation="silu")[0]]


def run_gate(function: Any) -> list[torch.Tensor]:
    """Return the gated shared expert."""
    r = random(8)
    return [function(r(5, 64).to(HALF), r(64).to(HALF), r(5, 64).to(HALF))]


def run_gate_add(function: Any) -> list[torch.Tensor]:
    """Return the routed experts with the gated shared expert added."""
    r = random(9)
    total = r(5, 64).to(HALF)
    function(r(5, 64).to(HALF), r(64).to(HALF), r(5, 64).to(HALF), total)
    return [total]


def run_gather(function: Any) -> list[torch.Tensor]:
    """Return the compressed keys of two sequences whose tokens lie in scattered pages."""
    r = random(10)
    slots = torch.stack([torch.arange(0, 80), torch.arange(120, 40, -1) // 2 * 2]).to(torch.int32)
    blocks = torch.tensor([0, 40, 55], dtype=torch.int32)
    return [function(r(64, 1, 32).to(HALF), slots, blocks, 55, 40, 2)]


CASES: dict[str, tuple[Callable[[Any], list[torch.Tensor]], Any, Any]] = {
    "chunk_gated_delta_rule": (run_chunk, chunk, gdn),
    "fused_recurrent_gated_delta_rule_packed_decode": (run_decode, fused_recurrent, gdn),
    "fused_gdn_gating": (run_gating, fused_gdn_gating, gdn),
    "fused_qkvzba_split_reshape_cat_contiguous": (run_split, triton_gdn_fused_proj, gdn),
    "causal_conv1d_fn": (run_conv, causal_conv1d_triton, conv),
    "causal_conv1d_update": (run_conv_update, causal_conv1d_triton, conv),
    "_layer_norm_fwd": (run_norm, layernorm_gated, norm),
    "fused_gate_sigmoid_mul": (run_gate, elementwise, moe_gate),
    "fused_gate_sigmoid_mul_add": (run_gate_add, elementwise, moe_gate),
    "gather_qsa_compressed_keys": (run_gather, qsa_kernel, qsa),
}
"""Function -> inputs, SGLang's module, our module."""


def main() -> int:
    """Print the differences."""
    prepare_interpreter()
    differences = {}
    for name, (run, theirs, ours) in CASES.items():
        expected, found = run(getattr(theirs, name)), run(getattr(ours, name))
        assert [t.dtype for t in expected] == [t.dtype for t in found], name
        assert [t.shape for t in expected] == [t.shape for t in found], name
        differences[name] = [(a.double() - b.double()).abs().max().item() for a, b in zip(expected, found, strict=True)]
    print(json.dumps(differences))
    return 0


if __name__ == "__main__":
    sys.exit(main())
