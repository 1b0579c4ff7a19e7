#!/usr/bin/env python3
"""Short prompts and chunk edges with an fp8 KV cache: answered, finite, and as repeatable as with bf16.

One server a cell: bf16 and fp8_e4m3 on the triton attention backend, fp8_e4m3 on flashinfer where it can be imported.
Prompts of 1, 2 and 3 tokens and of one token below, at and above the prefill chunk, each uncached twice; a prompt whose
cached prefix is a whole chunk and leaves exactly one token; 16 greedy tokens after a prompt of one. A cell holds when
every answer has its tokens, every logprob is finite, the cache left that one token, and two runs differ by at most
--aa-limit nats. The distance to the bf16 cell is recorded and must stay below --distance-limit on average: an fp8 cache
is not exact, a broken one is far away.

The servers boot side by side and answer one after the other. One JSON line a cell, exit 1 if one does not hold, 4 for a
server fault. ``--device cpu`` runs it on the reference platform.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit.errors import Q4Error
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess, launch
from tests.gpu import records
from tests.gpu.cells import GRAPH_ARGS, PLE_ARGS
from tests.gpu.matrix import COMMON_ARGS, generate

CELLS = (("triton", "auto"), ("triton", "fp8_e4m3"), ("flashinfer", "fp8_e4m3"))
"""(attention backend, KV cache dtype); the first is what the others are compared with."""
NEW_TOKENS = 4
LONG_TOKENS = 16


def lengths(chunk: int) -> tuple[int, ...]:
    """Return the prompt lengths."""
    return (1, 2, 3, chunk - 1, chunk, chunk + 1)


def prompts(chunk: int, vocab: int = 500) -> list[list[int]]:
    """Return one random prompt a length; fixed seed."""
    rng = random.Random(8)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths(chunk)]


def scores(answers: list[dict[str, Any]]) -> list[float]:
    """Return every logprob of the answers, prompt and output, in order."""
    return [value for answer in answers for value in (*answer["prompt"], *answer["output"])]


def faults(answers: list[dict[str, Any]], sizes: tuple[int, ...], new_tokens: int) -> list[str]:
    """Return what is wrong with answers to prompts of `sizes` tokens, in words."""
    found = []
    for answer, size in zip(answers, sizes, strict=True):
        if len(answer["prompt"]) != size - 1:
            found.append(f"prompt of {size}: {len(answer['prompt'])} prompt logprobs, expected {size - 1}")
        if len(answer["output"]) != new_tokens or len(answer["ids"]) != new_tokens:
            have = f"{len(answer['ids'])} tokens with {len(answer['output'])} logprobs"
            found.append(f"prompt of {size}: {have}, expected {new_tokens}")
        if not all(math.isfinite(value) for value in scores([answer])):
            found.append(f"prompt of {size}: a logprob is not finite")
    return found


def apart(one: list[float], other: list[float]) -> dict[str, float]:
    """Return the largest and the mean absolute difference of two aligned score lists."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {"max": max(differences), "mean": statistics.fmean(differences)}


