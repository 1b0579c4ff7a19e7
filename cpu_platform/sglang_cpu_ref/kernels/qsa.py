"""Query-sparse attention: the two places without a portable path of SGLang's own.

Scoring, top-k, block expansion and the sparse attention itself are SGLang's torch branches, used as they are.
"""

from __future__ import annotations

from typing import Any

import torch


def gather_qsa_compressed_keys(
    compressed: torch.Tensor,
    token_slot_table: torch.Tensor,
    cu_blocks: torch.Tensor,
    total_blocks: int,
    max_blocks: int,
    compress_ratio: int,
) -> torch.Tensor:
    """Return every sequence's compressed keys packed in sequence order [total_blocks, heads, size], in their
    dtype.

    compressed [slots / ratio, heads, size]; token_slot_table [N, tokens] maps a token to its slot; cu_blocks
    [N + 1]. Contract: `sglang.srt.layers.attention.qsa.kernel`.
    """
    rows = []
    for i, (first, last) in enumerate(zip(cu_blocks[:-1].tolist(), cu_blocks[1:].tolist(), strict=True)):
        first_token_slots = token_slot_table[i, : (last - first) * compress_ratio : compress_ratio].long()
        rows.append(compressed[first_token_slots // compress_ratio])
    return torch.cat(rows)[:total_blocks] if rows else compressed.new_empty((0, *compressed.shape[1:]))


def indexer_forward(
    self: Any,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    indexer_metadata: Any,
    cp_global_rope_positions: torch.Tensor | None = None,
) -> Any:
    """Return `QSAIndexer._forward_impl(...)`: every kernel in it has a branch for tensors off the GPU."""
    return self._forward_impl(hidden_states, positions, forward_batch, indexer_metadata, cp_global_rope_positions)
