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
from sglang.kernels.ops.attention.linear import fused_gdn_gating, fused_sigmoid_gating_recurrent
from sglang.kernels.ops.elementwise import elementwise
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.mamba import causal_conv1d_triton
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.layers.attention.qsa import kernel as qsa_kernel
from sglang.srt.mem_cache import allocation
from sglang_cpu_ref.kernels import conv, gdn, moe_gate, norm, qsa, speculation, state

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


def run_verify(function: Any) -> list[torch.Tensor]:
    """Return output, states after every draft, states; four tokens of two sequences."""
    r = random(11)
    states, after = r(4, HV, V, K) * 0.1, torch.zeros(3, 4, HV, V, K)
    out = function(
        A_log=r(HV),
        a=r(8, HV).to(HALF),
        dt_bias=r(HV),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=r(1, 8, H, K).to(HALF),
        k=r(1, 8, H, K).to(HALF),
        v=r(1, 8, HV, V).to(HALF),
        b=r(8, HV).to(HALF),
        initial_state_source=states,
        initial_state_indices=torch.tensor([3, 1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        disable_state_update=True,
        intermediate_states_buffer=after,
        intermediate_state_indices=torch.tensor([2, 0], dtype=torch.int32),
        cache_steps=4,
    )
    return [out, after, states]


def run_conv_verify(function: Any) -> list[torch.Tensor]:
    """Return output, states, and the states after every draft, which share memory; four tokens of two sequences."""
    r = random(12)
    states, memory = r(4, 64, 3).to(HALF), torch.zeros(3, 64, 6, dtype=HALF)
    out = function(
        r(2, 64, 4).to(HALF),
        states,
        r(64, 4).to(HALF),
        None,
        "silu",
        conv_state_indices=torch.tensor([3, 1], dtype=torch.int32),
        intermediate_conv_window=memory.unfold(2, 3, 1).permute(0, 2, 1, 3),
        intermediate_state_indices=torch.tensor([2, 0], dtype=torch.int32),
    )
    return [out, states, memory]


def run_draft_slots(function: Any) -> list[torch.Tensor]:
    """Return the slots of the next three tokens of two sequences."""
    out, rows, lengths = torch.zeros(6, dtype=torch.int64), torch.tensor([2, 0]), torch.tensor([5, 3])
    function(rows, torch.arange(60, dtype=torch.int32).view(3, 20), lengths, out, 1, 3)
    return [out]


def run_slots_of_tokens(function: Any) -> list[torch.Tensor]:
    """Return the table after two sequences got slots for three tokens and one."""
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    rows, first, last = torch.tensor([2, 0]), torch.tensor([5, 3]), torch.tensor([8, 4])
    function(rows, table, first, last, torch.arange(100, 104), 2)
    return [table]


def run_tree(function: Any) -> list[torch.Tensor]:
    """Return mask, positions and links of two chains of three drafts."""
    lengths = torch.tensor([5, 3])
    mask, positions = torch.ones(4 * (5 + 3) + 2 * 16, dtype=torch.bool), torch.zeros(8, dtype=torch.int64)
    links = [torch.full((2, 4), -1) for _ in range(3)]
    parents, scores = torch.tensor([[-1, 0, 1]]).repeat(2, 1), torch.arange(3).repeat(2, 1)
    function(parents, scores, lengths, mask, positions, *links, 1, 3, 4, spec_tree.TreeMaskMode.FULL_MASK)
    return [mask, positions, *links]


def run_greedy(function: Any) -> list[torch.Tensor]:
    """Return what was said, the accepted rows and their number; three chains with three, one and no right draft."""
    said = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]])
    drafts = torch.tensor([[1, 11, 12, 13], [2, 21, 99, 23], [3, 99, 32, 33]])
    rows, following = torch.arange(12).view(3, 4), torch.tensor([1, 2, 3, -1]).repeat(3, 1)
    made = [torch.zeros(12, dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32), torch.zeros(3).int()]
    function(*made, drafts, rows, following, torch.full((3, 4), -1), said)
    return made


def run_bonus(function: Any) -> list[torch.Tensor]:
    """Return the last accepted tokens."""
    bonus = torch.zeros(2, dtype=torch.int32)
    function(torch.arange(10, 18, dtype=torch.int32).view(2, 4), torch.tensor([4, 2]), bonus, 4, 2)
    return [bonus]


def run_copy(function: Any) -> list[torch.Tensor]:
    """Return two KV buffers after two of their slots were swapped and one overwritten."""
    r = random(13)
    buffers = [r(6, 2, 4).to(HALF), r(6, 3)]
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers], dtype=torch.int64)
    tiles = {"bytes_per_tile": 128, "byte_tiles": 1, "num_warps": 4}
    function(addresses, strides, torch.tensor([1, 2, 5, 0]), torch.tensor([2, 1, 3, 0]), 3, 4, tiles)
    return buffers


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
    "causal_conv1d_update of a chain": (run_conv_verify, causal_conv1d_triton, conv),
    "fused_sigmoid_gating_delta_rule_update": (run_verify, fused_sigmoid_gating_recurrent, gdn),
    "assign_draft_cache_locs_contiguous_func": (run_draft_slots, cache_locs, speculation),
    "assign_req_to_token_pool_func": (run_slots_of_tokens, allocation, speculation),
    "build_tree_kernel_efficient_func": (run_tree, spec_tree, speculation),
    "verify_tree_greedy_func": (run_greedy, spec_tree, speculation),
    "fill_bonus_tokens_func": (run_bonus, eagle, speculation),
    "copy_all_layer_kv_cache_func": (run_copy, cache_move, state),
    "_layer_norm_fwd": (run_norm, layernorm_gated, norm),
    "fused_gate_sigmoid_mul": (run_gate, elementwise, moe_gate),
    "fused_gate_sigmoid_mul_add": (run_gate_add, elementwise, moe_gate),
    "gather_qsa_compressed_keys": (run_gather, qsa_kernel, qsa),
}
"""Function (and what it is compared on) -> inputs, SGLang's module, our module."""
TRITON = {
    "build_tree_kernel_efficient_func": "sgl_build_tree_kernel_triton",
    "verify_tree_greedy_func": "verify_tree_greedy_triton",
}
"""Functions that launch another kernel on a GPU -> the function beside them that launches their Triton kernel."""


def main() -> int:
    """Print the differences."""
    prepare_interpreter()
    differences = {}
    for name, (run, theirs, ours) in CASES.items():
        function = name.split()[0]
        expected, found = run(getattr(theirs, TRITON.get(function, function))), run(getattr(ours, function))
        assert [t.dtype for t in expected] == [t.dtype for t in found], name
        assert [t.shape for t in expected] == [t.shape for t in found], name
        differences[name] = [(a.double() - b.double()).abs().max().item() for a, b in zip(expected, found, strict=True)]
    print(json.dumps(differences))
    return 0


if __name__ == "__main__":
    sys.exit(main())
