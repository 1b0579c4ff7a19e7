"""Copies between slots: recurrent states for the radix tree and of accepted drafts, and KV.

Contract of the recurrent ones: `sglang.kernels.ops.mamba.mamba_state_scatter_triton`.
"""

from __future__ import annotations

import ctypes
from typing import Any

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


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Make the states after the last accepted token of each of N sequences its states, of all layers.

    Pools [layers, slots, ...] get row state_indices_tensor[i] from step last_correct_step_indices[i] of row i (or
    src_indices_raw[i]) of the intermediate pools [layers, rows, steps, ...]; the snapshots for the radix tree get row
    mamba_track_indices[i] from step mamba_steps_to_track[i]. A negative step or row copies nothing.
    """
    pools = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pools += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    wanted = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        wanted.append((mamba_track_indices, mamba_steps_to_track))
    for targets, steps in wanted:
        source = src_indices_raw if src_indices_raw is not None else torch.arange(len(steps))
        kept = (steps >= 0) & (targets >= 0)
        target, row, step = targets[kept].long(), source[kept].long(), steps[kept].long()
        for pool, intermediate in pools:
            pool[:, target] = intermediate[:, row, step].to(pool.dtype)


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


def copy_all_layer_kv_cache_func(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
    num_locs: int,
    num_locs_upper: int,
    kv_copy_config: dict[str, int],
) -> None:
    """Copy slots src_loc [:num_locs] to tgt_loc in every KV buffer: data_ptrs [buffers] are their addresses, strides
    the bytes of a slot.

    Contract: `sglang.kernels.ops.kvcache.cache_move`. A pool for speculation calls it once when it is made.
    """
    target, source = tgt_loc[:num_locs].long(), src_loc[:num_locs].long()
    if not num_locs:
        return
    count = int(torch.cat([target, source]).max()) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (count * stride)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(count, stride)
        slots[target] = slots[source]
