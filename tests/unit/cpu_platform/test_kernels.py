"""The torch kernels against their definitions, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from sglang_cpu_ref.kernels import conv, gdn, norm, ple, qsa, speculation, state

H, HV, K, V = 2, 4, 16, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return seeded normal fp32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, HV, V] and the last state: decay, then write beta (v - S k) k^T, then read S q,
    in fp64.
    """
    outs = []
    s = s.double()
    for t in range(q.shape[0]):
        kt, qt = (x[t].double().repeat_interleave(HV // H, 0) for x in (k, q))
        s = s * g[t].double().exp()[:, None, None]
        write = beta[t].double()[:, None] * (v[t].double() - (s @ kt.unsqueeze(-1)).squeeze(-1))
        s = s + write.unsqueeze(-1) * kt.unsqueeze(-2)
        outs.append((s @ (qt * K**-0.5).unsqueeze(-1)).squeeze(-1))
    return torch.stack(outs), s


def test_chunked_prefill_is_the_delta_rule() -> None:
    lengths = [1, 64, 65, 200]
    total = sum(lengths)
    q, k = F.normalize(random(total, H, K), dim=-1), F.normalize(random(total, H, K, seed=1), dim=-1)
    v, g, beta = random(total, HV, V, seed=2), -random(total, HV, seed=3).abs() * 0.2, random(total, HV).sigmoid()
    states = random(6, HV, V, K, seed=4) * 0.3
    slots = torch.tensor([5, 0, 3, -1])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    before = states.clone()
    out, _, checkpoints = gdn.chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], initial_state=states, initial_state_indices=slots,
        cu_seqlens=bounds,
    )  # fmt: skip
    row = 0
    for n, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        span = slice(int(bounds[n]), int(bounds[n + 1]))
        start = before[slot] if slot >= 0 else torch.zeros(HV, V, K)
        expected, last = delta_rule(q[span], k[span], v[span], g[span], beta[span], start)
        torch.testing.assert_close(out[0, span].double(), expected, rtol=0, atol=2e-6)
        if slot >= 0:
            torch.testing.assert_close(states[slot].double(), last, rtol=0, atol=2e-6)
        for chunk in range(0, length, 64):
            if chunk:
                at = slice(span.start, span.start + chunk)
                start = delta_rule(q[at], k[at], v[at], g[at], beta[at], before[slot] if slot >= 0 else start * 0)[1]
            torch.testing.assert_close(checkpoints[0, row].double(), start.double(), rtol=0, atol=2e-6)
            row += 1
    assert row == checkpoints.shape[1] == 1 + 1 + 2 + 4
    untouched = [1, 2, 4]
    assert torch.equal(states[untouched], before[untouched])


def test_states_can_be_left_alone() -> None:
    states = random(1, HV, V, K)
    before = states.clone()
    arguments = [random(1, 3, n, size) for n, size in ((H, K), (H, K), (HV, V))]
    gdn.chunk_gated_delta_rule(
        *arguments, -random(1, 3, HV).abs(), random(1, 3, HV).sigmoid(), initial_state=states,
        initial_state_indices=torch.tensor([0]), cu_seqlens=torch.tensor([0, 3]), inplace_update=False,
    )  # fmt: skip
    assert torch.equal(states, before)


def test_decode_is_one_step_of_the_delta_rule_and_padding_changes_nothing() -> None:
    mixed, a, b = random(3, 2 * H * K + HV * V), random(3, HV, seed=1), random(3, HV, seed=2)
    A_log, dt_bias = random(HV, seed=3), random(HV, seed=4)  # noqa: N806
    states = random(4, HV, V, K, seed=5)
    before, out = states.clone(), torch.full((3, 1, HV, V), 7.0)
    slots = torch.tensor([2, -1, 0])
    gdn.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, K**-0.5, states, out, slots, use_qk_l2norm_in_kernel=True
    )
    g, beta = gdn.fused_gdn_gating(A_log, a, b, dt_bias)
    for row, slot in ((0, 2), (2, 0)):
        q, k, v = mixed[row].split([H * K, H * K, HV * V])
        q, k = F.normalize(q.view(1, H, K), dim=-1), F.normalize(k.view(1, H, K), dim=-1)
        expected, last = delta_rule(q, k, v.view(1, HV, V), g[0, row : row + 1], beta[0, row : row + 1], before[slot])
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(states[slot].double(), last, rtol=0, atol=1e-5)
    assert torch.equal(out[1], torch.zeros(1, HV, V))
    assert torch.equal(states[[1, 3]], before[[1, 3]])


