"""What the server tests share beside fixtures: the type of a launcher and the cache of generated models."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from q4kit import tinymodel
from q4kit.server.launch import ServerProcess
from q4kit.tinymodel import Options

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tiny-models"

Launcher = Callable[..., ServerProcess]
"""`with start_server(model, *flags, env={...}) as server`."""


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


def require_nvme() -> None:
    """Skip the test where the served SGLang is the stock pin."""
    python = os.environ.get("Q4_PYTHON", sys.executable)
    path = os.pathsep.join(filter(None, [os.environ.get("Q4_PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang.srt.models.qwen4_exp_ple_nvme') is None)"
    if subprocess.run([python, "-c", check], env={**os.environ, "PYTHONPATH": path}).returncode:
        pytest.skip("the served SGLang has no --ple-offload-backend nvme (stock pin)")
