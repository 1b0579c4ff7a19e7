#!/usr/bin/env python3
"""Compare a PLE table on disk with the pinned one on a GPU: equal answers, decode and prefill speed, flat memory.

Each server answers twice, so that what differs between two runs of one server is known (the floor):

* greedy tokens of --new-tokens tokens, and two requests at once;
* teacher-forced logprobs of prompts of 1 to 3,000 tokens, chunk edges and end-of-text inside;
* a prompt whose cached prefix leaves exactly one token (and whether it equals the uncached answer, in both);
* memory of the process group before and after, GiB: anonymous, and file pages that it maps (the kernel may take those
  back); with --soak-s, mixed load for that long.

Then they are timed in --rounds rounds (tests/gpu/wave.py): in each, every server gives one sample of --decode-tokens
decode steps and one of a prompt of unique random text, alone, the others stopped. Servers of the same graphs sit on one
GPU and are compared within a round with the pinned one (median over the rounds, ends, and a bootstrap interval). A
"cold" cell reads a private flat copy of the table, made in --cold-tables; its pages are dropped before each sample,
and a sample before which more than 2 % of them are left is refused (tests/gpu/cold.py). The other disk cells are warm.
--profile N has the servers with full graphs trace N decode steps at the end (OUT/traces/CELL).

--mtp serves every cell with speculation (NEXTN, three drafts), for a checkpoint with a prediction head, such as that of
`tools/make_tiny_model.py DIR --preset mid --mtp-layers 1 --embedding-std 4`; its cells are pinned and nvme under each
kind of graphs. Verifying graphs are launched after the read, whatever the cell says. Accepted lengths are recorded, and
a cell that accepted no draft has shown nothing.

--repeatable removes what varies between two runs (tests/gpu/repeatable); equality is then judged by bits. Those servers
are slower, so run it once so, with --answers-only, and once without, with --timings-only.

OUT/CELL.json is written after every stage, and a second run of the same OUT does what is missing only. The server lines
and the verdict lines, JSON, come last, from what is on disk: also when --budget is spent, or at SIGTERM. The first
line compares the n-gram ids hashed on the host with the device's, --hash-rows of them.

Exit code: 0 every disk server answers as the pinned one, 1 one does not or a server failed, 3 incomplete.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit import exit_codes
from q4kit.bench import machine
from q4kit.errors import Q4Error, ServerError
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess, launch
from tests.gpu import bits, cold, records, timing
from tests.gpu.cells import GRAPH_ARGS
from tests.gpu.inputs import fingerprint
from tests.gpu.matrix import COMMON_ARGS, common_prefix, failure, generate, prompts, worst
from tests.gpu.timing import Method, unique
from tests.gpu.wave import Clock, Quiet, Seat, gpu_list, run

CHUNK = 2048


@dataclass(frozen=True)
class Cell:
    """One server: where the table is, under which graphs, read how."""

    table: str
    """"pinned" or "nvme"."""
    graph: str
    reader: str | None = None
    sync: str | None = None
    """"gate": the decode graph is launched after its rows are read; None: before (wait, the default) where it can."""
    cold: bool = False
    overlap: bool = True
    """Whether the scheduler prepares a batch while the one before it runs."""

    @property
    def name(self) -> str:
        """Its name, such as nvme-gate-cold-full-auto."""
        state = (None if self.overlap else "in-turn", "cold" if self.cold else None)
        parts = (self.table, self.sync, *state, self.graph, self.reader)
        return "-".join(part for part in parts if part)

    @property
    def base(self) -> Cell:
        """The pinned cell it is compared with: itself for a pinned one."""
        return Cell("pinned", self.graph)

    def __str__(self) -> str:
        return self.name


CELLS = (
    Cell("pinned", "full"),
    Cell("nvme", "full", "auto"),
    Cell("nvme", "full", "auto", sync="gate"),
    Cell("nvme", "full", "auto", cold=True),
    Cell("nvme", "full", "auto", sync="gate", cold=True),
    Cell("pinned", "breakable"),
    Cell("nvme", "breakable", "auto"),
    Cell("pinned", "eager"),
    Cell("nvme", "eager", "auto"),
    Cell("nvme", "full", "io_uring"),
    Cell("nvme", "full", "pread"),
    Cell("nvme", "full", "mmap"),
    Cell("nvme", "full", "io_uring", sync="gate"),
    Cell("nvme", "full", "pread", sync="gate"),
    Cell("nvme", "full", "mmap", sync="gate"),
    Cell("nvme", "full", "pread", cold=True),
    Cell("nvme", "full", "auto", overlap=False),
    Cell("nvme", "breakable", "pread"),
    Cell("nvme", "eager", "pread"),
)
MTP_CELLS = tuple(
    cell for cell in CELLS if cell.reader in (None, "auto") and cell.overlap and not cell.cold and not cell.sync
)
"""What --mtp serves where --only does not say."""
MTP_ARGS = (
    "--speculative-algorithm=NEXTN",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
)
RAW = ("scored", "scored_again", "greedy", "greedy_again", "pair", "one_left", "uncached", "full", "samples", "soak")
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


def ask(server: ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    """Return the answers of one healthy server."""
    eos = json.loads((args.model / "config.json").read_text())["text_config"]["eos_token_id"]
    result: dict[str, Any] = {"rss_gib_start": memory_gib(server.pid)}
    with Client(server.base_url, timeout_s=300) as client:
        texts = prompts(args.vocab)
        texts[7] = [token if index % 97 else eos for index, token in enumerate(texts[7])]
        for scored in ("scored", "scored_again"):
            client.flush_cache()
            result[scored] = [generate(client, ids, 4) for ids in texts]
        for greedy in ("greedy", "greedy_again"):
            client.flush_cache()
            answer = generate(client, unique(1, 300, args.vocab), args.new_tokens)
            result[greedy] = answer["ids"]
            if args.mtp:
                result.setdefault("accepted", []).append(answer["accepted"])
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


def take_sample(seat: Seat, args: argparse.Namespace, number: int, session: float, files: list[Path]) -> dict[str, Any]:
    """Return one turn of a server: a decode and a prefill sample, each from the state its cell is about.

    A cold sample that cannot be taken says why in "refused"; a figure before it is kept.
    """
    assert seat.server
    method = method_of(args, seat.cell.graph)
    sample: dict[str, Any] = {"session": session, "gpu": seat.gpu, "round": number, "at": time.time()}
    sample["method"] = method.to_json()
    with Client(seat.server.base_url, timeout_s=300) as client:

        def ready(what: str) -> bool:
            """Bring the table into the cell's state and note its resident share."""
            if seat.cell.cold:
                share: float | None = cold.drop(files)
                assert share is not None
                if refused := cold.refusal(seat.cell.name, f"{what} of round {number}", share):
                    sample["refused"] = refused
            else:
                share = machine.residency(files) if files else None
                if share is not None and share < 0.999:
                    share = machine.warm(files)
            sample[f"resident_before_{what}"] = share
            return "refused" not in sample

        if not ready("decode"):
            return sample
        sample["decode"] = timing.decode(client, timing.seed_of(number), method)
        sample["resident_after_decode"] = machine.residency(files) if files else None
        if method.prefill_tokens:
            # A chunk of another text first: the samples of all servers begin with a GPU that was just busy.
            timing.prefill(client, timing.seed_of(number, 1), Method(0, 0, CHUNK, method.vocab))
            if not ready("prefill"):
                return sample
            sample["prefill_tok_s"] = timing.prefill(client, timing.seed_of(number, 2), method)
            sample["resident_after_prefill"] = machine.residency(files) if files else None
    return sample


