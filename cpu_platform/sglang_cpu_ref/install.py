"""Put the torch kernels in the place of SGLang's."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from sglang_cpu_ref.kernels import conv, gdn, moe_gate, norm, ple, qsa, speculation, state

REPLACED: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "sglang.kernels.ops.attention.triton_gdn_fused_proj": (
        gdn,
        ("fused_qkvzba_split_reshape_cat_contiguous",),
    ),
    "sglang.kernels.ops.attention.linear.fused_gdn_gating": (gdn, ("fused_gdn_gating",)),
    "sglang.kernels.ops.attention.fla.chunk": (gdn, ("chunk_gated_delta_rule",)),
    "sglang.kernels.ops.attention.fla.fused_recurrent": (
        gdn,
        ("fused_recurrent_gated_delta_rule_packed_decode",),
    ),
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent": (
        gdn,
        ("fused_sigmoid_gating_delta_rule_update",),
    ),
    "sglang.kernels.ops.attention.fla.layernorm_gated": (norm, ("_layer_norm_fwd",)),
    "sglang.kernels.ops.mamba.causal_conv1d_triton": (conv, ("causal_conv1d_fn", "causal_conv1d_update")),
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": (
        state,
        (
            "track_mamba_states_if_needed",
            "track_mamba_states_all_layers",
            "scatter_mamba_states_after_mtp_verify",
        ),
    ),
    "sglang.kernels.ops.kvcache.cache_move": (state, ("copy_all_layer_kv_cache_func",)),
    "sglang.kernels.ops.speculative.cache_locs": (speculation, ("assign_draft_cache_locs_contiguous_func",)),
    "sglang.kernels.ops.speculative.eagle": (speculation, ("fill_bonus_tokens_func",)),
    "sglang.kernels.ops.speculative.spec_tree": (
        speculation,
        ("build_tree_kernel_efficient_func", "verify_tree_greedy_func"),
    ),
    "sglang.kernels.ops.elementwise.elementwise": (
        moe_gate,
        ("fused_gate_sigmoid_mul", "fused_gate_sigmoid_mul_add"),
    ),
    "sglang.srt.mem_cache.allocation": (speculation, ("assign_req_to_token_pool_func",)),
    "sglang.srt.layers.attention.qsa.kernel": (qsa, ("gather_qsa_compressed_keys",)),
}
"""SGLang module -> our module and the functions replaced, which have the same name and arguments in both."""


def functions() -> list[str]:
    """Replace every function of REPLACED, also where a module imported it by name. Idempotent; return the
    names.

    Raises AttributeError or ImportError, naming it, if the installed SGLang does not have one of them.
    """
    replaced = []
    for module_name, (ours, names) in REPLACED.items():
        module = import_module(module_name)
        for name in names:
            _replace_everywhere(getattr(module, name), getattr(ours, name))
            replaced.append(name)
    return replaced


def _replace_everywhere(old: Any, new: Any) -> None:
    """Rebind every global variable of SGLang that is `old` to `new`."""
    if old is new:
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "sglang" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)


def speculative_sampling() -> None:
    """Give SGLang the functions that it has for GPUs only, where they are None: the verification of sampled drafts."""
    users = ("kernels.ops.speculative.verify_sampling", "kernels.ops.sampling.renorm", "srt.speculative.eagle_utils")
    for user in users:
        module = import_module(f"sglang.{user}")
        for name in ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob"):
            if hasattr(module, name):
                setattr(module, name, getattr(speculation, name))


def qsa_indexer() -> None:
    """Register a native forward for QSAIndexer, which has none of its own."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer

    BaseFusedOp.register_oot_forward(QSAIndexer, qsa.indexer_forward, "native")


def ple_gather() -> None:
    """Replace the gather of an offloaded n-gram table, a Triton kernel that reads host memory from the
    device.
    """
    from sglang.srt.models.qwen4_exp import Qwen4ExpPinnedHostEmbedding

    Qwen4ExpPinnedHostEmbedding.gather = ple.gather
