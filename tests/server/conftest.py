"""The real server on the CPU platform: one model, one main server a run, further configurations on demand.

`Q4_PYTHON` names the interpreter whose environment serves (default: the one running pytest), `Q4_PYTHONPATH`
a folder with an `sglang` package to put in front of it, such as a patched tree's `python/`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from serving import Launcher, cached_model

from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess, launch
from q4kit.tinymodel import PRESETS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder: it starts real servers."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Return the fp32 mini checkpoint, one tensor an expert: the reference of every exact comparison."""
    return cached_model(replace(PRESETS["mini"], dtype="float32"))


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Return a function that starts another server: `with start_server(model, *flags, env={...}) as server`;
    `prefix` goes in front of its command.
    """
    logs = tmp_path_factory.mktemp("server-logs")
    count = 0

    def start(model: Path, *flags: str, env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> ServerProcess:
        nonlocal count
        count += 1
        return launch(
            model,
            python=os.environ.get("Q4_PYTHON", sys.executable),
            pythonpath=os.environ.get("Q4_PYTHONPATH") or None,
            extra_args=flags,
            env=env,
            log_path=logs / f"server-{count}.log",
            prefix=prefix,
        )

    return start


@pytest.fixture(scope="session")
def server(start_server: Launcher, tiny_model: Path) -> Iterator[ServerProcess]:
    """Return the main server: stock flags, vision tower included, weights loaded over NaN and checked."""
    with start_server(tiny_model, env={"SGLANG_CPU_REF_CHECK_LOAD": "1"}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[Client]:
    """Return a client of the main server."""
    with Client(server.base_url) as connected:
        yield connected