def method_of(args: argparse.Namespace, graph: str) -> Method:
    """Return what a turn asks under these graphs: a fifth of the steps without them."""
    tokens = args.decode_tokens // 5 if graph == "eager" else args.decode_tokens
    return Method(tokens, args.warmup_tokens, args.prefill_tokens, args.vocab)


def profile(server: ServerProcess, folder: Path, args: argparse.Namespace) -> list[str]:
    """Have the server trace --profile decode steps into `folder` (CPU and GPU activities); return the files' names."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"output_dir": str(folder.resolve()), "num_steps": args.profile, "activities": ["CPU", "GPU"]}
    body |= {"with_stack": False, "record_shapes": False}
    payload = {"input_ids": unique(5, 400, args.vocab)}
    payload["sampling_params"] = {**GREEDY, "max_new_tokens": args.profile + 60, "ignore_eos": True}
    url = f"{server.base_url}/start_profile"
    started = False
    with Client(server.base_url, timeout_s=300) as client:
        client.flush_cache()
        for event in client.stream_generate(payload):
            if not started and (event.completion_tokens or 0) >= 20:  # decode steps only
                started = True
                try:
                    requests.post(url, json=body, timeout=60).raise_for_status()
                except requests.RequestException as error:
                    raise ServerError(f"{url}: {error}", remedy="read the server's log") from error
    deadline, sizes = time.monotonic() + 60, None
    while time.monotonic() < deadline:
        found = {path.name: path.stat().st_size for path in folder.glob("*.gz")}
        if found and found == sizes:
            return sorted(found)
        sizes = found
        time.sleep(1)
    raise ServerError(f"no trace in {folder} after 60 s", remedy="read the server's log")


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


def verdict(
    pinned: dict[str, Any], disk: dict[str, Any], method: Method | None = None, repeatable: bool = False
) -> dict[str, Any]:
    """Return what the disk server shares with the pinned one under the same graphs (pure).

    "equal" is there where both have answered: by the floor between two runs of one server; if `repeatable`, by bits,
    by the answers to two requests at once, and by the prefix hit that leaves one token.
    """
    compared: dict[str, Any] = {}
    if "scored" in pinned and "scored" in disk:
        floor = max(worst(r["scored"], r["scored_again"])[0] for r in (pinned, disk))
        compared = {
            "greedy_tokens": len(disk["greedy"]),
            "greedy_common": common_prefix(pinned["greedy"], disk["greedy"]),
            "greedy_common_floor": [common_prefix(r["greedy"], r["greedy_again"]) for r in (pinned, disk)],
            "pair_equal": disk["pair"] == pinned["pair"],
            "max_abs_dlogprob": worst(pinned["scored"], disk["scored"])[0],
            "floor": floor,
            "one_left_common": common_prefix(pinned["one_left"], disk["one_left"]),
            "one_left_equals_uncached": [r["one_left"] == r["uncached"] for r in (pinned, disk)],
            "one_left_cached": disk["one_left_cached"],
            "rss_gib": [disk["rss_gib_start"], disk.get("rss_gib_end")],
        }
        if "accepted" in pinned and "accepted" in disk:
            compared["accept_length"] = [r["accepted"][0]["length"] for r in (pinned, disk)]
        if repeatable:
            found = bits.compare((pinned["scored"], pinned["scored_again"]), (disk["scored"], disk["scored_again"]))
            tokens = bits.greedy((pinned["greedy"], pinned["greedy_again"]), (disk["greedy"], disk["greedy_again"]))
            compared |= {"bits": found, "greedy_equal": tokens}
            same = compared["pair_equal"] and all(compared["one_left_equals_uncached"])
            compared["equal"] = found["compared"] > 0 and found["differ"] == 0 and tokens is not False and same
        else:
            compared["equal"] = compared["max_abs_dlogprob"] <= 2 * floor and (
                compared["greedy_common"] == len(disk["greedy"])
                or min(compared["greedy_common_floor"]) < len(disk["greedy"])
            )
    if method:
        compared |= timing.compare(pinned.get("samples", []), disk.get("samples", []), method)
    return compared


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the raw records and the logs")
    parser.add_argument("--model", type=Path, required=True, help="bf16 checkpoint (tiny or mid)")
    parser.add_argument("--patched", type=Path, required=True, help="folder with the patched sglang package")
    parser.add_argument("--table", type=Path, help="flat table folder (--ple-offload-dir); default: the checkpoint")
    parser.add_argument("--cold-tables", type=Path, help="folder for the private copies of cold cells (OUT/cold)")
    parser.add_argument("--only", nargs="*", help="cells like nvme-full-auto; a disk cell brings its pinned one")
    parser.add_argument("--vocab", type=int, default=500, help="token ids of random prompts are below this")
    parser.add_argument("--new-tokens", type=int, default=1000, help="greedy tokens that are compared")
    parser.add_argument("--rounds", type=int, default=5, help="turns of timing for each server")
    parser.add_argument("--decode-tokens", type=int, default=400, help="counted decode steps of one sample")
    parser.add_argument("--warmup-tokens", type=int, default=50, help="decode steps before them")
    parser.add_argument("--prefill-tokens", type=int, default=8 * CHUNK, help="tokens of one prefill sample; 0: none")
    parser.add_argument("--jobs", type=int, default=6, help="servers that boot at once; timing takes 2 at least")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--answers-only", action="store_true", help="no speeds, cold cells, traces or soak")
    what.add_argument("--timings-only", action="store_true", help="no answers")
    parser.add_argument("--mtp", action="store_true", help="speculate with the checkpoint's prediction head")
    parser.add_argument("--repeatable", action="store_true", help="servers repeat their bits: tests/gpu/repeatable")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds after which the run ends, with a verdict")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="decode steps to trace with full graphs")
    parser.add_argument("--gpus", type=gpu_list, default=[None], help="NVML indices, such as 0,1: spread over them")
    parser.add_argument("--quiet-lock", type=Path, help="lock file shared with other scripts that time on this machine")
    parser.add_argument("--soak-s", type=float, default=0, help="seconds of mixed load a disk server")
    parser.add_argument("--hash-rows", type=int, default=200_000)
    parser.add_argument("--boot-timeout", type=float, default=400)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--arg", action="append", default=[], help="one more server argument")
    args = parser.parse_args(argv)
    names = [cell.name for cell in CELLS]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"--only {' '.join(unknown)}: expected some of {' '.join(names)}")
    if args.rounds < 1 or args.decode_tokens < 10:
        parser.error(f"--rounds {args.rounds} --decode-tokens {args.decode_tokens}: expected at least 1 and 10")
    return args


def chosen(args: argparse.Namespace) -> list[Cell]:
    """Return the cells of the run, each pinned cell before its disk cells."""
    named = {cell for cell in CELLS if cell.name in args.only} if args.only else set(MTP_CELLS if args.mtp else CELLS)
    if args.answers_only:
        named = {cell for cell in named if not cell.cold}
    return [cell for cell in CELLS if cell in named or any(other.base == cell for other in named)]


def server_args(args: argparse.Namespace, cell: Cell, table: Path | None = None) -> list[str]:
    """Return the SGLang arguments of a cell; `table`: the flat table it reads instead of the checkpoint's."""
    graphs: Sequence[str] = GRAPH_ARGS[cell.graph] if args.device == "cuda" else ()
    common = COMMON_ARGS if args.device == "cuda" else CPU_ARGS
    flags = [*common, *(MTP_ARGS if args.mtp else ()), *args.arg, *graphs]
    if args.device == "cuda":  # the CPU platform keeps the table where it is, or reads it from the disk
        flags.append("--ple-offload-embedding")
    if args.device == "cuda" or cell.table != "pinned":
        flags.append(f"--ple-offload-backend={cell.table}")
    if cell.reader:
        flags.append(f"--ple-offload-reader={cell.reader}")
    if cell.sync:
        flags.append(f"--ple-offload-graph-sync={cell.sync}")
    if not cell.overlap:
        flags.append("--disable-overlap-schedule")
    if cell.table == "nvme" and table:
        flags.append(f"--ple-offload-dir={table}")
    return flags


