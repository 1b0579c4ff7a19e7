"""The budget calculator against what a running server says it took: the caches.

Not the weights: on a CPU the server reports how much free memory of the whole machine fell while it loaded, which other
processes move by gigabytes. Weights, experts and table are compared exactly, tensor by tensor, with the headers of
checkpoints in tests/unit/serving/test_budget.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Launcher, cached_model

from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess
from q4kit.serving import budget
from q4kit.serving.budget import GIB, Settings
from q4kit.serving.shape import Shape, load
from q4kit.tinymodel import PRESETS

TOKENS, SLOTS, REQUESTS = 4_194_304, 16_384, 4
"""Pools of about a GiB each: the server prints two or three decimals, so that small ones would prove nothing."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_model(PRESETS["mini"])


@pytest.fixture(scope="module")
def measured(start_server: Launcher, folder: Path) -> Iterator[ServerProcess]:
    flags = (
        "--language-model-only", "--ple-offload-embedding", "--ple-offload-backend=nvme", "--skip-server-warmup",
        f"--max-total-tokens={TOKENS}", f"--max-mamba-cache-size={SLOTS}", f"--max-running-requests={REQUESTS}",
    )  # fmt: skip
    with start_server(folder, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def parts(folder: Path) -> budget.Budget:
    return budget.compute(
        load(folder),
        Settings(expert_format="bf16", max_requests=REQUESTS, tokens=TOKENS, state_slots=SLOTS, context=32768),
    )


@pytest.fixture(scope="module")
def reported(measured: ServerProcess) -> dict[str, float]:
    with Client(measured.base_url) as client:
        usage: dict[str, float] = client.server_info()["internal_states"][0]["memory_usage"]
    return usage


def test_the_kv_pool_is_the_one_computed(reported: dict[str, float], parts: budget.Budget) -> None:
    """`kvcache` counts K, V and the QSA index in GiB, rounded to three decimals: half of the last one is allowed."""
    computed = (parts.of("K and V") + parts.of("QSA index")) / GIB
    assert computed > 1
    assert reported["token_capacity"] == TOKENS
    assert reported["kvcache"] == pytest.approx(computed, abs=0.0005 + 1e-9)


def test_the_state_pool_is_the_one_computed(measured: ServerProcess, folder: Path) -> None:
    """The log has two decimals, GiB; a conv state of another width or an fp16 state would be far outside."""
    line = re.search(r"conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB", measured.log_path.read_text())
    assert line is not None
    shape: Shape = load(folder)
    conv, ssm = budget.conv_state_bytes(shape, SLOTS) / GIB, budget.ssm_state_bytes(shape, SLOTS) / GIB
    assert ssm > 0.5
    assert float(line[1]) == pytest.approx(conv, abs=0.005 + 1e-9)
    assert float(line[2]) == pytest.approx(ssm, abs=0.005 + 1e-9)
