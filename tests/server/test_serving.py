"""What the stock server does around the model: loading, repeating, caching, images, and its storage
options.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scoring import Scored, prompts, score
from serving import Launcher, cached_model

from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess
from q4kit.tinymodel import PRESETS

CHECK_LOAD = {"SGLANG_CPU_REF_CHECK_LOAD": "1"}
LENGTHS = (17, 700, 3000)
TEXT_ONLY = ("--json-model-override-args", '{"language_model_only": true}')


def load_report(log: Path) -> dict[str, Any]:
    """Return what the NaN-filled load check found."""
    reports = re.findall(r"cpu_ref CHECK_LOAD (\{.*\})", log.read_text())
    assert len(reports) == 1
    report: dict[str, Any] = json.loads(reports[0])
    return report


def answers(client: Client) -> dict[int, Scored]:
    """Return the server's answers to some of the prompts, computed afresh."""
    client.flush_cache()
    return {length: score(client, prompts()[length]) for length in LENGTHS}


@pytest.fixture(scope="module")
def expected(client: Client) -> dict[int, Scored]:
    """Return the main server's answers."""
    return answers(client)


def test_every_parameter_is_filled_and_every_tensor_known(server: ServerProcess, tiny_model: Path) -> None:
    index = json.loads((tiny_model / "model.safetensors.index.json").read_text())
    report = load_report(server.log_path)
    assert report["unfilled"] == []
    assert report["unknown"] == []
    assert report["read"] == len(index["weight_map"])
    assert report["parameters"] > 100


def test_answers_repeat_bit_for_bit(client: Client, expected: dict[int, Scored]) -> None:
    assert answers(client) == expected


def assert_same_but_for_rounding(one: Scored, other: Scored) -> None:
    """A token that is computed among another number of tokens may differ in the last bits of fp32.

    The CPU's product of a matrix and a vector (the gate of the shared expert has one column) sums in an order that
    depends on the number of rows, and so does a product of two matrices below three rows (an expert with one or two
    tokens): with x [828, 64] and g [64] normal, `x[-188:] @ g` differs from `(x @ g)[-188:]` by up to 7e-7, while with
    w [64, 256] the rows of `x @ w` are the same from three rows on. A gate summed row by row makes the prefix hit below
    exact (4.8e-7 without); concurrent requests, decoded four rows at a time, keep theirs. Where the same chunks are
    computed, a hit is exact anyway: test_ple_nvme.py.
    """
    assert one.token_ids == other.token_ids
    assert np.abs(one.logprobs - other.logprobs).max() <= 1e-5


def test_prefix_is_taken_from_the_cache_with_the_same_result(client: Client) -> None:
    first, second = prompts()[700], prompts()[128]
    client.flush_cache()
    cold = score(client, first + second, start=len(first) + len(second) - 1)
    client.flush_cache()
    score(client, first, start=len(first) - 1)
    warm = score(client, first + second, start=len(first) + len(second) - 1)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 640  # whole pages of 64 tokens that end at a GDN snapshot
    assert_same_but_for_rounding(warm, cold)


def test_concurrent_requests_answer_as_single_ones(client: Client) -> None:
    batch = [prompts()[700][i : i + 60 + 10 * i] for i in range(4)]
    client.flush_cache()
    single = [score(client, prompt) for prompt in batch]
    client.flush_cache()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: score(Client(client.base_url), prompt), batch))
    for one, other in zip(together, single, strict=True):
        assert_same_but_for_rounding(one, other)


def image_answer(client: Client, colour: str) -> list[float]:
    """Return the logprobs of eight tokens generated about a plain image."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(buffer, "PNG")
    answer = client.generate(
        {
            "text": "<|vision_start|><|image_pad|><|vision_end|>hello world",
            "image_data": base64.b64encode(buffer.getvalue()).decode(),
            "sampling_params": {**GREEDY, "max_new_tokens": 8},
            "return_logprob": True,
        }
    )
    return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]


def test_image_reaches_the_model_through_the_vision_tower(client: Client) -> None:
    red, blue = image_answer(client, "red"), image_answer(client, "blue")
    assert len(red) == len(blue) == 8
    assert np.isfinite(red + blue).all()
    assert max(abs(a - b) for a, b in zip(red, blue, strict=True)) > 1e-3
    assert image_answer(client, "red") == red


@pytest.fixture  # of one test, so that no more than two servers are up at a time
def restarted(start_server: Launcher, tiny_model: Path, server: ServerProcess) -> Iterator[Client]:
    """Return a client of a second start of the main server's model, its n-gram tables in "pinned" host
    memory.
    """
    flags = ("--ple-offload-embedding", "--ple-offload-backend", "pinned")
    with start_server(tiny_model, *flags) as running, Client(running.base_url) as connected:
        yield connected


def test_restart_with_tables_in_host_memory_changes_no_bit(restarted: Client, expected: dict[int, Scored]) -> None:
    assert restarted.server_info()["ple_offload_backend"] == "pinned"
    assert answers(restarted) == expected


@pytest.fixture(scope="module")
def text_only(
    start_server: Launcher, tmp_path_factory: pytest.TempPathFactory, server: ServerProcess
) -> Iterator[ServerProcess]:
    """Return a server of the same weights with fused experts, no vision tower and the tables in a file."""
    model = cached_model(replace(PRESETS["mini"], dtype="float32", expert_layout="fused"))
    tables = str(tmp_path_factory.mktemp("tables"))
    flags = ("--ple-offload-embedding", "--ple-offload-backend", "file", "--ple-offload-dir", tables)
    with start_server(model, *flags, *TEXT_ONLY, env=CHECK_LOAD) as running:
        assert list(Path(tables).iterdir())
        yield running


def test_fused_experts_fill_every_parameter(text_only: ServerProcess) -> None:
    report = load_report(text_only.log_path)
    assert report["unfilled"] == []
    assert report["unknown"] == []


def test_fused_experts_table_file_and_no_tower_change_no_bit(
    text_only: ServerProcess, expected: dict[int, Scored]
) -> None:
    with Client(text_only.base_url) as connected:
        assert answers(connected) == expected
