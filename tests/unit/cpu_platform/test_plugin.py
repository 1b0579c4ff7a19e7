"""The plugin acts only when it is asked for, and then replaces what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import sglang_cpu_ref

PROBE = """
import json
from sglang.srt.platforms import current_platform
print(json.dumps({"platform": type(current_platform).__name__}))
"""

INSTALL = """
import json, sys
from importlib import import_module
import torch
from sglang.srt.platforms import current_platform
current_platform.init_backend()
import sglang.srt.models.qwen4_exp  # imports most of the functions by name
import sglang.srt.speculative.eagle_worker_v2  # and this one the others
from sglang_cpu_ref import install, shims
originals = [getattr(import_module(m), n) for m, (_, names) in install.REPLACED.items() for n in names]
names = install.functions()
again = install.functions()
left = [
    f"{module_name}.{key}"
    for module_name, module in list(sys.modules.items())
    if module_name.startswith("sglang.")
    for key, value in vars(module).items()
    if any(value is original for original in originals)
]
install.speculative_sampling()
from sglang.kernels.ops.speculative import cache_locs, verify_sampling
from sglang.srt.speculative import eagle_utils
sampling = ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob")
rows = torch.tensor([1, 0])
slots = cache_locs.assign_extend_cache_locs_uniform_func(rows, torch.arange(12).view(2, 6), rows, 2, 3, "cpu")
from sglang.srt.models.qwen4_exp_ple_table import allocate_ple_host_table
pinned = allocate_ple_host_table((3, 4), torch.bfloat16, backend="pinned")
try:
    torch.empty(1, pin_memory=True)
    outside = "allowed"
except RuntimeError:
    outside = "refused"
print(json.dumps({
    "platform": type(current_platform).__name__, "names": names, "again": again, "left": left,
    "sampling": [getattr(eagle_utils, name).__module__ for name in sampling],
    "shared": len({m.tree_speculative_sampling_target_only for m in (verify_sampling, eagle_utils)}),
    "slots": slots.tolist(),
    "algorithms": [a for a in ("EAGLE", "EAGLE3", "NGRAM") if current_platform.supports_speculative_algorithm(a)],
    "pinned": [list(pinned.shape), str(pinned.dtype)], "outside": outside,
    "pin": torch.ones(2).pin_memory().tolist(), "stream": torch.cuda.Stream() is None,
}))
"""


def run(code: str, **env: str) -> dict[str, object]:
    """Return the JSON that `code` prints last, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_installed_under_its_name() -> None:
    (platform,) = [e for e in entry_points(group="sglang.srt.platforms") if e.name == sglang_cpu_ref.PLATFORM]
    assert platform.value == "sglang_cpu_ref:activate"


def test_activates_only_when_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert sglang_cpu_ref.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert sglang_cpu_ref.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_ref")
    assert sglang_cpu_ref.activate() == "sglang_cpu_ref.platform:CpuRefPlatform"


def test_unselected_plugin_leaves_sglangs_own_choice() -> None:
    assert run(PROBE)["platform"] != "CpuRefPlatform"


@pytest.fixture(scope="module")
def installed() -> dict[str, object]:
    """Return the state of a process with the platform selected and everything installed."""
    return run(INSTALL, SGLANG_PLATFORM="cpu_ref")


def test_replaces_every_reference_and_is_idempotent(installed: dict[str, object]) -> None:
    assert installed["platform"] == "CpuRefPlatform"
    assert installed["left"] == []
    assert installed["names"] == installed["again"]
    assert len(set(map(str, installed["names"]))) == 20  # type: ignore[call-overload]


def test_speculation_finds_its_functions(installed: dict[str, object]) -> None:
    assert installed["sampling"] == ["sglang_cpu_ref.kernels.speculation"] * 3
    assert installed["shared"] == 1
    assert installed["slots"] == [7, 8, 9, 0, 1, 2]
    assert installed["algorithms"] == ["EAGLE"]


def test_shims(installed: dict[str, object]) -> None:
    assert installed["pinned"] == [[3, 4], "torch.bfloat16"]
    assert installed["outside"] == "refused", "only the table's allocation may lose its pinning"
    assert installed["pin"] == [1.0, 1.0]
    assert installed["stream"] is True
