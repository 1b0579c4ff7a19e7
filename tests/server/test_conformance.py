"""The server computes what transformers' own Qwen4-Exp computes, and every part of the model matters to
it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scoring import LENGTHS, Reference, Scored, picked, prompts, score

from q4kit.server.client import Client

TOLERANCE = 1e-5
"""Largest |difference of logprobs| in fp32, natural logarithm; what was seen is about a tenth of it."""
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


@pytest.mark.parametrize("length", LENGTHS)
def test_logprobs_equal_transformers(length: int, scored: dict[int, Scored], reference: Reference) -> None:
    with reference.bf16_index():
        log_p = reference.log_p(scored[length].token_ids)
    expected = picked(log_p, scored[length].token_ids)
    assert scored[length].logprobs.shape == expected.shape
    assert np.abs(scored[length].logprobs - expected).max() <= TOLERANCE
    assert scored[length].token_ids[length:] == log_p[length - 1 : -1].argmax(-1).tolist()
