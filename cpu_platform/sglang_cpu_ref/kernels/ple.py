"""Gather from an n-gram table that is offloaded to host memory."""

from __future__ import annotations

from typing import Any

import torch


def gather(self: Any, input_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bf16 rows [*input_ids.shape, embedding_dim] of this rank's shard; rows of other ranks are
    zero.

    Contract: `Qwen4ExpPinnedHostEmbedding.gather`, whose kernel reads the host pointer from the device.
    `self.weight` is the table [rows, embedding_dim] in bf16 or fp8, in memory or a mapped file; the scale is
    applied by the caller.
    """
    flat = input_ids.reshape(-1).long()
    first, last = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
    if flat.numel() and self._file_prefetcher is not None:
        self._file_prefetcher.enqueue(flat, vocab_start=first, vocab_end=last)
    mine = (flat >= first) & (flat < last)
    rows = self.weight.data[torch.where(mine, flat - first, 0)].to(torch.bfloat16)
    rows = torch.where(mine.unsqueeze(-1), rows, 0).view(*input_ids.shape, self.embedding_dim)
    return rows if out is None else out.copy_(rows)
