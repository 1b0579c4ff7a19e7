"""`scripts/serve.sh --dry-run`: the command of every profile, documented flag by flag and understood by SGLang."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from serving_world import make_checkpoint

from q4kit.serving.run import exclusive
from tests.needs import needs_series

ROOT = Path(__file__).resolve().parents[3]
DOC = ROOT / "docs" / "SERVING.md"
COMMON = (
    "--language-model-only --ple-offload-embedding --ple-offload-backend=nvme --ple-offload-reader=auto "
    "--kv-cache-dtype=auto"
)
GPU = COMMON + " --chunked-prefill-size=2048 --cuda-graph-backend-decode=full --cuda-graph-backend-prefill=breakable"


def serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/serve.sh with the Python that runs this test as its environment."""
    venv = Path(sys.executable).parent.parent
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "serve.sh"), *args],
        env={**os.environ, "VENV": str(venv), **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@functools.cache
def printed(model: Path | None, profile: str, args: tuple[str, ...]) -> list[str]:
    """Return the words of the command that a dry run prints; each is asked for once."""
    named = ("--model", str(model)) if model else ()
    return command(serve("--profile", profile, *named, "--dry-run", *args).stdout)


def command(output: str) -> list[str]:
    """Return the words of the printed command after `sglang.launch_server`."""
    text = output.split("\ncommand:\n", 1)[1].split("\n\n", 1)[0]
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index("sglang.launch_server") + 1 :]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(folder / kind, kind) for kind in ("nvfp4", "int4", "int2")}


CASES = [
    ("24gb-32ram", "int2", (), GPU + " --context-length=16384 --max-running-requests=1 --max-total-tokens=16384"),
    ("24gb-32ram", "int2", (), "--max-mamba-cache-size=8 --cpu-offload-gb=21"),
    ("24gb-64ram", "int4", (), GPU + " --context-length=16384 --max-running-requests=1 --max-mamba-cache-size=8"),
    ("24gb-64ram", "int4", ("--offload-gib", "48"), "--cpu-offload-gb=48"),
    ("24gb-64ram", "int4", ("--in-place",), "--cpu-offload-experts-in-place"),
    ("24gb-64ram", "nvfp4", ("--kv-dtype", "fp8_e4m3"), "--kv-cache-dtype=fp8_e4m3"),
    ("24gb-128ram", "nvfp4", (), GPU + " --enable-paged-experts --paged-experts-num-resident=64"),
    ("24gb-128ram", "nvfp4", (), "--context-length=32768 --max-running-requests=2 --max-total-tokens=65536"),
    ("24gb-128ram", "nvfp4", ("--resident-experts", "32"), "--paged-experts-num-resident=32"),
    ("24gb-128ram", "nvfp4", ("--context", "8192", "--max-requests", "4"), "--max-total-tokens=32768"),
    ("24gb-128ram", "nvfp4", ("--max-requests", "4"), "--max-mamba-cache-size=32 --max-running-requests=4"),
    ("24gb-128ram", "nvfp4", ("--reader", "pread"), "--ple-offload-reader=pread"),
    ("24gb-128ram", "nvfp4", ("--host", "0.0.0.0", "--port", "8123"), "--host 0.0.0.0 --port 8123"),
    ("24gb-128ram", "nvfp4", ("--", "--log-level", "debug"), "--log-level debug"),
    ("tiny", "", (), COMMON + " --device=cpu --sleep-on-idle --mem-fraction-static=0.3 --chunked-prefill-size=512"),
    ("tiny", "", (), "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled"),
    ("tiny", "", (), "--context-length=8192 --max-running-requests=4 --max-mamba-cache-size=32"),
]


@pytest.mark.parametrize(("profile", "kind", "args", "expected"), CASES)
def test_each_profile_prints_its_flags(
    models: dict[str, Path], profile: str, kind: str, args: tuple[str, ...], expected: str
) -> None:
    words = printed(models.get(kind), profile, args)
    pairs = [f"{a} {b}" for a, b in pairwise(words)]
    for flag in re.findall(r"--\S+(?: [^-\s]\S*)?", expected):
        assert flag in words or flag in pairs, f"{flag} not in {words}"


def test_every_flag_is_a_case_above_and_explained_in_the_documentation(models: dict[str, Path]) -> None:
    """serve.sh must not emit a flag that no case expects or that docs/SERVING.md does not explain."""
    document = DOC.read_text()
    expected = {flag.split("=")[0] for case in CASES for flag in case[3].split() if flag.startswith("--")}
    emitted: set[str] = set()
    for profile, kind, args, _ in CASES:
        if "--" in args:
            continue
        words = printed(models.get(kind), profile, args)
        emitted |= {word.split("=")[0] for word in words if word.startswith("--")}
    emitted.discard("--model-path")
    assert emitted - expected == set()
    explained = set(re.findall(r"^\| `(--[a-z0-9-]+)", document, re.MULTILINE))
    assert emitted - explained == set()


def test_every_option_of_serve_sh_is_explained() -> None:
    options = set(re.findall(r"--[a-z][a-z-]+", serve("--help").stdout)) - {"--help"}
    assert len(options) >= 18
    explained = set(re.findall(r"^\| `(--[a-z0-9-]+)", DOC.read_text(), re.MULTILINE))
    assert options - explained == set()


PARSE = """
import argparse, json, os, sys
os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
for line in sys.stdin:
    parser.parse_args(json.loads(line))
    print("parsed")
"""


