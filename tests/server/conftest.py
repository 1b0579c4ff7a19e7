"""The real server on the CPU platform: one model, one main server a run, further configurations on demand.

`Q4_PYTHON` names the interpreter whose environment serves (default: the one running pytest), `Q4_PYTHONPATH`
a folder with an `sglang` package to put in front of it, such as a patched tree's `python/`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from q4kit import tinymodel
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess, launch
from q4kit.tinymodel import PRESETS, Options

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tiny-models"

Launcher = Callable[..., ServerProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder: it starts real servers."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


def cached_model(options: Options) -> Path:
    """Return the checkpoint that `options` describe, generated once for this version of the generator."""
    sources = sorted(Path(tinymodel.__file__).parent.glob("*.py"))
    key = hashlib.sha256(json.dumps(options.to_json(), sort_keys=True).encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = CACHE / f"{options.preset}-{options.dtype}-{key.hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            tinymodel.generate(folder, options)
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Return the fp32 mini checkpoint, one tensor an expert: the reference of every exact comparison."""
    return cached_model(replace(PRESETS["mini"], dtype="float32"))


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Return a function that starts another server: `with start_server(model, *flags, env={...}) as
    server`.
    """
    logs = tmp_path_factory.mktemp("server-logs")
    count = 0

    def start(model: Path, *flags: str, env: dict[str, str] | None = None) -> ServerProcess:
        nonlocal count
        count += 1
        return launch(
            model,
            python=os.environ.get("Q4_PYTHON", sys.executable),
            pythonpath=os.environ.get("Q4_PYTHONPATH") or None,
            extra_args=flags,
            env=env,
            log_path=logs / f"server-{count}.log",
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