CPU_ARGS = tuple(flag for flag in COMMON_ARGS if flag.split("=")[0] in (
    "--chunked-prefill-size", "--max-total-tokens", "--max-running-requests", "--json-model-override-args"
))  # fmt: skip
"""What a smoke test of this script without a GPU serves with."""


class Run:
    """The cells of one OUT: what is on disk of each, and what is to do."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cells = chosen(args)
        self.session = time.time()
        self.tables: dict[str, Path] = {}
        self.series = records.series(args.patched)
        shared = fingerprint([args.patched, args.model, *([bits.SHIM / "sitecustomize.py"] if args.repeatable else [])])
        self.inputs = {
            cell.name: fingerprint(
                [],
                [
                    shared,
                    str(args.new_tokens),
                    str(args.vocab),
                    str(args.repeatable),
                    str(args.table),
                    *server_args(args, cell),
                ],
            )
            for cell in self.cells
        }
        self.records = {cell.name: records.kept(self.path(cell), self.inputs[cell.name]) or {} for cell in self.cells}

    def path(self, cell: Cell) -> Path:
        """Return where the record of a cell lies."""
        return self.args.out / f"{cell.name}.json"

    def table(self, cell: Cell) -> Path | None:
        """Return the flat table of a cell, None where it reads the checkpoint."""
        return self.tables[cell.name] if cell.cold else self.args.table

    def files(self, cell: Cell) -> list[Path]:
        """Return the files that a cell reads rows from, none for a pinned one."""
        if cell.table == "pinned":
            return []
        table = self.table(cell)
        return cold.files_of(table) if table else sorted(self.args.model.glob("*.safetensors"))

    def rounds_left(self, cell: Cell) -> int:
        """Return how many rounds a cell lacks that its pinned one has too."""
        if self.args.answers_only:
            return 0
        mine, base = (self.records[each.name].get("samples", []) for each in (cell, cell.base))
        return max(0, self.args.rounds - len(timing.paired(base, mine, method_of(self.args, cell.graph))))

    def unasked(self, cell: Cell) -> bool:
        """Return whether a cell's answers are wanted and not there. A cold cell is another one's answers again."""
        return not self.args.timings_only and not cell.cold and "scored" not in self.records[cell.name]

    def waves(self) -> list[list[Seat]]:
        """Return what is to boot: with each disk cell that lacks rounds, its pinned one on the same GPU."""
        limit = max(self.args.jobs, 1 if self.args.answers_only else 2)
        waves: list[list[Cell]] = [[]]
        for cell in self.cells:
            left = self.rounds_left(cell)
            if not left and not self.unasked(cell) and not self.closing(cell):
                continue
            need = [each for each in ((cell.base, cell) if left else (cell,)) if each not in waves[-1]]
            need = list(dict.fromkeys(need))
            if waves[-1] and len(waves[-1]) + len(need) > limit:
                waves.append([])
                need = list(dict.fromkeys((cell.base, cell) if left else (cell,)))
            waves[-1] += need
        return [self.seated(wave) for wave in waves if wave]

    def closing(self, cell: Cell) -> bool:
        """Return whether a cell lacks a trace; a cold one would show the same steps."""
        wanted = bool(self.args.profile) and cell.graph == "full" and not cell.cold
        return wanted and "traces" not in self.records[cell.name]

    def seated(self, wave: list[Cell]) -> list[Seat]:
        """Return the seats of a wave: cells that are compared in time share a GPU."""
        gpus, graphs = self.args.gpus, list(dict.fromkeys(cell.graph for cell in wave))
        seats = []
        for number, cell in enumerate(wave):
            place = number if self.args.answers_only else graphs.index(cell.graph)
            record = records.without_error(self.records[cell.name])
            seats.append(Seat(cell, gpus[place % len(gpus)], record=record, asked=not self.unasked(cell)))
        return seats

    # --- the stages ---

    def boot(self, seat: Seat) -> None:
        """Start the server of a seat."""
        args, cell = self.args, seat.cell
        flags = server_args(args, cell, self.table(cell))
        seat.record |= {"kind": "server", "cell": cell.name, "args": flags, "repeatable": args.repeatable}
        seat.record["series"] = self.series
        log = args.out / f"{cell.name}.log"
        if cell.cold:  # rows that are resident now would be copied from the server's mapping, and mapped pages stay
            seat.record["resident_before_boot"] = cold.drop(self.files(cell))
        seat.server = launch(
            args.model,
            python=sys.executable,
            pythonpath=args.patched,
            log_path=log,
            extra_args=flags,
            env=seat.environment | (bits.environment(args.patched) if args.repeatable else {}),
            timeout_s=min(args.boot_timeout, self.clock.left_s),
            device=args.device,
        )
        if args.repeatable:
            seat.record["replaced"] = bits.replaced(log)
            if not seat.record["replaced"]:
                raise ServerError(f"{log}: no function was replaced", remedy="see tests/gpu/repeatable")

    def answer(self, seat: Seat) -> None:
        """Ask the server of a seat."""
        assert seat.server
        seat.record |= ask(seat.server, self.args)
        if self.args.repeatable:  # top-k is imported with the first long prompt
            seat.record["replaced"] = bits.replaced(seat.server.log_path)

    def turn(self, seat: Seat, number: int) -> None:
        """Time the server of a seat once."""
        sample = take_sample(seat, self.args, number, self.session, self.files(seat.cell))
        seat.record.setdefault("samples", []).append(sample)

    def close(self, seat: Seat) -> None:
        """Take the traces, run the soak and read the memory after all that."""
        assert seat.server
        if self.closing(seat.cell):
            try:
                seat.record["traces"] = profile(seat.server, self.args.out / "traces" / seat.cell.name, self.args)
            except ServerError as error:  # the timings stand without it
                seat.record["traces_error"] = str(error)
        if self.args.soak_s and seat.cell.table == "nvme":
            with Client(seat.server.base_url, timeout_s=300) as client:
                seat.record["soak"] = soak(seat.server, client, self.args)
        seat.record["rss_gib_end"] = memory_gib(seat.server.pid)

    def save(self, seat: Seat) -> None:
        """Keep what is known of a seat."""
        seat.record["inputs"] = self.inputs[seat.cell.name]
        self.records[seat.cell.name] = seat.record
        records.save(self.path(seat.cell), seat.record)

    def go(self, clock: Clock) -> None:
        """Do what is missing, as far as the clock lets it."""
        self.clock = clock
        waves = self.waves()
        names = [seat.cell.name for wave in waves for seat in wave if seat.cell.cold]
        if names:
            folder = self.args.cold_tables or self.args.out / "cold"
            self.tables = cold.make_copies(folder, sorted(set(names)), self.args.model, self.args.patched)
        for wave in waves:
            rounds = max(self.rounds_left(seat.cell) for seat in wave)
            for seat in wave:
                same = [other.cell for other in wave if other.cell.base == seat.cell.base]
                seat.rounds = max(map(self.rounds_left, same if seat.cell == seat.cell.base else [seat.cell]))
            run(
                wave, self.boot, self.answer, self.turn, rounds=rounds, close=self.close, save=self.save,
                quiet=Quiet(self.args.quiet_lock or self.args.out / "quiet.lock"), failed=failure, clock=clock,
            )  # fmt: skip

    # --- the outcome ---

    def report(self) -> tuple[list[dict[str, Any]], bool, list[str]]:
        """Return the lines to print, whether nothing speaks against the disk, and what is not known yet (pure)."""
        lines, good, unknown = [], True, []
        for cell in self.cells:
            record = self.records[cell.name]
            if not record:
                unknown.append(f"{cell.name}: not served")
                continue
            lines.append({k: v for k, v in record.items() if k not in (*RAW, "inputs")} | speeds(record))
            if "error" in record:
                good = False
                continue
            unknown += [f"{cell.name}: no answers"] if self.unasked(cell) else []
            if "accepted" in record and (why := unaccepted(record["accepted"])):
                unknown.append(f"{cell.name}: {why}")
            left = self.rounds_left(cell)
            unknown += [f"{cell.name}: {left} of {self.args.rounds} rounds missing"] if left else []
            if left:  # refusals that later rounds made up for are history
                unknown += [s["refused"] for s in record.get("samples", []) if "refused" in s]
            if cell.table == "pinned":
                continue
            method = None if self.args.answers_only else method_of(self.args, cell.graph)
            compared = verdict(self.records[cell.base.name], record, method, self.args.repeatable)
            if self.args.repeatable and compared.get("greedy_equal", True) is None:
                unknown.append(f"{cell.name}: greedy tokens are not repeated, so not compared")
            if compared:
                state = "cold" if cell.cold else "warm"
                lines.append({"kind": "verdict", "cell": cell.name, "state": state, **compared})
                good &= compared.get("equal", True)
        return lines, good, unknown


def unaccepted(accepted: Sequence[dict[str, Any]]) -> str | None:
    """Return why the answers of a speculating server show nothing about speculation, None where they do (pure)."""
    lengths = [each["length"] for each in accepted]
    if None in lengths:
        return "the server tells no accepted length: it did not speculate"
    return f"no draft was accepted: {lengths} tokens a verification" if min(lengths) <= 1 else None


def speeds(record: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of a record in short: medians over its rounds."""
    samples = [sample for sample in record.get("samples", []) if "decode" in sample]
    if not samples:
        return {}
    out: dict[str, Any] = {
        name: [round(sample["decode"][name], 1) for sample in samples] for name in ("step_us", "p50_us", "p95_us")
    }
    out["prefill_tok_s"] = [round(s["prefill_tok_s"], 1) for s in samples if "prefill_tok_s" in s]
    for name in ("resident_before_decode", "resident_before_prefill"):
        known = [sample[name] for sample in samples if sample.get(name) is not None]
        if known:
            out[name] = statistics.median(known)
    return out


