"""Teacher-forced logprobs, from the server and from transformers' own Qwen4-Exp on the same weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from q4kit.server.client import GREEDY, Client

Logprobs = npt.NDArray[np.float64]
LENGTHS = (2, 17, 128, 700, 3000)
"""Prompt lengths, tokens: below the convolution width, around a GDN chunk (64), past QSA's budget (1024)."""
NEW_TOKENS = 16


def prompts() -> dict[int, list[int]]:
    """Return a fixed random prompt of every length; special tokens are left out."""
    rng = random.Random(1)
    return {length: [rng.randrange(3, 508) for _ in range(length)] for length in LENGTHS}


@dataclass(frozen=True)
class Scored:
    """One prompt with the tokens the server generated after it."""

    token_ids: list[int]
    prompt_length: int
    logprobs: Logprobs
    """ln p(token | all before it) of tokens 1.. (prompt and generated), shape [len(token_ids) - 1]."""
    cached_tokens: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Scored)
            and self.token_ids == other.token_ids
            and np.array_equal(self.logprobs, other.logprobs)
        )


def score(client: Client, prompt: list[int], *, start: int = 0, new_tokens: int = NEW_TOKENS) -> Scored:
    """Return the server's logprobs of `prompt` from token `start` on and of `new_tokens` greedy ones."""
    answer = client.generate(
        {
            "input_ids": prompt,
            "sampling_params": {**GREEDY, "max_new_tokens": new_tokens},
            "return_logprob": True,
            "logprob_start_len": start,
        }
    )
    meta = answer["meta_info"]
    rows = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    return Scored(prompt + answer["output_ids"], len(prompt), np.array([row[0] for row in rows]), meta["cached_tokens"])


def picked(log_p: torch.Tensor, token_ids: list[int]) -> Logprobs:
    """Return the entries of log_p [tokens, vocabulary] at the tokens that follow, shape [tokens - 1]."""
    return log_p[:-1].gather(1, torch.tensor(token_ids)[1:, None])[:, 0].numpy()


class Reference:
    """transformers' Qwen4-Exp in fp32: other code for every part of the model, plain torch throughout."""

    def __init__(self, model: Path) -> None:
        self.model: Any = qwen4_exp.Qwen4ExpForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()

    def log_p(self, token_ids: list[int]) -> torch.Tensor:
        """Return ln p of every next token, fp64 [len(token_ids), vocabulary]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def logprobs(self, token_ids: list[int]) -> Logprobs:
        """Return ln p(token | all before it) of tokens 1.., shape [len(token_ids) - 1]."""
        return picked(self.log_p(token_ids), token_ids)

    @contextmanager
    def bf16_index(self) -> Iterator[None]:
        """Round the query and key of QSA's index to bf16, as SGLang does.

        SGLang scores blocks with bf16 queries against an index cache that is bf16 whatever --dtype says; the
        reference keeps both in fp32. Past the budget of 1024 tokens a block whose score is close to the last
        selected one can then be chosen on one side alone, which moves a handful of logprobs by up to 2e-2
        without being an error of either. The indexer is the only caller of apply_rotary_pos_emb that rotates
        one tensor at a time.
        """
        original = qwen4_exp.apply_rotary_pos_emb

        def rounded(q: Any, k: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original(q, k, *args, **kwargs)
            return result if k is not None else result.bfloat16().float()

        qwen4_exp.apply_rotary_pos_emb = rounded
        try:
            yield
        finally:
            qwen4_exp.apply_rotary_pos_emb = original