def comparable(answers: list[dict[str, Any]], base: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return aligned scores: all of the prompt, and of the output up to the first token that differs."""
    left: list[float] = []
    right: list[float] = []
    for a, b in zip(answers, base, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=True)) if x != y), len(a["ids"]))
        left += [*a["prompt"], *a["output"][:same]]
        right += [*b["prompt"], *b["output"][:same]]
    return left, right


def measure(server: ServerProcess, chunk: int) -> dict[str, Any]:
    """Return the answers of one server."""
    texts = prompts(chunk)
    result: dict[str, Any] = {"runs": []}
    with Client(server.base_url, timeout_s=300) as client:
        for _ in range(2):
            run = []
            for ids in texts:
                client.flush_cache()
                run.append(generate(client, ids, NEW_TOKENS))
            result["runs"].append(run)
        client.flush_cache()
        result["long"] = generate(client, texts[0], LONG_TOKENS)
        client.flush_cache()
        # A prefix is cached in whole pages and up to a recurrent state that was kept: the end of a chunk is both.
        generate(client, texts[5][:-1], 1)
        payload = {"input_ids": texts[5], "sampling_params": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS,
                   "ignore_eos": True}, "return_logprob": True}  # fmt: skip
        meta = client.generate(payload)["meta_info"]
        result["one_left"] = {"cached": meta["cached_tokens"], "output": [x[0] for x in meta["output_token_logprobs"]]}
        info = client.server_info()
        result["served"] = {name: info.get(name) for name in ("attention_backend", "kv_cache_dtype")}
    return result


def judge(
    record: dict[str, Any], base: dict[str, Any] | None, chunk: int, aa_limit: float, distance_limit: float
) -> dict[str, Any]:
    """Return the figures and the verdict of a cell; `base` is the bf16 cell."""
    found = [fault for run in record["runs"] for fault in faults(run, lengths(chunk), NEW_TOKENS)]
    found += faults([record["long"]], (1,), LONG_TOKENS)
    if not all(math.isfinite(value) for value in record["one_left"]["output"]):
        found.append("one token after a cached prefix: a logprob is not finite")
    if len(record["one_left"]["output"]) != NEW_TOKENS:
        found.append(f"one token after a cached prefix: {len(record['one_left']['output'])} tokens")
    out: dict[str, Any] = {"faults": found}
    out["one_left"] = record["one_left"]["cached"] == chunk
    if not found:
        out["aa"] = apart(*comparable(record["runs"][0], record["runs"][1]))
        out["repeats"] = out["aa"]["max"] <= aa_limit
    if not found and base is not None:
        out["distance"] = apart(*comparable(record["runs"][0], base["runs"][0]))
        out["near"] = out["distance"]["mean"] <= distance_limit
    return out | {"ok": not found and out["one_left"] and out["repeats"] and out.get("near", True)}


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every cell holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the raw records and the logs")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--patched", type=Path, help="folder with the sglang package (default: as installed)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--graphs", choices=tuple(GRAPH_ARGS), default="full", help="CUDA graphs (cuda only)")
    parser.add_argument("--chunk", type=int, help="--chunked-prefill-size (default: 2048, on a CPU 128)")
    parser.add_argument("--aa-limit", type=float, default=0.1, help="nats between two runs of one server")
    parser.add_argument("--distance-limit", type=float, default=0.1, help="mean nats to the bf16 cache")
    parser.add_argument("--json", type=Path, help="write the lines there too")
    parser.add_argument("--arg", action="append", default=[], help="one more server argument")
    args = parser.parse_args(argv)
    chunk = args.chunk or (2048 if args.device == "cuda" else 128)
    cells = [cell for cell in CELLS if args.device == "cuda" or cell[0] == "triton"]
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("error: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
            print("remedy: run it on one, or on the reference platform with --device cpu", file=sys.stderr)
            return 4
    args.out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("flashinfer") is None and ("flashinfer", "fp8_e4m3") in cells:
        cells.remove(("flashinfer", "fp8_e4m3"))
        print(json.dumps({"case": "flashinfer fp8_e4m3", "left_out": "flashinfer cannot be imported", "ok": True}))

    def boot(cell: tuple[str, str]) -> ServerProcess | Q4Error:
        backend, dtype = cell
        flags = [f"--kv-cache-dtype={dtype}", *args.arg]
        if args.device == "cuda":
            common = [flag for flag in COMMON_ARGS if not flag.startswith(("--attention-backend", "--chunked-prefill"))]
            flags += [*common, *GRAPH_ARGS[args.graphs], *PLE_ARGS["pinned"], f"--attention-backend={backend}"]
        else:
            flags.append('--json-model-override-args={"language_model_only": true}')
        try:
            return launch(
                args.model, python=sys.executable, pythonpath=args.patched,
                log_path=args.out / f"{backend}-{dtype}.log", extra_args=[*flags, f"--chunked-prefill-size={chunk}"],
                timeout_s=400, device=args.device,
            )  # fmt: skip
        except Q4Error as error:
            return error

    good, base, results = True, None, []
    series = records.series(args.patched)
    with ExitStack() as stack, ThreadPoolExecutor(len(cells) if args.device == "cuda" else 1) as pool:
        for cell, server in zip(cells, pool.map(boot, cells), strict=True):
            name = " ".join(cell)
            if isinstance(server, Q4Error):
                lines = [line.strip() for line in str(server).splitlines() if "Error" in line] or str(
                    server
                ).splitlines()
                result: dict[str, Any] = {"error": lines[-1][:300], "ok": False}
            else:
                stack.enter_context(server)
                try:
                    record = measure(server, chunk)
                except Q4Error as error:
                    result = {"error": str(error)[:300], "log": server.log_tail(20)[-2000:], "ok": False}
                else:
                    (args.out / f"{'-'.join(cell)}.json").write_text(json.dumps(record | {"series": series}))
                    result = {"served": record["served"], "one_left_cached": record["one_left"]["cached"]}
                    result |= judge(record, base, chunk, args.aa_limit, args.distance_limit)
                    if cell == CELLS[0]:
                        base = record
            good &= result["ok"]
            results.append({"case": name, "chunk": chunk, **result, "series": series})
            print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
