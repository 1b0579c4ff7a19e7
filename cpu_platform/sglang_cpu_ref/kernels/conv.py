"""Short causal depthwise convolution of the gated delta net, with its per-request state.

Contract of both functions: `sglang.kernels.ops.mamba.causal_conv1d_triton`. State: conv_states[slot, :,
:width - 1] holds the last width - 1 inputs, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)

PAD_SLOT_ID = -1
_SILU = ("silu", "swish", True)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    validate_data: bool = False,
    block_table: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the convolution [channels, T] of packed sequences x [channels, T], in x's dtype; update
    conv_states.

    weight [channels, width]; bias [channels]; cache_indices [N] names each sequence's slot (pad_slot_id:
    skipped, its output is undefined); has_initial_state [N] says whether that slot continues a sequence.
    """
    if block_table is not None:
        raise NotImplementedError("cpu_ref: causal_conv1d_fn without block tables only")
    out = torch.empty_like(x)
    keep = weight.shape[1] - 1
    kernel = weight.float().unsqueeze(1)
    start = 0
    for i, length in enumerate(int(n) for n in seq_lens_cpu):
        stop = start + length
        slot = int(cache_indices[i]) if cache_indices is not None else i
        if length and slot != pad_slot_id:
            if has_initial_state is not None and bool(has_initial_state[i]):
                left = conv_states[slot, :, :keep].to(x.dtype)
            else:
                left = x.new_zeros(x.shape[0], keep)
            full = torch.cat([left, x[:, start:stop]], dim=1)
            y = F.conv1d(full.float().unsqueeze(0), kernel, None if bias is None else bias.float(), groups=x.shape[0])[
                0
            ]
            out[:, start:stop] = (F.silu(y) if activation in _SILU else y).to(x.dtype)
            conv_states[slot, :, :keep] = full[:, full.shape[1] - keep :].to(conv_states.dtype)
        start = stop
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    metadata: Any = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Return the convolution of one new token a sequence x [N, channels], or of D tokens that are to be verified
    x [N, channels, D], in x's shape and dtype; shift them into conv_state.

    conv_state ends with the last of the D inputs, whether they will be accepted or not: `intermediate_conv_window`
    [rows, D, channels, width - 1] gets the state after each of them, at rows intermediate_state_indices [N].
    """
    tree = (retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    if cache_seqlens is not None or num_accept_tokens is not None or any(t is not None for t in tree):
        raise NotImplementedError("cpu_ref: causal_conv1d_update serves one token, or a chain of drafts, a sequence")
    tokens = x if x.dim() == 3 else x.unsqueeze(-1)
    count, keep = tokens.shape[2], weight.shape[1] - 1
    slots = (conv_state_indices if conv_state_indices is not None else torch.arange(len(x))).long()
    live = slots != pad_slot_id
    state = conv_state[slots.clamp_min(0), :, :keep].to(x.dtype)
    full = torch.cat([state, tokens], dim=-1)
    y = (full.unfold(-1, keep + 1, 1).float() * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        y = y + bias.float().unsqueeze(-1)
    if activation in _SILU:
        y = F.silu(y)
    conv_state[slots[live], :, :keep] = full[live][:, :, count:].to(conv_state.dtype)
    if intermediate_conv_window is not None:
        if intermediate_state_indices is None:
            raise ValueError("intermediate_conv_window needs intermediate_state_indices")
        rows = intermediate_state_indices.long()[live]
        for step in range(count):  # one at a time: the windows of neighbouring steps may share memory
            window = full[live][:, :, step + 1 : step + 1 + keep]
            intermediate_conv_window[:, step][rows] = window.to(intermediate_conv_window.dtype)
    return torch.empty_like(x).copy_(y.view_as(x))  # laid out like x: callers view the transpose