def test_a_verified_chain_is_that_many_steps_of_the_delta_rule_and_leaves_the_state() -> None:
    steps, slots, rows = 3, torch.tensor([2, -1, 0]), torch.tensor([1, 0, 3])
    tokens = steps * len(slots)
    q, k, v = random(1, tokens, H, K), random(1, tokens, H, K, seed=1), random(1, tokens, HV, V, seed=2)
    a, b, A_log, dt_bias = random(tokens, HV), random(tokens, HV, seed=3), random(HV), random(HV, seed=4)  # noqa: N806
    states, after = random(4, HV, V, K, seed=5), torch.full((5, steps, HV, V, K), 7.0)
    before = states.clone()
    out = gdn.fused_sigmoid_gating_delta_rule_update(
        A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, states, slots, use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(4) * steps, disable_state_update=True, intermediate_states_buffer=after,
        intermediate_state_indices=rows, cache_steps=steps,
    )  # fmt: skip
    assert torch.equal(states, before)
    g, beta = gdn.fused_gdn_gating(A_log, a, b, dt_bias)
    q, k = F.normalize(q[0], dim=-1), F.normalize(k[0], dim=-1)
    for n, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        start = before[slot] if slot >= 0 else torch.zeros(HV, V, K)
        for step in range(steps):
            span = slice(n * steps, n * steps + step + 1)
            expected, last = delta_rule(q[span], k[span], v[0, span], g[0, span], beta[0, span], start)
            torch.testing.assert_close(after[row, step].double(), last, rtol=0, atol=1e-5)
            torch.testing.assert_close(out[0, span].double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(after[[2, 4]], torch.full((2, steps, HV, V, K), 7.0))


def test_write_strength_is_rounded_as_the_kernel_does() -> None:
    b = random(5, HV).to(torch.bfloat16)
    _, beta = gdn.fused_gdn_gating(random(HV), b, b, random(HV))
    assert beta.dtype == torch.float32
    assert torch.equal(beta[0], b.float().sigmoid().to(torch.bfloat16).float())


@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_in_pieces_equals_one_run(activation: str | None) -> None:
    channels, width = 6, 4
    x, weight, bias = random(channels, 11), random(channels, width, seed=1), random(channels, seed=2)
    padded = F.pad(x, (width - 1, 0))
    expected = torch.stack([(padded[:, t : t + width] * weight).sum(1) + bias for t in range(11)], 1)
    expected = F.silu(expected) if activation else expected
    states = random(3, channels, width - 1, seed=3)  # slot 1 holds an older request's garbage
    untouched = states[[0, 2]].clone()
    slot = torch.tensor([1])
    pieces = [
        conv.causal_conv1d_fn(
            x[:, a:b], weight, bias, states, torch.tensor([0, b - a]), [b - a], slot, torch.tensor([a > 0]), activation
        )
        for a, b in ((0, 2), (2, 9))
    ]
    pieces += [
        conv.causal_conv1d_update(x[:, t][None], states, weight, bias, activation, conv_state_indices=slot)[0][:, None]
        for t in (9, 10)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-6)
    assert torch.equal(states[1], x[:, -3:])
    assert torch.equal(states[[0, 2]], untouched)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_verified_chain_is_that_many_steps_of_the_convolution(shared_memory: bool) -> None:
    """SGLang stores neighbouring windows in shared memory: a view with overlapping rows."""
    channels, width, steps = 6, 4, 4
    x = random(3 * steps, channels).view(3, steps, channels).transpose(1, 2)  # as SGLang hands it over
    weight, bias = random(channels, width, seed=1), random(channels, seed=2)
    states, slots, rows = random(4, channels, width - 1, seed=3), torch.tensor([2, -1, 0]), torch.tensor([1, 3, 0])
    if shared_memory:
        memory = torch.full((5, channels, steps + width - 2), 7.0)
        windows = memory.unfold(2, width - 1, 1).permute(0, 2, 1, 3)
    else:
        windows = torch.full((5, steps, channels, width - 1), 7.0)
    expected, step_states = [], states.clone()
    found = conv.causal_conv1d_update(
        x, states, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows,
        intermediate_state_indices=rows,
    )  # fmt: skip
    for step in range(steps):
        expected.append(
            conv.causal_conv1d_update(x[:, :, step], step_states, weight, bias, "silu", conv_state_indices=slots)
        )
        assert torch.equal(windows[rows[[0, 2]], step], step_states[slots[[0, 2]]])
    assert found.stride() == x.stride()
    live = [0, 2]
    torch.testing.assert_close(found[live], torch.stack(expected, -1)[live], rtol=0, atol=1e-6)
    assert torch.equal(states, step_states)
    assert torch.equal(windows[2:], torch.full((3, steps, channels, width - 1), 7.0))


def test_padded_convolution_rows_change_no_state() -> None:
    states = random(2, 6, 3)
    before = states.clone()
    conv.causal_conv1d_update(random(1, 6), states, random(6, 4), conv_state_indices=torch.tensor([-1]))
    conv.causal_conv1d_fn(random(6, 2), random(6, 4), None, states, torch.tensor([0, 2]), [2], torch.tensor([-1]))
    assert torch.equal(states, before)


@pytest.mark.parametrize("before_gate", [True, False])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_gated_norm_in_both_orders(activation: str, before_gate: bool) -> None:
    x, z, weight = random(5, 8), random(5, 8, seed=1), random(8, seed=2)
    gate = torch.sigmoid(z) * (z if activation == "swish" else 1)
    inner = x if before_gate else x * gate
    expected = inner / (inner.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight * (gate if before_gate else 1)
    out = torch.empty_like(x)
    y, _, _ = norm._layer_norm_fwd(
        x, weight, None, 1e-6, z=z, out=out, norm_before_gate=before_gate, is_rms_norm=True, activation=activation
    )
    assert y is out
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_freed", [True, False])
def test_state_snapshots(check_freed: bool) -> None:
    conv_pool, ssm_pool = random(2, 6, 3), random(2, 6, 4)
    expected_conv, expected_ssm = conv_pool.clone(), ssm_pool.clone()
    source, target = torch.tensor([1, 2, -1 if check_freed else 5, 4]), torch.tensor([3, 0, 5, 5])
    mask = torch.tensor([True, False, check_freed, True])
    for pool in (expected_conv, expected_ssm):
        pool[:, 3], pool[:, 5] = pool[:, 1].clone(), pool[:, 4].clone()
    layer = (conv_pool[0].clone(), ssm_pool[0].clone())
    state.track_mamba_states_if_needed(*layer, source, mask, target, 4, check_freed)
    assert torch.equal(layer[0], expected_conv[0])
    assert torch.equal(layer[1], expected_ssm[0])
    state.track_mamba_states_all_layers(conv_pool, ssm_pool, source, mask, target, 4, check_freed)
    assert torch.equal(conv_pool, expected_conv)
    assert torch.equal(ssm_pool, expected_ssm)


class Caches:
    """State pools of two layers with eight slots, and what three rows had after each of four tokens."""

    def __init__(self) -> None:
        self.temporal, self.intermediate_ssm = random(2, 8, 3, 2), random(2, 3, 4, 3, 2, seed=1)
        self.conv = [random(2, 8, 5, seed=2).to(torch.bfloat16)]
        self.intermediate_conv_window = [random(2, 3, 4, 5, seed=3)]


@pytest.mark.parametrize("rows", [None, torch.tensor([2, 0, 1])])
def test_the_states_after_the_last_accepted_token_are_kept(rows: torch.Tensor | None) -> None:
    caches, before = Caches(), Caches()
    slots, accepted = torch.tensor([5, 1, 7]), torch.tensor([0, 3, 1])
    track, crossed = torch.tensor([2, 3, 4]), torch.tensor([-1, 2, -1])
    state.scatter_mamba_states_after_mtp_verify(caches, slots, accepted, track, crossed, rows)
    from_row = [0, 1, 2] if rows is None else rows.tolist()
    for pool, old, steps in (
        (caches.temporal, before.temporal, before.intermediate_ssm),
        (caches.conv[0], before.conv[0], before.intermediate_conv_window[0]),
    ):
        expected = old.clone()
        for slot, step, row in zip(slots.tolist(), accepted.tolist(), from_row, strict=True):
            expected[:, slot] = steps[:, row, step].to(old.dtype)
        expected[:, 3] = steps[:, from_row[1], 2].to(old.dtype)
        assert torch.equal(pool, expected)


def test_kv_slots_are_copied_by_address_also_onto_each_other() -> None:
    buffers = [random(6, 2, 4), random(6, 3).to(torch.bfloat16)]
    expected = [b.clone() for b in buffers]
    for b in expected:
        b[[1, 2, 5]] = b[[2, 1, 0]]
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    target, source = torch.tensor([1, 2, 5, 3]), torch.tensor([2, 1, 0, 4])
    state.copy_all_layer_kv_cache_func(addresses, strides, target, source, 3, 4, {})
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


def test_no_compressed_keys() -> None:
    keys = random(4, 1, 8)
    none = qsa.gather_qsa_compressed_keys(keys, torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0, 0]), 0, 0, 2)
    assert none.shape == (0, 1, 8)