def start_hash_check(args: argparse.Namespace) -> subprocess.Popen[str] | None:
    """Start the comparison of the host's n-gram ids with the device's, None where its result is on disk."""
    inputs = fingerprint([args.patched], [str(args.hash_rows)])
    if args.device != "cuda" or not args.hash_rows or records.kept(args.out / "hash.json", inputs):
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(args.patched), os.environ.get("PYTHONPATH", "")])}
    if args.gpus[0] is not None:
        environment["CUDA_VISIBLE_DEVICES"] = args.gpus[0]
    return subprocess.Popen(
        [sys.executable, "-c", HASH_CHECK, str(args.hash_rows)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_hash_check(args: argparse.Namespace, check: subprocess.Popen[str] | None) -> dict[str, Any]:
    """Return whether the host's n-gram ids equal the device's, plain and fused; empty where that is not known."""
    if check is not None:
        try:
            out, err = check.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            check.kill()
            check.communicate()
            return {}
        lines = out.strip().splitlines()
        if check.returncode or not lines:
            return {"kind": "hash", "error": err[-2000:]}
        record = json.loads(lines[-1]) | {"inputs": fingerprint([args.patched], [str(args.hash_rows)])}
        records.save(args.out / "hash.json", record)
    found: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((args.out / "hash.json").read_text())
    return {name: value for name, value in found.items() if name != "inputs"}


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every disk server answers as the pinned one, 1 when one does not or failed, 3 when incomplete."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.budget)
    check: subprocess.Popen[str] | None = None
    this: Run | None = None
    hashes: dict[str, Any] = {}
    try:
        with clock.armed():
            check = start_hash_check(args)
            this = Run(args)
            this.go(clock)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        clock.skipped.append(str(error))
    finally:
        hashes = end_hash_check(args, check)
        lines, good, unknown = this.report() if this else ([], True, ["nothing was begun"])
        for line in ([hashes] if hashes else []) + lines:
            print(json.dumps(line), flush=True)
    if hashes:
        good &= hashes.get("equal") == {"plain": True, "fused": True}
    elif args.hash_rows and args.device == "cuda":
        unknown.append("n-gram hashes: not compared")
    print("\n".join([*clock.skipped, *unknown]) or "complete", file=sys.stderr, flush=True)
    if not good:
        return exit_codes.NEGATIVE
    return exit_codes.INCONCLUSIVE if unknown or clock.skipped else exit_codes.HOLDS


if __name__ == "__main__":
    raise SystemExit(main())
