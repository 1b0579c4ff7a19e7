#!/usr/bin/env python3
"""Mixed load on a server whose PLE table stays on disk, for minutes: is its memory flat, are its answers the same?

Load, in random order: prefill of unique random text, decode, two requests at once, and streams that the client breaks
off. Memory of every server process is sampled from smaps. Verdict: growth of the anonymous memory after the warm-up (a
third of the time), by least squares on block means with a 95 % interval; "flat" rules out more than --limit-mib over
the window, "grows" rules out less. The table's pages that stay mapped for longer than a minute must be below
--mapped-mib: the two readers look every 30 s and give back what is above 4 and 1 GiB; between two looks a fast prefill
maps more, all of it page cache already, and each reader maps it for itself. The answer to one prompt must be the same
before and after.

With --control, a second server whose table is in memory answers the same requests after the first one ended, and the
verdict is on what the first one gained more, request by request: what SGLang and its libraries keep under this load is
not the table's doing. --control-path takes another package for it, such as the unpatched one.

SIGTERM during the load ends it early: what was sampled until then is judged (`loaded_s` says how long that was), and no
control is started.

Serves with ``--device cuda`` (the flags of tests/gpu/matrix.py) or ``--device cpu`` (the reference platform; a minute
with the mini checkpoint is a real run of all of it). One JSON line, exit 0 flat, 1 grows or an answer or a request
failed, 3 inconclusive, 4 server fault.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import requests

from q4kit.errors import Q4Error
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess, launch
from tests.gpu import records
from tests.gpu.cells import GRAPH_ARGS, PLE_ARGS
from tests.gpu.matrix import COMMON_ARGS
from tests.gpu.memory_trend import Sample, files_of, group_memory, judge

EXIT = {"flat": 0, "grows": 1, "inconclusive": 3}
SAMPLE_S = 0.5
KINDS = ("prefill", "decode", "pair", "abort")
CPU_ARGS = (
    '--json-model-override-args={"language_model_only": true}',
    "--chunked-prefill-size=128",
    "--max-total-tokens=8192",
)
CPU_ENV = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""Switches off two caches, torch's and oneDNN's, of 1024 compiled kernels each. A bfloat16 product compiles one for
every number of rows that it has not seen, so that they gain hundreds of MiB under prompts of random lengths and would
hide a leak of that size."""


def unique(rng: random.Random, length: int, vocab: int) -> list[int]:
    """Return random tokens; nearly every n-gram of them is new to the server."""
    return [rng.randrange(3, vocab) for _ in range(length)]


def plan(seed: int, vocab: int, longest: int) -> tuple[str, list[list[int]], int]:
    """Return what request number `seed` is: its kind, its prompts, and how many tokens each asks for."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind == "prefill":
        return kind, [unique(rng, rng.randrange(longest // 2, longest + 1), vocab)], 1
    if kind == "decode":
        return kind, [unique(rng, rng.randrange(1, 20), vocab)], rng.randrange(24, 65)
    if kind == "pair":
        return kind, [unique(rng, rng.randrange(1, longest // 2), vocab) for _ in range(2)], 16
    return kind, [unique(rng, rng.randrange(1, longest // 4), vocab)], 64


def ask(client: Client, ids: list[int], new_tokens: int) -> list[int]:
    """Return the greedy tokens after a prompt."""
    answer = client.generate({"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": new_tokens}})
    tokens: list[int] = answer["output_ids"]
    if len(tokens) != new_tokens:
        raise ValueError(f"{len(tokens)} tokens, {new_tokens} were asked for")
    return tokens


def run_one(client: Client, number: int, vocab: int, longest: int) -> str:
    """Make request `number` and return its kind."""
    kind, prompts, new_tokens = plan(number, vocab, longest)
    if kind == "abort":
        payload = {"input_ids": prompts[0], "sampling_params": {**GREEDY, "max_new_tokens": new_tokens}}
        stream = client.stream_generate(payload)
        for _ in itertools.islice(stream, 1 + number % 5):
            pass
        stream.close()  # type: ignore[attr-defined]
        return kind
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(ask, client, ids, new_tokens) for ids in prompts]:
            future.result()
    return kind


class Sampler:
    """Samples the memory of a process group from a thread while the `with` block runs.

    `requests` is written beside each sample: set it to the number of requests that ended.
    """

    def __init__(self, read: Callable[[], dict[str, dict[str, float]]], interval_s: float) -> None:
        self._read, self._interval = read, interval_s
        self.requests = 0
        self.samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.samples.append(Sample(round(time.monotonic() - self._start, 2), self.requests, self._read()))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def table_counters(base_url: str) -> dict[str, float]:
    """Return the server's totals of rows read from storage; empty where it exports none."""
    with requests.Session() as session:
        session.trust_env = False  # no proxy of the shell between here and loopback
        answer = session.get(f"{base_url}/metrics", timeout=10)
    found = {}
    for line in answer.text.splitlines() if answer.ok else ():
        if line.startswith("sglang:ple_"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("sglang:ple_").removesuffix("_total")] = float(value)
    return found