@needs_series
def test_sglang_itself_understands_every_printed_command(models: dict[str, Path]) -> None:
    """The argument parser of the patched server takes them; the tables of the cases cannot drift from it."""
    lines = [json.dumps(printed(models.get(kind), profile, args)) for profile, kind, args, _ in CASES]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input="\n".join(lines), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("parsed") == len(CASES)


def test_a_table_elsewhere_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    done = serve("--profile", "24gb-128ram", "--model", str(models["nvfp4"]), "--dry-run", "--table-dir", str(tmp_path))
    assert f"--ple-offload-dir={tmp_path}" in command(done.stdout)
    assert done.returncode == 4
    assert "ple.json is missing" in done.stdout


def test_the_small_profile_is_refused_with_the_reason(models: dict[str, Path]) -> None:
    done = serve("--profile", "24gb-32ram", "--model", str(models["int2"]), "--dry-run")
    assert done.returncode == 4
    assert "2-bit experts are not there yet" in done.stdout
    assert "24gb-32ram is refused here" in done.stderr
    assert "experts" in done.stderr


def test_a_refused_start_starts_nothing_and_reports_everything(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'no driver' >&2\nexit 9\n")
    fake.chmod(0o755)
    model = make_checkpoint(tmp_path / "broken")
    (model / "model-1.safetensors").write_bytes(b"")
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = serve("--profile", "24gb-128ram", "--model", str(model), "--run-dir", str(tmp_path / "run"), PATH=path)
    assert done.returncode == 4
    for words in ("nvidia-smi exit code 9: no driver", "model-1.safetensors: 0 bytes", "free VRAM"):
        assert words in done.stdout
    assert "checkpoint" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"hidden_size": 4}, "'num_hidden_layers' is missing"),
        ({"ple_embedding_dtype": "float6"}, "ple_embedding_dtype is 'float6'"),
    ],
)
def test_a_config_that_cannot_be_used_is_a_row_of_the_table(
    tmp_path: Path, text: dict[str, object], words: str
) -> None:
    model = make_checkpoint(tmp_path / "m")
    body = json.loads((model / "config.json").read_text())
    body["model_type"] = "qwen3_moe"
    body["text_config"] = text if "hidden_size" in text else body["text_config"] | text
    (model / "config.json").write_text(json.dumps(body))
    (model / "tokenizer.json").unlink()
    done = serve("--profile", "24gb-128ram", "--model", str(model), "--dry-run")
    assert done.returncode == 4, done.stderr
    for found in (words, "qwen3_moe", "no tokenizer.json"):
        assert found in done.stdout
    assert "checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--profile", "24gb-128ram"), "--model is missing"),
        (("--profile", "tiny", "--memory-max", "60X"), "--memory-max '60X'"),
        (("--profile", "tiny", "--memory-max", "0"), "--memory-max '0'"),
        (("--profile", "tiny", "--resident-experts", "4"), "does not page experts"),
        (("--profile", "tiny", "--context", "0"), "context is 0"),
        (("--profile", "tiny", "--accept", "RAM"), "--accept 'RAM'"),
        (("--profile", "huge"), "invalid choice"),
        (("--profile", "tiny", "--", "--port", "8000"), "--port after --"),
        (("--profile", "tiny", "--", "--host=0.0.0.0"), "--host after --"),
        (("--profile", "tiny", "--", "--model-path", "m"), "--model-path after --"),
        (("--profile", "tiny", "--", "--admin-api-key", "k"), "--admin-api-key after --"),
        (("--profile", "tiny", "--", "--ssl-certfile=c"), "--ssl-certfile after --"),
        ((), "--profile"),
    ],
)
def test_bad_usage_is_refused_by_name(args: tuple[str, ...], words: str) -> None:
    done = serve("--dry-run", *args)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_second_server_in_the_same_folder_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("of the first")
    accept = ("--accept", "series", "--accept", "port")
    with exclusive(tmp_path):
        done = serve("--profile", "tiny", "--run-dir", str(tmp_path), "--timeout", "1", *accept)
    assert done.returncode == 4
    assert "belongs to a server that runs now" in done.stderr
    assert "starting" not in done.stdout
    assert (tmp_path / "server.log").read_text() == "of the first"


def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    done = serve("--profile", "tiny", VENV=str(tmp_path / "none"))
    assert done.returncode == 4
    assert "no environment at" in done.stderr
    assert "scripts/setup.sh" in done.stderr
    assert "usage: scripts/serve.sh" in serve("--help", VENV=str(tmp_path / "none")).stdout


def test_a_memory_cap_puts_the_command_into_a_scope(models: dict[str, Path]) -> None:
    done = serve("--profile", "24gb-128ram", "--model", str(models["nvfp4"]), "--memory-max", "100G", "--dry-run")
    text = done.stdout.split("\ncommand:\n", 1)[1]
    assert "systemd-run" in text
    assert f"MemoryMax={100 * 2**30}" in text
    assert text.index("systemd-run") < text.index("sglang.launch_server")


def test_what_is_said_does_not_stand_behind_the_progress_line() -> None:
    """On a terminal, where the progress overwrites itself; elsewhere nothing is erased."""
    code = "from tools import serve; serve.progress(23, 'GET /health 503'); serve.say('healthy after 23 s')"
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=theirs, stderr=theirs, check=True, timeout=60)
        assert os.read(ours, 4096).endswith(b"503\r\x1b[Khealthy after 23 s\r\n")
    finally:
        os.close(ours)
        os.close(theirs)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"healthy after 23 s\n", b"")
