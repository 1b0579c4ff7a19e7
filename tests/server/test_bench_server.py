"""The speed bench against the real server on the CPU platform. Speeds mean nothing here; counts and
refusals do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from q4kit.bench import machine
from q4kit.bench.accounting import Counting, Expectation, Refusal
from q4kit.bench.domains import fingerprint, questions
from q4kit.bench.prompts import exact_prompt
from q4kit.bench.runner import Api, BenchConfig, Ended, RunResult, one_request, run_contexts, run_domains
from q4kit.bench.texts import TextKind
from q4kit.ple.table import random_table
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench_speed.py"
TOKENS = 40
"""Of a rate that is judged: so many that a stall of a busy machine, and several at once after it, decides none."""


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *args], capture_output=True, text=True, timeout=500, check=False)


def test_counts_of_the_real_server_agree_with_its_ids(client: Client) -> None:
    config = BenchConfig((101, 421), (TextKind.WORDS,), tokens=8, repeats=1, warmup=False, resend=False)
    result = run_contexts(client, config, RunResult())
    assert result.ended is Ended.COMPLETE, result.fault
    assert [(p.context, p.kind.value) for p in result.points] == [(101, "words"), (421, "words")]
    for point in result.points:
        for repeat in point.repeats:
            sample = repeat.sample
            assert sample.refusals == (), sample.details
            assert sample.counting is Counting.SERVER_AND_IDS
            assert sample.prompt_tokens == point.context
            assert sample.completion_tokens == 8
            assert sample.cached_tokens == 0
            assert sum(size * count for size, count in sample.chunk_sizes.items()) == 8
            assert sample.decode_rate is not None
            assert sample.decode_s is not None
            assert sample.first_chunk_tokens is not None
            assert sample.decode_rate == pytest.approx((8 - sample.first_chunk_tokens) / sample.decode_s)


def test_real_prefix_cache_hit_is_refused(client: Client) -> None:
    """The same 421 tokens twice without a flush: the second prefill is not a prefill."""
    client.flush_cache()
    ids = exact_prompt(client.tokenize, TextKind.PROSE, "twice", 421).ids
    first = one_request(client, ids, 4, Expectation(421, 4))
    second = one_request(client, ids, 4, Expectation(421, 4))
    assert first.refusals == ()
    assert second.refusals == (Refusal.CACHED_PREFIX,)
    assert second.cached_tokens is not None
    assert second.cached_tokens >= 320
    assert second.prefill_rate is None


def test_deliberate_resend_is_cached(client: Client) -> None:
    config = BenchConfig((421,), tokens=4, repeats=1, warmup=False)
    point = run_contexts(client, config, RunResult()).points[0]
    assert point.resend is not None
    assert point.resend.cached_tokens is not None
    assert point.resend.cached_tokens >= 320
    assert point.repeats[0].sample.cached_tokens == 0


@pytest.mark.parametrize("api", list(Api))
def test_domains_by_both_routes_count_the_same_prompt(client: Client, api: Api) -> None:
    chosen = [q for q in questions(("maths",)) if q.index == 0]
    result = run_domains(client, chosen, 6, RunResult(), api=api)
    assert result.ended is Ended.COMPLETE, result.fault
    for answer, question in zip(result.answers, chosen, strict=True):
        rendered = client.tokenize_chat([{"role": "user", "content": question.text}])
        assert answer.sample.refusals == (), answer.sample.details
        assert answer.sample.prompt_tokens == len(rendered)
        assert answer.sample.completion_tokens == 6


def test_tool_writes_every_format_and_verify_reads_it_back(server: ServerProcess, tmp_path: Path) -> None:
    out = {k: tmp_path / f"b.{k}" for k in ("json", "md", "csv", "png")}
    done = bench(
        "run", "--base-url", server.base_url, "-c", "101", "-n", str(TOKENS), "-r", "5", "-q", "--no-warmup",
        "--json", str(out["json"]), "--md", str(out["md"]), "--csv", str(out["csv"]), "--plot", str(out["png"]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pp101" in done.stdout
    assert f"tg{TOKENS}@d101" in out["md"].read_text()
    assert out["csv"].read_text().splitlines()[1].startswith("pp101,filler,")
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    data = json.loads(out["json"].read_text())
    assert data["provenance"]["sglang"]["version"] == "0.5.23"
    assert len(data["points"][0]["samples"]) == 5
    assert str(tmp_path) not in out["json"].read_text()

    ledger = tmp_path / "claims.toml"
    ledger.write_text(
        "schema = 1\n"
        + claim("slow", value=1e-6)
        + claim("fast", value=1e6)
        + claim("other-gpu", value=10, gpu="NVIDIA RTX PRO 4000 Blackwell", flags=["--kv-cache-dtype=fp8_e4m3"])
        + claim("other-length", value=10, context=6821)
    )
    verdicts = {}
    for name in ("slow", "fast", "other-gpu", "other-length"):
        done = bench("verify", "--claim", name, "--ledger", str(ledger), "--result", str(out["json"]))
        verdicts[name] = (done.returncode, next(line for line in done.stdout.splitlines() if line.startswith("**")))
    assert verdicts["slow"][0] == 0
    assert "FASTER" in verdicts["slow"][1]
    assert verdicts["fast"][0] == 1
    assert "SLOWER" in verdicts["fast"][1]
    assert verdicts["other-gpu"] == (3, "** NOT COMPARABLE **  differs in gpu, --kv-cache-dtype")
    assert verdicts["other-length"] == (3, "** NOT COMPARABLE **  differs in samples")


def claim(name: str, *, value: float, context: int = 101, gpu: str = "", flags: list[str] | None = None) -> str:
    return (
        f'[[claim]]\nid = "{name}"\nowner = "theirs"\nstatement = "s"\nvalue = {value}\nunit = "tok/s"\n'
        f'metric = "tg"\nsource = "a test"\nbase = "v0.5.23"\ngpu = "{gpu}"\nflags = {json.dumps(flags or [])}\n'
        f'conditions = {{ context = {context}, tokens = {TOKENS}, text = "filler" }}\n'
    )


def test_claims_are_verified_on_the_running_server(server: ServerProcess, tmp_path: Path) -> None:
    """No stored result: the claim's own conditions are measured now, and what they gave is kept."""
    ledger, out = tmp_path / "claims.toml", tmp_path / "v.json"
    ledger.write_text("schema = 1\n" + claim("slow", value=1e-6) + claim("fast", value=1e6))
    for name, code, verdict in (("slow", 0, "FASTER"), ("fast", 1, "SLOWER")):
        done = bench(
            "verify", "--claim", name, "--ledger", str(ledger), "--base-url", server.base_url, "-r", "3", "-q",
            "--json", str(out),
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert f"** {verdict} **" in done.stdout
    data = json.loads(out.read_text())
    (point,) = data["measurement"]["points"]
    assert (point["context"], point["tokens"], len(point["samples"])) == (101, TOKENS, 3)
    assert data["measurement"]["provenance"]["sglang"]["version"] == "0.5.23"


def test_the_tool_measures_domains(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    done = bench(
        "run", "--base-url", server.base_url, "--domains", "maths", "code", "--domain-limit", "2",
        "--domain-tokens", "6", "-q", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 requests valid" in done.stdout
    data = json.loads(out.read_text())
    assert data["points"] == []
    assert [(a["domain"], a["index"]) for a in data["answers"]] == [(d, i) for d in ("maths", "code") for i in (0, 1)]
    assert {a["completion_tokens"] for a in data["answers"]} == {6}
    assert data["config"]["domain_prompts_sha256"] == fingerprint()


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_the_page_cache_of_a_table_is_made_and_recorded(server: ServerProcess, tmp_path: Path, state: str) -> None:
    table = random_table(tmp_path, 8 << 20)
    out = tmp_path / "p.json"
    done = bench(
        "run", "--base-url", server.base_url, "-c", "101", "-n", "4", "-r", "2", "-q", "--no-warmup",
        "--table", str(table), "--page-cache", state, "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    for sample in data["points"][0]["samples"]:
        resident = sample["machine_before"]["table_resident"]
        assert sample["page_cache"] == state
        assert resident <= machine.COLD_BELOW if state == "cold" else resident >= machine.WARM_ABOVE
        assert sample["disk_read_bytes"] is not None
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("pp101", "tg4@d101"))]
    assert [row[2] for row in rows] == [state, state]
    disks = data["provenance"]["machine"]["disks"]
    assert disks.keys() == {"checkpoint", "table"}
    assert all(disk["filesystem"] for disk in disks.values())
    series = data["provenance"]["series"]
    assert len(series["python_sha256"]) == 64
    assert series["of"] == "the server's code"


def test_context_beyond_the_server_is_refused_in_words(server: ServerProcess) -> None:
    done = bench("run", "--base-url", server.base_url, "-c", "200000", "-n", "4", "-r", "1", "-q")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "context 200000 + 4 tokens does not fit" in done.stderr
    assert "remedy:" in done.stderr


def test_no_server_is_exit_code_4() -> None:
    done = bench("run", "--base-url", "http://127.0.0.1:9", "-c", "101")
    assert done.returncode == 4
    assert "error: http://127.0.0.1:9/" in done.stderr


def interrupted_run(base_url: str, out: Path, act: Any) -> subprocess.CompletedProcess[str]:
    """Start a long run, call `act(process)` once a repeat is in, and return how it ended."""
    command = [sys.executable, str(TOOL), "run", "--base-url", base_url, "-c", "101", "-n", "8", "-r", "500",
               "--no-warmup", "--json", str(out)]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "repeat 1/500" in line, line
        time.sleep(0.3)
        act(process)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def test_ctrl_c_keeps_the_partial_result(server: ServerProcess, tmp_path: Path) -> None:
    done = interrupted_run(server.base_url, tmp_path / "p.json", lambda p: p.send_signal(signal.SIGINT))
    assert done.returncode == 130, done.stderr
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["partial"] is True
    assert data["ended"] == "interrupted"
    assert len(data["points"][0]["samples"]) >= 1


def test_server_killed_in_mid_run_keeps_the_partial_result(start_server: Any, tiny_model: Path, tmp_path: Path) -> None:
    with start_server(tiny_model, "--json-model-override-args", '{"language_model_only": true}') as victim:
        done = interrupted_run(victim.base_url, tmp_path / "k.json", lambda _: os.killpg(victim.pid, signal.SIGKILL))
    assert done.returncode == 4, done.stderr
    data = json.loads((tmp_path / "k.json").read_text())
    assert data["ended"] == "fault"
    assert data["fault"]
    assert data["points"][0]["samples"][0]["refusals"] == []
    assert "PARTIAL" in done.stdout
