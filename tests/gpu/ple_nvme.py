#!/usr/bin/env python3
"""Compare a PLE table on disk with the pinned one on a GPU: equal answers, decode and prefill speed, flat memory.

One JSON line a server on stdout, and one "verdict" line a disk server that compares it with the pinned server under
the same graphs. Each server answers twice, so that what differs between two runs of one server is known (the floor):

* greedy tokens of --new-tokens tokens (a fifth of it without decode graphs), and two requests at once;
* teacher-forced logprobs of prompts of 1 to 3,000 tokens, chunk edges and end-of-text inside;
* a prompt whose cached prefix leaves exactly one token (and whether it equals the uncached answer, in both);
* decode: tokens/s and microseconds a step, warm, and cold (the table's pages dropped before every sample);
* prefill of unique random text at 2,048-token chunks, cold and warm;
* memory of the process group before and after, GiB: anonymous, and file pages that it maps (the kernel may take those
  back); with --soak-s, mixed load for that long.

--arg=--enable-deterministic-inference makes the answers repeatable (see tests/gpu/matrix.py) and slower:
run it once so, with --answers-only, to decide equality by bits, and once without for the speeds.

The first line compares the n-gram ids hashed on the host with the device's, --hash-rows of them.
--jobs servers boot side by side, spread over --gpus, are asked one a GPU at a time, and timed one after the other while
the rest is stopped (SIGSTOP; tests/gpu/wave.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess, launch
from tests.gpu.cells import GRAPH_ARGS
from tests.gpu.matrix import COMMON_ARGS, common_prefix, failure, generate, prompts, worst
from tests.gpu.wave import Quiet, Seat, gpu_list, run, seats

CHUNK = 2048
CELLS = (
    ("pinned", "full", None),
    ("nvme", "full", "auto"),
    ("nvme", "full", "io_uring"),
    ("nvme", "full", "pread"),
    ("pinned", "breakable", None),
    ("nvme", "breakable", "auto"),
    ("nvme", "full", "mmap"),
    ("pinned", "eager", None),
    ("nvme", "eager", "auto"),
    ("nvme-wait", "full", "auto"),
    ("nvme-wait", "full", "io_uring"),
    ("nvme-wait", "full", "pread"),
    ("nvme-wait", "full", "mmap"),
)
"""(table, graphs, reader); nvme launches a decode graph after the read, nvme-wait before it."""
RAW = ("scored", "scored_again", "greedy", "greedy_again", "pair", "one_left", "uncached", "full")
"""Fields kept in OUT/*.json only."""
HASH_CHECK = """
import json, sys, torch
from types import SimpleNamespace
from sglang.srt.models import qwen4_exp
from sglang.srt.models.qwen4_exp import Qwen4ExpNGramEmbedding as E
rows = int(sys.argv[1])
qwen4_exp.get_req_to_token_pool = lambda: SimpleNamespace(ple_window_cache=None)
module = E.__new__(E)
torch.nn.Module.__init__(module)
module.config, module.ngram_size, module.heads_per_ngram, module.ngram_heads = SimpleNamespace(seed=1234), 3, 8, 16
module.ple_layer_index, module.unigram_vocab_size, module.ngram_vocab_size_base = 0, 248320, 20_000_000
module.eos_token_id, module._host_hash_buffers = 248044, None
sizes, offsets, _ = module._build_head_vocab_and_offsets()
module.register_buffer("layer_multipliers", module._build_layer_multipliers(3).cuda())
module.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes).cuda())
module.register_buffer("ngram_heads_offsets", torch.tensor(offsets).cuda())
contexts = torch.randint(0, 248320, (rows, 3))
contexts[torch.rand(contexts.shape) < 0.1] = module.eos_token_id
host = module.hash_contexts_on_host(contexts)
equal = {}
for fused in (False, True):
    module.enable_ple_fusion = fused
    device = module._hash_contexts(contexts.cuda(), decode_sized=fused)
    equal["fused" if fused else "plain"] = bool(torch.equal(device.cpu(), host))
print(json.dumps({"kind": "hash", "rows": rows, "equal": equal}))
"""


def drop_table_pages(files: list[Path]) -> None:
    """Drop the table's files from the page cache; pages that a process maps stay, so the mmap reader is never cold."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def unique(seed: int, length: int, vocab: int) -> list[int]:
    """Return random tokens: nearly every n-gram of them is new to the server."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def decode_sample(client: Client, seed: int, vocab: int, new_tokens: int) -> float:
    """Return microseconds a decode step of one streamed request, by the server's token counts."""
    events = []
    payload = {
        "input_ids": unique(seed, 400, vocab),
        "sampling_params": {**GREEDY, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    for event in client.stream_generate(payload):
        if event.completion_tokens:
            events.append((event.t_monotonic, event.completion_tokens))
    (t0, n0), (t1, n1) = events[0], events[-1]
    return (t1 - t0) / (n1 - n0) * 1e6


def prefill_sample(client: Client, seed: int, length: int, vocab: int) -> float:
    """Return prompt tokens a second of one unique prompt, to its first token."""
    client.flush_cache()
    start = time.monotonic()
    payload = {"input_ids": unique(seed, length, vocab), "sampling_params": {**GREEDY, "max_new_tokens": 1}}
    client.generate(payload)
    return length / (time.monotonic() - start)


def memory_gib(group: int) -> dict[str, float]:
    """Return the anonymous and the mapped file memory of a process group, GiB, and how many processes it has."""
    total = {"RssAnon": 0.0, "RssFile": 0.0, "RssShmem": 0.0}
    processes = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[2]) != group:
                continue
            processes += 1
            for line in (entry / "status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in total:
                    total[name] += int(value.split()[0]) / 2**20
    return {name: round(value, 2) for name, value in total.items()} | {"processes": processes}


def ask(server: ServerProcess, args: argparse.Namespace, graph: str) -> dict[str, Any]:
    """Return the answers of one healthy server."""
    eos = json.loads((args.model / "config.json").read_text())["text_config"]["eos_token_id"]
    result: dict[str, Any] = {"rss_gib_start": memory_gib(server.pid)}
    new_tokens = args.new_tokens // 5 if graph == "eager" else args.new_tokens
    with Client(server.base_url, timeout_s=300) as client:
        texts = prompts(args.vocab)
        texts[7] = [token if index % 97 else eos for index, token in enumerate(texts[7])]
        for scored in ("scored", "scored_again"):
            client.flush_cache()
            result[scored] = [generate(client, ids, 4) for ids in texts]
        for greedy in ("greedy", "greedy_again"):
            client.flush_cache()
            result[greedy] = generate(client, unique(1, 300, args.vocab), new_tokens)["ids"]
        client.flush_cache()
        with ThreadPoolExecutor(2) as pool:
            pair = [pool.submit(generate, client, unique(seed, n, args.vocab), 64) for seed, n in ((2, 700), (3, 90))]
            result["pair"] = [future.result()["ids"] for future in pair]
        prompt = unique(4, CHUNK + 1, args.vocab)
        short = {"sampling_params": {**GREEDY, "max_new_tokens": 32, "ignore_eos": True}}
        client.flush_cache()
        result["uncached"] = client.generate({**short, "input_ids": prompt})["output_ids"]
        client.flush_cache()
        client.generate({**short, "input_ids": prompt[:-1]})
        hit = client.generate({**short, "input_ids": prompt})
        result["one_left"] = hit["output_ids"]
        result["one_left_cached"] = hit["meta_info"]["cached_tokens"]
    return result


def time_speeds(server: ServerProcess, args: argparse.Namespace, files: list[Path], graph: str) -> dict[str, Any]:
    """Return the speeds of one healthy server, warm and cold, and its memory after them."""
    result: dict[str, Any] = {}
    decode_tokens = args.decode_tokens // 5 if graph == "eager" else args.decode_tokens
    with Client(server.base_url, timeout_s=300) as client:
        for state in ("warm", "cold"):
            steps, rates = [], []
            for sample in range(args.samples):
                if state == "cold":
                    drop_table_pages(files)
                # The same texts in both states and in every server; warm has read each once before.
                if state == "warm":
                    decode_sample(client, 100 + sample, args.vocab, decode_tokens)
                    client.flush_cache()
                steps.append(decode_sample(client, 100 + sample, args.vocab, decode_tokens))
                if state == "warm":
                    prefill_sample(client, 200 + sample, args.prefill_tokens, args.vocab)
                else:
                    drop_table_pages(files)
                rates.append(prefill_sample(client, 200 + sample, args.prefill_tokens, args.vocab))
            result[f"step_us_{state}"], result[f"prefill_tok_s_{state}"] = steps, rates
        if args.soak_s:
            result["soak"] = soak(server, client, args)
    result["rss_gib_end"] = memory_gib(server.pid)
    return result


def soak(server: ServerProcess, client: Client, args: argparse.Namespace) -> list[tuple[float, dict[str, float]]]:
    """Run mixed load for --soak-s; return (seconds, memory of the server) samples."""
    samples, start, seed = [], time.monotonic(), 1000
    while (elapsed := time.monotonic() - start) < args.soak_s:
        samples.append((round(elapsed, 1), memory_gib(server.pid)))
        with ThreadPoolExecutor(2) as pool:
            lengths = (random.Random(seed).randrange(1, 3000), random.Random(seed + 1).randrange(1, 300))
            for future in [
                pool.submit(generate, client, unique(seed + i, n, args.vocab), 64) for i, n in enumerate(lengths)
            ]:
                future.result()
        seed += 2
    return samples


def verdict(pinned: dict[str, Any], disk: dict[str, Any]) -> dict[str, Any]:
    """Return what the disk server shares with the pinned one under the same graphs."""

    def median(result: dict[str, Any], name: str) -> float:
        return statistics.median(result[name])

    def apart(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
        return worst(one, other)[0]

    floor = max(apart(result["scored"], result["scored_again"]) for result in (pinned, disk))
    compared: dict[str, Any] = {
        "greedy_tokens": len(disk["greedy"]),
        "greedy_common": common_prefix(pinned["greedy"], disk["greedy"]),
        "greedy_common_floor": [common_prefix(r["greedy"], r["greedy_again"]) for r in (pinned, disk)],
        "pair_equal": disk["pair"] == pinned["pair"],
        "max_abs_dlogprob": apart(pinned["scored"], disk["scored"]),
        "floor": floor,
        "one_left_common": common_prefix(pinned["one_left"], disk["one_left"]),
        "one_left_equals_uncached": [r["one_left"] == r["uncached"] for r in (pinned, disk)],
        "one_left_cached": disk["one_left_cached"],
        "rss_gib": [disk["rss_gib_start"], disk.get("rss_gib_end")],
    }
    compared["equal"] = compared["max_abs_dlogprob"] <= 2 * floor and (
        compared["greedy_common"] == len(disk["greedy"]) or min(compared["greedy_common_floor"]) < len(disk["greedy"])
    )
    for state in ("warm", "cold") if "step_us_warm" in disk else ():
        step, base = median(disk, f"step_us_{state}"), median(pinned, f"step_us_{state}")
        rate, rate_base = median(disk, f"prefill_tok_s_{state}"), median(pinned, f"prefill_tok_s_{state}")
        compared |= {
            f"decode_ratio_{state}": base / step,
            f"added_us_per_step_{state}": step - base,
            f"prefill_ratio_{state}": rate / rate_base,
        }
    return compared


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the raw records and the logs")
    parser.add_argument("--model", type=Path, required=True, help="bf16 checkpoint (tiny or mid)")
    parser.add_argument("--patched", type=Path, required=True, help="folder with the patched sglang package")
    parser.add_argument("--table", type=Path, help="flat table folder (--ple-offload-dir); default: the checkpoint")
    parser.add_argument("--only", nargs="*", help="cells like nvme-full-auto")
    parser.add_argument("--vocab", type=int, default=500, help="token ids of random prompts are below this")
    parser.add_argument("--new-tokens", type=int, default=1000, help="greedy tokens that are compared")
    parser.add_argument("--decode-tokens", type=int, default=200, help="tokens of one decode sample")
    parser.add_argument("--prefill-tokens", type=int, default=8 * CHUNK, help="tokens of one prefill sample")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=6, help="servers that boot at once")
    parser.add_argument("--answers-only", action="store_true", help="no speeds, cold reads or soak")
    parser.add_argument("--gpus", type=gpu_list, default=[None], help="NVML indices, such as 0,1: spread over them")
    parser.add_argument("--quiet-lock", type=Path, help="lock file shared with other scripts that time on this machine")
    parser.add_argument("--soak-s", type=float, default=0, help="seconds of mixed load a disk server")
    parser.add_argument("--hash-rows", type=int, default=200_000)
    parser.add_argument("--boot-timeout", type=float, default=400)
    parser.add_argument("--arg", action="append", default=[], help="one more server argument")
    return parser.parse_args(argv)


def name_of(cell: tuple[str, str, str | None]) -> str:
    """Return the name of a cell, such as nvme-full-auto."""
    return "-".join(part for part in cell if part)


def server_args(args: argparse.Namespace, cell: tuple[str, str, str | None]) -> list[str]:
    """Return the SGLang arguments of a cell."""
    ple, graph, reader = cell
    ple, _, sync = ple.partition("-")
    flags = [*COMMON_ARGS, *args.arg, *GRAPH_ARGS[graph], "--ple-offload-embedding", f"--ple-offload-backend={ple}"]
    if reader:
        flags.append(f"--ple-offload-reader={reader}")
    if sync:
        flags.append(f"--ple-offload-graph-sync={sync}")
    if ple == "nvme" and args.table:
        flags.append(f"--ple-offload-dir={args.table}")
    return flags


def run_wave(args: argparse.Namespace, cells: list[tuple[str, str, str | None]]) -> list[dict[str, Any]]:
    """Boot the cells of a wave side by side, ask and time them, return their records."""
    files = sorted((args.table or args.model).rglob("*.bin" if args.table else "*.safetensors"))

    def boot(seat: Seat) -> None:
        flags = server_args(args, seat.cell)
        seat.record = {"kind": "server", "cell": name_of(seat.cell), "args": flags}
        seat.server = launch(
            args.model,
            python=sys.executable,
            pythonpath=args.patched,
            log_path=args.out / f"{name_of(seat.cell)}.log",
            extra_args=flags,
            env=seat.environment,
            timeout_s=args.boot_timeout,
            device="cuda",
        )

    def answer(seat: Seat) -> None:
        assert seat.server
        seat.record |= ask(seat.server, args, seat.cell[1])

    def timed(seat: Seat) -> None:
        assert seat.server
        if not args.answers_only:
            seat.record |= time_speeds(seat.server, args, files, seat.cell[1])

    wave = seats(cells, args.gpus)
    run(wave, boot, answer, timed, quiet=Quiet(args.quiet_lock or args.out / "quiet.lock"), failed=failure)
    return [seat.record for seat in wave]


def check_hashes(args: argparse.Namespace) -> dict[str, Any]:
    """Return whether the host's n-gram ids equal the device's, plain and fused."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(args.patched), os.environ.get("PYTHONPATH", "")])}
    check = subprocess.run(
        [sys.executable, "-c", HASH_CHECK, str(args.hash_rows)], env=environment, capture_output=True, text=True
    )
    lines = check.stdout.strip().splitlines()
    if check.returncode or not lines:
        return {"kind": "hash", "error": check.stderr[-2000:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every disk server answers as the pinned one and no cell failed."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    hashes = check_hashes(args)
    print(json.dumps(hashes), flush=True)
    good = hashes.get("equal") == {"plain": True, "fused": True}
    cells = [cell for cell in CELLS if not args.only or name_of(cell) in args.only]
    pinned: dict[str, dict[str, Any]] = {}
    for first in range(0, len(cells), args.jobs):
        wave = cells[first : first + args.jobs]
        for (ple, graph, _), record in zip(wave, run_wave(args, wave), strict=True):
            (args.out / f"{record['cell']}.json").write_text(json.dumps(record))
            print(json.dumps({k: v for k, v in record.items() if k not in RAW}), flush=True)
            if "error" in record:
                good = False
            elif ple == "pinned":
                pinned[graph] = record
            elif graph in pinned:
                compared = verdict(pinned[graph], record)
                print(json.dumps({"kind": "verdict", "cell": record["cell"], **compared}), flush=True)
                good &= compared["equal"]
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
