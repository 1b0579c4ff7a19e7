"""The server computes what transformers' own Qwen4-Exp computes, and every part of the model matters to
it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scoring import LENGTHS, Logprobs, Reference, Scored, picked, prompts, score
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from q4kit.server.client import Client

TOLERANCE = 1e-5
"""Largest |difference of logprobs| in fp32, natural logarithm; what was seen is a tenth of it."""
QSA_BUDGET = 1024
"""Tokens up to which sparse attention attends to everything (indexer_budget of the mini preset)."""


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    """Return transformers on the same weights."""
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def scored(client: Client) -> dict[int, Scored]:
    """Return the server's answer to every prompt."""
    return {length: score(client, prompt) for length, prompt in prompts().items()}


def largest(one: Logprobs, other: Logprobs) -> float:
    """Return the largest absolute difference."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("length", LENGTHS)
def test_logprobs_and_greedy_tokens_equal_transformers(
    length: int, scored: dict[int, Scored], reference: Reference
) -> None:
    answer = scored[length]
    with reference.bf16_index():
        log_p = reference.log_p(answer.token_ids)
    assert largest(answer.logprobs, picked(log_p, answer.token_ids)) <= TOLERANCE
    assert answer.token_ids[length:] == log_p[length - 1 : -1].argmax(-1).tolist()


def test_sparse_attention_really_selects(
    scored: dict[int, Scored], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense attention in the reference agrees with the server up to the budget and not beyond it."""

    def attend_to_all(self: Any, hidden: Any, position_embeddings: Any, mask: torch.Tensor, cache: Any) -> Any:
        return torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)

    monkeypatch.setattr(qwen4_exp.Qwen4ExpTextQSAIndexer, "forward", attend_to_all)
    answer = scored[3000]
    dense = reference.logprobs(answer.token_ids)
    assert largest(answer.logprobs[: QSA_BUDGET - 4], dense[: QSA_BUDGET - 4]) <= TOLERANCE
    assert largest(answer.logprobs[QSA_BUDGET:], dense[QSA_BUDGET:]) >= 0.01


PARTS: dict[str, tuple[Callable[[Any], torch.Tensor], float]] = {
    "PLE table": (lambda layers: layers[1].ple.ple_embedding.ngram_embedding.weight, 0.3),
    "PLE key projection": (lambda layers: layers[1].ple.key_proj.weight, 0.07),
    "PLE convolution": (lambda layers: layers[2].ple.conv1d.weight, 0.08),
    "GDN convolution": (lambda layers: layers[0].linear_attn.conv1d.weight, 0.15),
    "GDN output": (lambda layers: layers[0].linear_attn.out_proj.weight, 0.15),
    "GDN write strength": (lambda layers: layers[1].linear_attn.in_proj_b.weight, 0.03),
    "attention output": (lambda layers: layers[3].self_attn.o_proj.weight, 0.035),
    "hyper-connection inject": (lambda layers: layers[2].mlp_hyper_connection.block_inject_weight.weight, 0.005),
    "hyper-connection mix": (lambda layers: layers[1].attn_hyper_connection.input_mix_weight_up.weight, 0.03),
    "router": (lambda layers: layers[0].mlp.gate.weight, 0.09),
    "routed experts": (lambda layers: layers[3].mlp.experts.down_proj, 0.05),
    "shared expert": (lambda layers: layers[2].mlp.shared_expert.down_proj.weight, 0.05),
    "shared expert gate": (lambda layers: layers[2].mlp.shared_expert_gate.weight, 0.015),
}
"""Part -> the weight that is zeroed, and the least change of a logprob that must follow, natural
logarithm.
"""


@pytest.mark.parametrize("part", PARTS)
def test_every_part_moves_the_logprobs(part: str, scored: dict[int, Scored], reference: Reference) -> None:
    """Zeroed in the reference, the part's weights move it away from the server: agreement covers that
    part.
    """
    pick, least = PARTS[part]
    weight = pick(reference.model.model.language_model.layers)
    kept = weight.detach().clone()
    answer = scored[128]
    try:
        with torch.no_grad():
            weight.zero_()
        without = reference.logprobs(answer.token_ids)
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert largest(answer.logprobs, without) >= least
    assert least >= 100 * TOLERANCE
