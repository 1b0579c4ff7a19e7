"""Chain speculation: where drafts are written, their one-branch tree, and which of them are accepted.

Letters in shapes: N sequences, D tokens that one verify forward looks at (the last accepted token, then the drafts).
"""

from __future__ import annotations

from typing import Any

import torch


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Fill out_cache_loc [N * topk * num_cols] with the KV slots of each sequence's next tokens.

    req_to_token [requests, tokens] maps a token to its slot. Contract: `sglang.kernels.ops.speculative.cache_locs`.
    """
    if positions is not None or mrope is not None:
        raise NotImplementedError("cpu_ref: positions of drafts are made by their caller, off the GPU")
    out_cache_loc.copy_(_next_slots(req_pool_indices, req_to_token, seq_lens, topk * num_cols).flatten())


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write the packed slots out_cache_loc into tokens [start_offset, end_offset) [N] of each sequence.

    Contract: `sglang.srt.mem_cache.allocation`.
    """
    at = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, first, last in bounds:
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return the KV slots [N * D] of the tokens that a verify forward writes, int64.

    Contract: `SRTPlatform.get_speculative_cache_locs_fn`; all sequences have `draft_token_num` tokens.
    """
    if not bool((end_offset - start_offset == draft_token_num).all()):
        raise NotImplementedError("cpu_ref: a verify forward takes the same number of tokens of each sequence")
    return _next_slots(req_pool_indices, req_to_token, start_offset, draft_token_num).flatten().long()


def _next_slots(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, lengths: torch.Tensor, count: int
) -> torch.Tensor:
    """Return the slots [N, count] of the tokens after the first `lengths` [N] of each sequence."""
    columns = lengths.long().unsqueeze(1) + torch.arange(count)
    return req_to_token[req_pool_indices.long()].gather(1, columns)


def build_tree_kernel_efficient_func(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Fill positions [N * D] and the links [N, D] of a chain: token i follows token i - 1, and has no sibling.

    tree_mask, flat, is what each token sees: its sequence's whole past (mode FULL_MASK, 0, only) and the chain up to
    itself. Contract: `sglang.kernels.ops.speculative.spec_tree`.
    """
    if topk != 1 or num_verify_tokens != spec_steps + 1 or int(tree_mask_mode) > 1:
        raise NotImplementedError("cpu_ref: speculation in chains only (--speculative-eagle-topk 1)")
    step = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens.long().unsqueeze(1) + step).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_(torch.where(step < num_verify_tokens - 1, step + 1, -1).expand_as(retrieve_next_token))
    retrieve_next_sibling.fill_(-1)
    chain = step <= step.unsqueeze(1)
    at = 0
    for length in seq_lens.tolist():
        past = length if int(tree_mask_mode) == 0 else 0
        rows = torch.cat([torch.ones(num_verify_tokens, past, dtype=torch.bool), chain], dim=1)
        tree_mask[at : at + rows.numel()] = rows.flatten().to(tree_mask.dtype)
        at += rows.numel()


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts as long as each is what the model says after the token before; fill and return the first three.

    candidates and target_predict [N, D]: the tokens looked at, and the model's own next token after each. predicts
    [N * D] gets that token for what was accepted, accept_index [N, D] the rows accepted (the first always is, -1
    behind the last), accept_token_num [N] the number of drafts among them. Contract:
    `sglang.kernels.ops.speculative.spec_tree`, chains only.
    """
    _require_chain(retrieve_next_sibling)
    right = (candidates[:, 1:] == target_predict[:, :-1]).long()
    drafts = right.cumprod(1).sum(1)
    _accept(predicts, accept_index, accept_token_num, retrieve_index, target_predict, drafts)
    return predicts, accept_index, accept_token_num


def _require_chain(retrieve_next_sibling: torch.Tensor) -> None:
    if bool((retrieve_next_sibling != -1).any()):
        raise NotImplementedError("cpu_ref: speculation in chains only (--speculative-eagle-topk 1)")


def _accept(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrieve_index: torch.Tensor,
    tokens: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    """Write down that the first `drafts` [N] drafts of each chain are accepted, where tokens [N, D] are what is said
    after each token of it.
    """
    kept = torch.arange(tokens.shape[1]) <= drafts.unsqueeze(1)
    predicts[retrieve_index[kept]] = tokens[kept].to(predicts.dtype)
    accept_index.copy_(torch.where(kept, retrieve_index, -1)[:, : accept_index.shape[1]])
    accept_token_num.copy_(drafts)


def fill_bonus_tokens_func(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Fill bonus_tokens [N] with the last accepted token of each sequence; accept_tokens [N, accept_stride] or flat.

    Contract: `sglang.kernels.ops.speculative.eagle`.
    """
    last = accept_lens.long().unsqueeze(1) - 1
    bonus_tokens.copy_(accept_tokens.reshape(batch_size, accept_stride).gather(1, last).squeeze(1))


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept each draft with the probability that the model gives it, up to the first one refused; fill the first
    three as `verify_tree_greedy_func` does.

    target_probs [N, D, vocabulary] after each token of candidates [N, D]; coins in [0, 1): uniform_samples [N, D], and
    uniform_samples_for_final_sampling [N] for the token behind the accepted ones, which is drawn from the model's
    distribution without the draft that was refused. Contract: `sglang.kernels.ops.speculative.sampling`, chains only.
    """
    _require_chain(retrive_next_sibling)
    said = target_probs[:, :-1].gather(2, candidates[:, 1:].unsqueeze(2)).squeeze(2)
    luck = uniform_samples[:, :-1] < said / max(threshold_acc, 1e-9)
    drafts = ((said > 0) & (luck | (said >= threshold_single))).long().cumprod(1).sum(1)
    row = torch.arange(len(drafts))
    left = target_probs[row, drafts].clone()
    refused = row[drafts < candidates.shape[1] - 1]
    left[refused, candidates[refused, drafts[refused] + 1]] = 0
    below = left.cumsum(-1)
    beyond = below > (uniform_samples_for_final_sampling * below[:, -1]).unsqueeze(1)
    last = left.shape[1] - 1 - (left > 0).flip(1).int().argmax(1)  # where rounding leaves nothing beyond the coin
    tokens = candidates.roll(-1, dims=1)
    tokens[row, drafts] = torch.where(beyond.any(1), beyond.int().argmax(1), last)
    _accept(predicts, accept_index, accept_token_num, retrive_index, tokens, drafts)


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return probs [rows, vocabulary] with all but the top_k [rows] largest of a row (and their ties) at zero."""
    order = probs.sort(-1, descending=True).values
    smallest = order.gather(1, top_k.long().clamp(1, probs.shape[1]).unsqueeze(1) - 1)
    return _normalised(torch.where(probs >= smallest, probs, 0))


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return probs [rows, vocabulary] with all but the fewest that sum up to top_p [rows] (and ties) at zero."""
    order = probs.sort(-1, descending=True).values
    needed = (order.cumsum(-1) - order < top_p.unsqueeze(1)).sum(-1, keepdim=True).clamp_min(1)
    return _normalised(torch.where(probs >= order.gather(1, needed - 1), probs, 0))


def _normalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)