class Table:
    """What the gather needs of an offloaded embedding."""

    embedding_dim = 4
    _file_prefetcher = None

    class shard_indices:  # noqa: N801  (SGLang's attribute)
        org_vocab_start_index = 10
        org_vocab_end_index = 14

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = torch.nn.Parameter(random(4, 4).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_table_rows_of_other_ranks_are_zero(dtype: torch.dtype) -> None:
    table = Table(dtype)
    ids = torch.tensor([[10, 13], [9, 14]])
    rows = ple.gather(table, ids)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows[0], table.weight.to(torch.bfloat16)[[0, 3]])
    assert torch.equal(rows[1], torch.zeros(2, 4, dtype=torch.bfloat16))
    out = torch.empty_like(rows)
    assert ple.gather(table, ids, out) is out
    assert torch.equal(out, rows)


def test_slots_of_drafts() -> None:
    table, rows, lengths = torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([2, 0]), torch.tensor([5, 3])
    out = torch.zeros(6, dtype=torch.int64)
    speculation.assign_draft_cache_locs_contiguous_func(rows, table, lengths, out, 1, 3)
    assert out.tolist() == [45, 46, 47, 3, 4, 5]
    ends = {"end_offset": lengths + 3, "batch_size": 2, "draft_token_num": 3, "device": "cpu"}
    found = speculation.extend_cache_locs(req_pool_indices=rows, req_to_token=table, start_offset=lengths, **ends)
    assert found.dtype == torch.int64
    assert torch.equal(found, out)
    speculation.assign_req_to_token_pool_func(rows, table, lengths, torch.tensor([7, 5]), torch.arange(100, 104), 2)
    assert table[2, 5:7].tolist() == [100, 101]
    assert table[0, 3:5].tolist() == [102, 103]
    assert int((table >= 100).sum()) == 4


