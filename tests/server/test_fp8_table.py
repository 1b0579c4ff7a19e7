"""An n-gram table stored in fp8 with a per-tensor scale, as the published checkpoint has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scoring import Reference, prompts, score
from serving import Launcher, cached_model

from q4kit.server.client import Client
from q4kit.tinymodel import PRESETS

LENGTHS = (17, 700)


@pytest.fixture(scope="module")
def fp8_model() -> Path:
    """Return the fp32 mini checkpoint whose n-gram tables are fp8."""
    return cached_model(replace(PRESETS["mini"], dtype="float32", ple_dtype="float8_e4m3fn"))


@pytest.fixture(scope="module")
def fp8_client(start_server: Launcher, fp8_model: Path) -> Iterator[Client]:
    """Return a client of a server that keeps the tables in fp8 in host memory."""
    flags = ("--ple-offload-embedding", "--ple-offload-backend", "pinned")
    with start_server(fp8_model, *flags) as running, Client(running.base_url) as connected:
        yield connected


def dequantised_reference(model: Path) -> Reference:
    """Return transformers with the tables multiplied by their scales, which it does not do itself."""
    reference = Reference(model)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in index if name.endswith(".ngram_embedding.weight_scale")]
    assert len(scales) == 2
    parameters = dict(reference.model.named_parameters())
    for name in scales:
        with safe_open(model / index[name], "pt") as file, torch.no_grad():
            parameters[name.removesuffix("_scale")].mul_(file.get_tensor(name).float())
    return reference


def test_fp8_tables_give_the_dequantised_logprobs(fp8_client: Client, fp8_model: Path) -> None:
    reference = dequantised_reference(fp8_model)
    for length in LENGTHS:
        answer = score(fp8_client, prompts()[length])
        assert np.abs(answer.logprobs - reference.logprobs(answer.token_ids)).max() <= 1e-5
    unscaled = Reference(fp8_model)
    assert np.abs(answer.logprobs - unscaled.logprobs(answer.token_ids)).max() >= 0.1
