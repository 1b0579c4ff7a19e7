"""Snapshots of recurrent states into the slots that the radix tree keeps.

Contract: `sglang.kernels.ops.mamba.mamba_state_scatter_triton`.
"""

from __future__ import annotations

import torch


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy row cache_indices[i] to row mamba_track_indices[i] where mamba_track_mask[i], in both pools
    [slots, ...].
    """
    source, target = _rows(cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots)
    conv_states[target] = conv_states[source]
    ssm_states[target] = ssm_states[source]


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Do the same for every layer of pools [layers, slots, ...]."""
    source, target = _rows(cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots)
    conv_states_pool[:, target] = conv_states_pool[:, source]
    ssm_states_pool[:, target] = ssm_states_pool[:, source]


def _rows(
    cache_indices: torch.Tensor,
    mask: torch.Tensor,
    track_indices: torch.Tensor,
    batch_size: int,
    check_freed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source and target rows [copies]; a freed slot is negative and skipped if `check_freed`."""
    wanted = mask[:batch_size].bool()
    source, target = cache_indices[:batch_size][wanted].long(), track_indices[:batch_size][wanted].long()
    if check_freed:
        alive = (source >= 0) & (target >= 0)
        source, target = source[alive], target[alive]
    return source, target