def links(count: int, width: int) -> list[torch.Tensor]:
    """Return row, next token and next sibling of each token of `count` chains."""
    made = [torch.full((count, width), -9) for _ in range(3)]
    mask, positions = torch.zeros(count * width * width, dtype=torch.bool), torch.zeros(count * width, dtype=torch.long)
    none = torch.zeros(count, 0)
    speculation.build_tree_kernel_efficient_func(
        none, none, torch.zeros(count), mask, positions, *made, 1, width - 1, width, 1
    )
    return made


def test_greedy_verification_stops_at_the_first_wrong_draft() -> None:
    said = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]])
    drafts = torch.tensor([[1, 11, 12, 13], [2, 21, 99, 23], [3, 99, 32, 33]])  # the first of a row is no draft
    predicts, index = torch.zeros(12, dtype=torch.int32), torch.full((3, 4), -7, dtype=torch.int32)
    count = torch.zeros(3, dtype=torch.int32)
    speculation.verify_tree_greedy_func(predicts, index, count, drafts, *links(3, 4), said)
    assert count.tolist() == [3, 1, 0]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert predicts.tolist() == [11, 12, 13, 14, 21, 22, 0, 0, 31, 0, 0, 0]
    bonus = torch.zeros(3, dtype=torch.int32)
    speculation.fill_bonus_tokens_func(predicts[index.long()], count + 1, bonus, 4, 3)
    assert bonus.tolist() == [14, 22, 31]