@dataclass
class Run:
    """What one server did under the load; the answers are those to one prompt, twice before the load and after it."""

    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    before: list[int] | None = None
    again: list[int] | None = None
    after: list[int] | None = None
    told_to_end: bool = False
    loaded_s: float = 0.0
    table: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        # A server that does not repeat itself cannot be asked to.
        return not self.failed and (self.after == self.before or self.again != self.before)

    def to_json(self) -> dict[str, Any]:
        return {"requests": dict(self.done), "failed": self.failed, "answer_same": self.after == self.before,
                "answer_repeats": self.again == self.before}  # fmt: skip


@contextlib.contextmanager
def sigterm() -> Iterator[threading.Event]:
    """Set the event at SIGTERM and end nothing in the `with` block: unlike with `wave.Clock`, a request is answered."""
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def soak(server: ServerProcess, args: argparse.Namespace, requests_wanted: int | None = None) -> Run:
    """Run the load for --seconds, or for a number of requests, or until SIGTERM, and return what came of it."""
    run = Run()
    with Client(server.base_url, timeout_s=120) as client, sigterm() as told:
        probe = unique(random.Random(-1), args.longest // 2, args.vocab)
        client.flush_cache()
        run.before = ask(client, probe, 16)
        client.flush_cache()
        run.again = ask(client, probe, 16)
        table = files_of(args.table or args.model)
        with Sampler(lambda: group_memory(server.pid, table), SAMPLE_S) as sampler:
            start = time.monotonic()
            for number in itertools.count():
                run.loaded_s, run.told_to_end = time.monotonic() - start, told.is_set()
                over = run.loaded_s >= args.seconds if requests_wanted is None else number >= requests_wanted
                if over or run.told_to_end or len(run.failed) >= 5:
                    break
                try:
                    run.done[run_one(client, number, args.vocab, args.longest)] += 1
                except (Q4Error, ValueError) as error:
                    run.failed.append(f"request {number}: {error}"[:300])
                sampler.requests = number + 1
        run.samples = sampler.samples
        time.sleep(1)  # the aborts
        try:
            client.flush_cache()
            run.after = ask(client, probe, 16)
            run.table = table_counters(server.base_url)
        except (Q4Error, ValueError, requests.RequestException) as error:
            run.failed.append(f"after the load: {error}"[:300])
    return run


def record_of(run: Run, control: Run | None, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record with its verdict, and write the one with every sample to --raw."""
    record: dict[str, Any] = {
        "case": "ple_soak", "device": args.device, "graphs": args.graphs, "seconds": args.seconds,
        "loaded_s": round(run.loaded_s, 1), "series": records.series(args.patched), **run.to_json(), "table": run.table,
        "control": None,
    }  # fmt: skip
    if control:
        record["control"] = {**control.to_json(), "series": records.series(args.control_path or args.patched)}
    try:
        warm_up_s = min(args.seconds, run.loaded_s) / 3
        record |= judge(run.samples, warm_up_s, args.limit_mib, args.mapped_mib, control.samples if control else None)
    except ValueError as error:  # the load ended early: what went wrong is in `failed`
        record |= {"verdict": "inconclusive", "reason": str(error)}
    if args.raw:
        samples = {"samples": run.samples, "control_samples": control.samples if control else None}
        args.raw.write_text(json.dumps({**record, **samples}))
    record["ok"] = run.ok and (control is None or control.ok) and run.table.get("rows", 0) > 0
    return record


def flags_of(args: argparse.Namespace, control: bool = False) -> list[str]:
    """Return the flags of the server, or of its control, which keeps the table in memory."""
    if control:
        table = [*PLE_ARGS["pinned" if args.device == "cuda" else "resident"]]
    else:
        table = [*PLE_ARGS["nvme"], f"--ple-offload-reader={args.reader}"]
        if args.table:
            table.append(f"--ple-offload-dir={args.table}")
    rest = [*table, "--enable-metrics", *args.arg]
    if args.device == "cuda":
        return [*COMMON_ARGS, *GRAPH_ARGS[args.graphs], *rest]
    return [*CPU_ARGS, *rest]


def serve(args: argparse.Namespace, requests_wanted: int | None = None, *, control: bool = False) -> Run:
    """Boot a server or its control, load it and return what came of it."""
    with launch(
        args.model,
        python=sys.executable,
        pythonpath=(control and args.control_path) or args.patched,
        log_path=args.log.with_stem(f"{args.log.stem}_control") if control else args.log,
        extra_args=flags_of(args, control),
        env=CPU_ENV if args.device == "cpu" else None,
        timeout_s=400,
        device=args.device,
    ) as server:
        return soak(server, args, requests_wanted)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code of the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint (CPU: the mini preset)")
    parser.add_argument("--patched", type=Path, help="folder with the patched sglang package (default: as installed)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--graphs", choices=tuple(GRAPH_ARGS), default="full", help="CUDA graphs (cuda only)")
    parser.add_argument("--reader", default="auto", help="--ple-offload-reader")
    parser.add_argument("--table", type=Path, help="flat table folder (default: the checkpoint's own shards)")
    parser.add_argument("--vocab", type=int, default=500, help="token ids of random prompts are below this")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt (default: 3000, on a CPU 400)")
    parser.add_argument("--limit-mib", type=float, default=32, help="growth in the window that is still flat")
    parser.add_argument(
        "--mapped-mib", type=float, default=6144, help="most of the table kept mapped, and most of the rest"
    )
    parser.add_argument("--control", action="store_true", help="judge against a server with the table in memory")
    parser.add_argument("--control-path", type=Path, help="folder with the control's sglang package (with --control)")
    parser.add_argument("--log", type=Path, default=Path("ple_soak.log"), help="the server's log")
    parser.add_argument("--json", type=Path, help="write the record there too")
    parser.add_argument("--raw", type=Path, help="write the record with every sample there")
    parser.add_argument("--arg", action="append", default=[], help="one more server argument")
    args = parser.parse_args(argv)
    args.longest = args.longest or (3000 if args.device == "cuda" else 400)
    if args.seconds < 30:
        parser.error("--seconds: at least 30, or there are too few samples")
    if args.control_path and not args.control:
        parser.error("--control-path: needs --control")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("error: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
            print("remedy: run it on one, or on the reference platform with --device cpu", file=sys.stderr)
            return 4
    try:
        run = serve(args)
        record = record_of(run, None, args)  # --raw is there already if the control fails
        if args.control and not run.failed and not run.told_to_end:
            record = record_of(run, serve(args, run.done.total(), control=True), args)
    except Q4Error as error:
        print(f"error: {error}\nremedy: {error.remedy}", file=sys.stderr)
        return 4
    print(json.dumps(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return EXIT[record["verdict"]] if record["ok"] else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
