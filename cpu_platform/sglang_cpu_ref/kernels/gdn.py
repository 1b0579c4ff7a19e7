"""Gated delta net: projection split, gating, chunked prefill, single-token decode.

Letters in shapes: T tokens of all sequences, N sequences, H key heads, HV value heads (a multiple of H), K
and V the key and value head sizes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)

CHUNK = 64
"""Tokens a chunk: the kernel's own, because it also returns the state before each chunk, which the radix
cache keeps.
"""
_L2_EPS = 1e-6


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q|k|v [T, 2*H*K + HV*V], z [T, HV, V], b [T, HV] and a [T, HV] from the two fused projections.

    Contract: `sglang.kernels.ops.attention.triton_gdn_fused_proj`, inputs laid out q|k|v|z and b|a.
    """
    keys, values = num_heads_qk * head_qk, num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * keys + values, values], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def fused_gdn_gating(
    A_log: torch.Tensor,  # noqa: N803  (called by keyword)
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log decay g and the write strength, both fp32 [1, T, HV], from a, b [T, HV] and A_log,
    dt_bias [HV].

    Contract: `sglang.kernels.ops.attention.linear.fused_gdn_gating`. The write strength is rounded to b's
    dtype, as the kernel does before it stores into its fp32 output.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta=beta, threshold=threshold)
    return g.unsqueeze(0), b.float().sigmoid().to(b.dtype).float().unsqueeze(0)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Return the output [1, T, HV, V], None, and the state before each chunk [1, chunks, HV, V, K].

    q, k [1, T, H, K]; v [1, T, HV, V]; g (log decay) and beta [1, T, HV]; initial_state [slots, HV, V, K],
    written back at initial_state_indices [N] if `inplace_update`; cu_seqlens [N + 1]. A negative index means
    an empty state. Contract: `sglang.kernels.ops.attention.fla.chunk`. The intra-chunk system is solved with
    a triangular solve in fp32, where the kernel inverts 16 x 16 blocks in the input dtype.
    """
    if q.shape[0] != 1 or head_first or cu_seqlens is None:
        raise NotImplementedError("cpu_ref: chunk_gated_delta_rule takes packed sequences [1, T, H, K] with cu_seqlens")
    dtype, value_heads, value_size, key_size = q.dtype, v.shape[2], v.shape[3], k.shape[3]
    scale = key_size**-0.5 if scale is None else scale
    q, k, v, g, beta = (t[0].float().transpose(0, 1) for t in (q, k, v, g, beta))  # heads first: [heads, T, ...]
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    groups = value_heads // q.shape[0]
    q, k = q.repeat_interleave(groups, 0) * scale, k.repeat_interleave(groups, 0)
    out = torch.zeros_like(v)
    before_chunk: list[torch.Tensor] = []
    bounds = cu_seqlens.tolist()
    for n, (first, last) in enumerate(pairwise(bounds)):
        slot = int(initial_state_indices[n]) if initial_state_indices is not None else n
        if initial_state is not None and slot >= 0:
            state = initial_state[slot].float().clone()
        else:
            state = v.new_zeros(value_heads, value_size, key_size)
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            before_chunk.append(state.to(dtype))
            out[:, start:stop], state = _one_chunk(
                q[:, start:stop],
                k[:, start:stop],
                v[:, start:stop],
                g[:, start:stop],
                beta[:, start:stop],
                state,
            )
        if inplace_update and initial_state is not None and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    if before_chunk:
        states = torch.stack(before_chunk).unsqueeze(0)
    else:
        states = v.new_zeros(1, 0, value_heads, value_size, key_size, dtype=dtype)
    return out.transpose(0, 1).unsqueeze(0).to(dtype), None, states


def _one_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [HV, L, V] and the state after a chunk of L tokens; q is scaled, all fp32, state [HV, V,
    K].

    The delta rule of L tokens is one triangular system: with decays D_ij = exp(G_i - G_j) for j <= i, the
    writes u of the chunk solve (I + tril(beta k k^T * D, -1)) u = beta (v - exp(G) k S^T).
    """
    length, value_size = v.shape[1], v.shape[2]
    decay = g.cumsum(-1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    pair_decay = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    from_start = decay.exp().unsqueeze(-1)
    strength = beta.unsqueeze(-1)
    system = ((k * strength) @ k.transpose(-1, -2) * pair_decay).tril(-1) + torch.eye(length)
    right = torch.cat([v * strength, k * strength * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes = solved[..., :value_size] - solved[..., value_size:] @ state.transpose(-1, -2)
    out = (q * from_start) @ state.transpose(-1, -2) + (q @ k.transpose(-1, -2) * pair_decay) @ writes
    to_end = (decay[:, -1:] - decay).exp().unsqueeze(-1)
    state = state * decay[:, -1].exp()[:, None, None] + writes.transpose(-1, -2) @ (k * to_end)
    return out, state


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803  (called by keyword)
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance one token a sequence; write `out` [N, 1, HV, V] and the states in place, and return both.

    mixed_qkv [N, 2*H*K + HV*V]; a, b [N, HV]; initial_state [slots, HV, V, K] at ssm_state_indices [N], where
    a negative index is padding: its output is zero and no state changes. Contract:
    `sglang.kernels.ops.attention.fla.fused_recurrent`.
    """
    count, (value_heads, value_size), key_size = mixed_qkv.shape[0], out.shape[-2:], initial_state.shape[-1]
    key_heads = (mixed_qkv.shape[1] - value_heads * value_size) // (2 * key_size)
    sizes = [key_heads * key_size, key_heads * key_size, value_heads * value_size]
    q, k, v = mixed_qkv.float().split(sizes, dim=-1)
    q, k, v = q.view(count, key_heads, -1), k.view(count, key_heads, -1), v.view(count, value_heads, -1)
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    groups = value_heads // key_heads
    q, k = (q * scale).repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid().to(b.dtype).float()
    slots = ssm_state_indices.long()
    live = slots >= 0
    read, state = _one_token(q, k, v, g, beta, initial_state[slots.clamp_min(0)].float())
    result = read * live[:, None, None]
    out.copy_(result.to(out.dtype).unsqueeze(1))
    initial_state[slots[live]] = state[live].to(initial_state.dtype)
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,  # noqa: N803  (called by keyword)
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the output [1, T, HV, V] of the tokens to be verified, as decoding them one by one would give it.

    q, k [1, T, H, K]; v [1, T, HV, V]; a, b [T, HV]; cu_seqlens [N + 1]; states [slots, HV, V, K] at
    initial_state_indices [N], where a negative index is an empty state. The states stay; intermediate_states_buffer
    [rows, steps, HV, V, K] gets the state after each token at rows intermediate_state_indices [N]. Contract:
    `sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent`, for chains of drafts.
    """
    unused = {name: value for name, value in kwargs.items() if value not in (None, False)}
    if not disable_state_update or retrieve_parent_token is not None or cu_seqlens is None or unused:
        raise NotImplementedError(
            f"cpu_ref: fused_sigmoid_gating_delta_rule_update verifies chains of drafts, without {sorted(unused)}"
        )
    if intermediate_states_buffer is None or intermediate_state_indices is None:
        raise NotImplementedError("cpu_ref: a verify forward needs a buffer for the state after each draft")
    dtype, (tokens, key_heads, key_size) = q.dtype, q.shape[1:]
    count, value_heads = len(cu_seqlens) - 1, v.shape[2]
    steps, rest = divmod(tokens, count)
    if rest or not torch.equal(cu_seqlens.long(), torch.arange(count + 1) * steps):
        raise NotImplementedError("cpu_ref: a verify forward takes the same number of tokens of each sequence")
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
    g, beta = (t.view(count, steps, value_heads) for t in (g, b.float().sigmoid()))
    q, k, v = (t[0].float().reshape(count, steps, t.shape[2], t.shape[3]) for t in (q, k, v))
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    groups, scale = value_heads // key_heads, key_size**-0.5 if scale is None else scale
    q, k = (q * scale).repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    slots, rows = initial_state_indices[:count].long(), intermediate_state_indices[:count].long()
    state = initial_state_source[slots.clamp_min(0)].float() * (slots >= 0)[:, None, None, None]
    out, kept = torch.empty_like(v), rows >= 0
    for step in range(steps):
        out[:, step], state = _one_token(*(t[:, step] for t in (q, k, v, g, beta)), state)
        intermediate_states_buffer[rows[kept], step] = state[kept].to(intermediate_states_buffer.dtype)
    return out.view(1, tokens, *v.shape[2:]).to(dtype)


def _one_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [N, HV, V] and the state [N, HV, V, K] after one more token of each of N sequences.

    q (scaled), k [N, HV, K]; v [N, HV, V]; g (log decay) and beta [N, HV]; all fp32.
    """
    state = state * g.exp()[..., None, None]
    write = (v - (state * k.unsqueeze(-2)).sum(-1)) * beta.unsqueeze(-1)
    state = state + write.unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1), state


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    """Return x / |x| along the last axis."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _L2_EPS)