def test_sampled_verification_keeps_the_models_distribution() -> None:
    """Whatever is drafted, a token is said as often as the model says it."""
    chains, probs = 40_000, torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    drafts = torch.tensor([9, 0, 3]).repeat(chains, 1)
    coins = torch.rand(chains, 4, generator=torch.Generator().manual_seed(0))
    predicts, index = torch.zeros(chains * 3, dtype=torch.int32), torch.zeros(chains, 3, dtype=torch.int32)
    count = torch.zeros(chains, dtype=torch.int32)
    speculation.tree_speculative_sampling_target_only(
        predicts, index, count, drafts, *links(chains, 3), coins[:, :3], coins[:, 3],
        probs.repeat(chains, 1, 1), torch.zeros(chains, 3, 4),
    )  # fmt: skip
    first, second = predicts.view(chains, 3)[:, 0], predicts.view(chains, 3)[:, 1][count > 0]
    for seen, expected in ((first, probs[0]), (second, probs[1])):
        share = torch.bincount(seen, minlength=4) / len(seen)
        torch.testing.assert_close(share, expected, rtol=0, atol=0.015)  # over four standard deviations
    assert (torch.bincount(count, minlength=3) / chains).allclose(torch.tensor([0.5, 0.3, 0.2]), atol=0.015)
    assert torch.equal(first == 0, count > 0)


def test_top_k_and_top_p_keep_the_largest() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]])
    expected = [[0, 4 / 7, 3 / 7, 0], [0, 1, 0, 0]]
    torch.testing.assert_close(speculation.top_k_renorm_prob(probs, torch.tensor([2, 1])), torch.tensor(expected))
    torch.testing.assert_close(speculation.top_p_renorm_prob(probs, torch.tensor([0.6, 0.4])), torch.tensor(expected))
    everything = torch.tensor([1 << 30, 4]), torch.tensor([1.0, 1.0])
    torch.testing.assert_close(speculation.top_k_renorm_prob(probs, everything[0]), probs)
    torch.testing.assert_close(speculation.top_p_renorm_prob(probs, everything[1]), probs)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gdn.chunk_gated_delta_rule(*[random(2, 3, 1, 4)] * 5),
        lambda: conv.causal_conv1d_update(random(2, 6), random(2, 6, 3), random(6, 4), num_accept_tokens=random(2)),
        lambda: conv.causal_conv1d_update(random(2, 6), random(2, 6, 3), random(6, 4), retrieve_next_token=random(2)),
        lambda: gdn.fused_sigmoid_gating_delta_rule_update(*[random(1, 3, 1, 4)] * 11),
        lambda: speculation.build_tree_kernel_efficient_func(*[random(2, 4)] * 8, 2, 3, 4, 0),
        lambda: speculation.verify_tree_greedy_func(*[random(2, 4)] * 8),
        lambda: norm._layer_norm_fwd(random(2, 8), random(8), None, 1e-6, group_size=4, is_rms_norm=True),
        lambda: norm._layer_norm_fwd(random(2, 8), random(8), None, 1e-6),
    ],
    ids=[
        "batched layout",
        "accepted counts",
        "tree convolution",
        "decode by token",
        "tree",
        "siblings",
        "grouped norm",
        "layer norm",
    ],
)
def test_what_is_not_served_is_refused(call: Any) -> None:
    with pytest.raises(NotImplementedError, match="cpu_ref"):
        call()
