#!/usr/bin/env python3
"""Serve a random Qwen4-Exp checkpoint in every cell of tests/gpu/cells.py and compare the answers with the reference.

--jobs servers boot side by side (a boot is mostly imports and graph capture), spread over --gpus; then they are asked,
one a GPU at a time, and timed in --rounds rounds, one after the other, while the rest is stopped (SIGSTOP; the order is
reversed every second round). Decode speeds are compared with full-pinned within a round. With --quiet-lock, which
several such scripts can share on one machine, nobody boots or asks while another one times. OUT/cells/CELL.json is
written after every stage; a second run does what is missing for the same trees, checkpoint and arguments, and asks
other cells again (their old answers stay as CELL.json.old). The table goes to OUT/table.md and stdout, made of
what is on disk: also when --budget is spent, or at SIGTERM.

Per cell: teacher-forced logprobs of prompts of 1 to 3,000 tokens (chunk edges included), twice for the A/A floor; 200
greedy tokens; two requests at once; decode speed; PCIe bytes a decoded token (NVML counters, sampled). Last, where the
cell allows it, weights are updated (/update_weights_from_disk): to those of --other-model, a checkpoint of the same
shapes, and back; the prompts are scored after each. Its own weights may move them by twice the A/A floor.

Two of the pin's kernels add in a varying order (atomics in hc_mix up to 16 rows, the QSA top-k from 2,052 tokens on),
so the floor is not zero. --repeatable avoids both (tests/gpu/repeatable); with --answers-only, since those servers are
slower, it decides by bits: each cell, stock's that serve too, against the patched one of the same graphs that offloads
no layer, and that one of breakable graphs against that of full graphs (logprobs, 200 greedy tokens, two at once, and
the logprobs under the other weights); 200 tokens of each against the reference's; with --floor all logprobs against the
reference's, which is eager: by how much graphs differ from it is in the table.

Exit code: 0 every cell ended as declared, 1 one did not, 3 incomplete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit import exit_codes
from q4kit.errors import Q4Error, ServerError
from q4kit.gate.failures import last_error
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import HANG_MARK, ServerProcess, launch
from tests.gpu import bits, records, timing
from tests.gpu.cells import CELLS, Cell
from tests.gpu.inputs import fingerprint
from tests.gpu.timing import Method
from tests.gpu.wave import Clock, Quiet, Seat, gpu_list, run, seats

CHUNK = 2048
LENGTHS = (1, 2, 5, 63, 64, 65, 127, 700, CHUNK - 1, CHUNK, CHUNK + 1, 3000)
DECODE_TOKENS = 200
BASE = "full-pinned"
"""The cell whose decode speed the others are compared with, round by round."""
COMMON_ARGS = (
    "--attention-backend=triton",
    f"--chunked-prefill-size={CHUNK}",
    "--max-total-tokens=32768",
    "--max-running-requests=4",
    "--max-mamba-cache-size=32",
    "--cuda-graph-max-bs-decode=2",
    "--mem-fraction-static=0.9",
    '--json-model-override-args={"language_model_only": true}',
)


def prompts(vocab: int = 500) -> list[list[int]]:
    """Return one random prompt a length; fixed seed."""
    rng = random.Random(20261129)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in LENGTHS]


def generate(client: Client, ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Return output ids and the logprobs of prompt and output tokens; "accepted": what speculation made of its drafts,
    tokens a verification and how often 0, 1, 2, ... drafts were right (without speculation: None and no counts).
    """
    answer = client.generate(
        {
            "input_ids": ids,
            "sampling_params": {**GREEDY, "max_new_tokens": new_tokens},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )
    meta = answer["meta_info"]
    return {
        "prompt": [x[0] for x in meta["input_token_logprobs"]][1:],
        "output": [x[0] for x in meta["output_token_logprobs"]],
        "ids": answer["output_ids"],
        "cached": meta["cached_tokens"],
        "accepted": {
            "length": meta.get("spec_accept_length"),
            "right": list(meta.get("spec_correct_drafts_histogram") or ()),
        },
    }


class PcieMeter:
    """Mean host-to-device throughput while the `with` block runs, from NVML's counters (20 ms windows), in bytes/s."""

    def __init__(self, gpu: int = 0) -> None:
        self.gpu = gpu

    def __enter__(self) -> PcieMeter:
        self.samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(self.gpu)
            while not self._stop.is_set():
                kilobytes = pynvml.nvmlDeviceGetPcieThroughput(device, pynvml.NVML_PCIE_UTIL_RX_BYTES)
                self.samples.append(kilobytes * 1024)
        except Exception as error:  # the figure is then reported as missing, with the reason
            self.reason = repr(error)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        """Bytes a second, None when the counters are not readable."""
        return statistics.fmean(self.samples) if self.samples else None


def update_weights(server: ServerProcess, model: Path) -> dict[str, Any]:
    """Load `model` again into the running server; return the server's answer ("success", "message")."""
    url = f"{server.base_url}/update_weights_from_disk"
    try:
        answer = requests.post(url, json={"model_path": str(model)}, timeout=300)
        record = answer.json()
    except (requests.RequestException, ValueError) as error:
        raise ServerError(f"{url}: {error}", remedy="The update ended the server; read its log.") from error
    return {"success": bool(record.get("success")), "message": str(record.get("message", record))[:300]}


def ask(server: ServerProcess, reload: Path | None = None, other: Path | None = None) -> dict[str, Any]:
    """Return the answers of one healthy server; `reload`: its checkpoint, loaded again at the end, after `other`."""
    with Client(server.base_url, timeout_s=300) as client:
        result: dict[str, Any] = {"runs": []}
        for _ in range(2):  # the second run is the A/A floor
            client.flush_cache()
            result["runs"].append([generate(client, ids, 4) for ids in prompts()])
        client.flush_cache()
        for name in ("long", "long_again"):
            result[name] = generate(client, prompts()[7], DECODE_TOKENS)
            client.flush_cache()
        with ThreadPoolExecutor(2) as pool:
            pair = [pool.submit(generate, client, prompts()[i], 32) for i in (7, 8)]
            result["pair"] = [future.result() for future in pair]
        info = client.server_info()
        states = info.get("internal_states") or [{}]
        result["server"] = {k: v for k, v in states[0].items() if isinstance(v, int | float | str)}
        for name, checkpoint in (("other", other if reload else None), ("update", reload)):
            if checkpoint:
                result[name] = update_weights(server, checkpoint)
                client.flush_cache()
                result[name]["run"] = [generate(client, ids, 4) for ids in prompts()]
    return result


def take_sample(seat: Seat, number: int, session: float, method: Method) -> dict[str, Any]:
    """Return one turn of a server: decode speed, and the host-to-device traffic meanwhile."""
    assert seat.server
    sample: dict[str, Any] = {"session": session, "gpu": seat.gpu, "round": number, "at": time.time()}
    sample["method"] = method.to_json()
    with Client(seat.server.base_url, timeout_s=300) as client:
        if number == 0:  # a server's first request compiles kernels for seconds, in which nothing is copied
            timing.decode(client, timing.seed_of(number, 1), replace(method, decode_tokens=4, warmup_tokens=1))
        with PcieMeter(int(seat.gpu or 0)) as meter:
            sample["decode"] = timing.decode(client, timing.seed_of(number), method)
    sample["pcie_rx_bytes_s"], sample["pcie_samples"] = meter.mean, len(meter.samples)
    return sample


def speeds(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the rounds of a cell: decode_tok_s, ttft_s, pcie_rx_bytes_s where it was readable.

    A median of the traffic too: a counter window now and then reads more than the link carries.
    """
    rates = [(1e6 / sample["decode"]["step_us"], sample["decode"]["ttft_s"]) for sample in samples]
    result: dict[str, Any] = {
        "decode_tok_s": statistics.median(rate for rate, _ in rates),
        "ttft_s": statistics.median(ttft for _, ttft in rates),
        "decode_samples": rates,
    }
    traffic = [sample["pcie_rx_bytes_s"] for sample in samples if sample.get("pcie_rx_bytes_s") is not None]
    return result | ({"pcie_rx_bytes_s": statistics.median(traffic)} if traffic else {})


def update_fault(result: dict[str, Any]) -> str | None:
    """Return what is wrong after the weight updates of a cell that served, None where nothing is or none was made."""
    for name in ("other", "update"):
        if name in result and not result[name]["success"]:
            return f"weight update refused: {result[name]['message']}"
    floor = worst(*result["runs"])[0]
    if "other" in result and worst(result["runs"][0], result["other"]["run"])[0] <= 2 * floor:
        return "an update to other weights did not move the logprobs"
    if "update" in result and (moved := worst(result["runs"][0], result["update"]["run"])[0]) > 2 * floor:
        return f"logprobs moved by {moved:.3g} with an update to the same weights, by {floor:.3g} without"
    return None


def bits_fault(cell: Cell, result: dict[str, Any], twin: dict[str, Any]) -> str | None:
    """Return what is wrong, by bits, with a cell that served repeatably, None where nothing is."""
    found = bits.compare((twin["runs"][0], twin["runs"][1]), (result["runs"][0], result["runs"][1]))
    if found["differ"]:
        return f"{found['differ']} of {found['compared']} logprobs are not {cell.twin}'s bits, first {found['first']}"
    if not found["compared"]:
        return f"no logprob is repeated ({found['unrepeated']} are not), so none compared with {cell.twin}"
    tokens = bits.greedy(*((each["long"]["ids"], each["long_again"]["ids"]) for each in (twin, result)))
    if tokens is None:
        return f"greedy tokens are not repeated, by the cell or by {cell.twin}"
    if not tokens:
        return f"greedy tokens are not {cell.twin}'s"
    if [answer["ids"] for answer in result["pair"]] != [answer["ids"] for answer in twin["pair"]]:
        return f"two requests at once are not answered as by {cell.twin}"
    if "other" in result and "other" in twin:
        theirs, mine = twin["other"]["run"], result["other"]["run"]
        if differ := bits.compare((theirs, theirs), (mine, mine))["differ"]:
            return f"{differ} logprobs are not {cell.twin}'s bits after an update of both to other weights"
    return None


def worst(reference: list[dict[str, Any]], candidate: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Return (largest, mean absolute logprob difference over prompt tokens, prompts whose ids differ)."""
    differences: list[float] = []
    flips = 0
    for ref, cand in zip(reference, candidate, strict=True):
        if len(ref["prompt"]) != len(cand["prompt"]):
            raise SystemExit("misaligned answers: the prompts scored are not the same")
        differences += [abs(a - b) for a, b in zip(ref["prompt"], cand["prompt"], strict=True)]
        flips += ref["ids"] != cand["ids"]
    return max(differences), statistics.fmean(differences), flips


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many leading ids are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


COLUMNS = (
    "cell", "tree", "budget", "graph", "PLE", "outcome", "max abs dlogprob", "mean", "A/A max", "200 tokens equal",
    "pair equal", "bits unlike those of the same graphs resident", "decode tok/s", f"decode / {BASE} (min..max)",
    "PCIe MB/token", "RSS GiB", "after an update, max abs dlogprob", "bits unlike after an update to other weights",
)  # fmt: skip


def table(results: dict[str, dict[str, Any]], cells: tuple[Cell, ...]) -> str:
    """Return the markdown table of all cells that have an outcome; "-" is what is not known (of a cell)."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for cell in cells:
        result = results.get(cell.name)
        if result is None:
            continue
        head = f"| {cell.name} | {cell.tree} | {cell.budget} | {cell.graph} | {cell.ple} |"
        if "error" in result:
            lines.append(f"{head} {result['error']} |" + " |" * (len(COLUMNS) - 6))
        elif "runs" in result or "samples" in result:
            lines.append(f"{head} served | " + " | ".join(figures(cell, result, results)) + " |")
    return "\n".join(lines) + "\n"


def figures(cell: Cell, result: dict[str, Any], results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the figures of a cell that served, one a column after "outcome"."""
    reference, twin, base = (results.get(name, {}) for name in ("reference", cell.twin, BASE))
    row = ["-"] * 5
    if "runs" in result:
        floor = worst(result["runs"][0], result["runs"][1])[0]
        row[2] = f"{floor:.3g}"
    if "runs" in reference and "runs" in result:
        largest, mean, _ = worst(reference["runs"][0], result["runs"][0])
        same = common_prefix(reference["long"]["ids"], result["long"]["ids"])
        pair = all(r["ids"] == c["ids"] for r, c in zip(reference["pair"], result["pair"], strict=True))
        row = [f"{largest:.3g}", f"{mean:.3g}", f"{floor:.3g}", f"{same}/{DECODE_TOKENS}", str(pair)]
    if cell.twin == cell.name and "runs" in result:
        row.append("it is the measure")
    elif "runs" in twin and "runs" in result:
        found = bits.compare((twin["runs"][0], twin["runs"][1]), (result["runs"][0], result["runs"][1]))
        row.append(f"{found['differ']}/{found['compared']} ({found['unrepeated']} not repeated)")
    else:
        row.append("-")
    row.append(f"{result['decode_tok_s']:.1f}" if "decode_tok_s" in result else "-")
    methods = [sample["method"] for sample in result.get("samples", [])]
    ratio = {}
    if methods:
        method = Method(**methods[-1])
        ratio = timing.compare(base.get("samples", []), result["samples"], method).get("decode_ratio", {})
    row.append(f"{ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})" if ratio else "-")
    pcie = result.get("pcie_rx_bytes_s")
    row.append(f"{pcie / result['decode_tok_s'] / 1e6:.2f}" if pcie else "-")
    row.append(f"{result['rss_gib']:.1f}" if "rss_gib" in result else "-")
    update = result.get("update")
    row.append(f"{worst(result['runs'][0], update['run'])[0]:.3g}" if update else "-")
    if "other" in result and "other" in twin:
        mine, theirs = result["other"]["run"], twin["other"]["run"]
        found = bits.compare((theirs, theirs), (mine, mine))
        row.append(f"{found['differ']}/{found['compared']}")
    else:
        row.append("-")
    return row


def failure(seat: Seat, error: Q4Error) -> dict[str, Any]:
    """Return the record of a server that did not serve: the line that says why, and the end of the log."""
    text, mark, hang = str(error).partition(HANG_MARK)
    tail = seat.server.log_tail(60) if seat.server else ""
    return {"error": last_error(text).replace("|", "/"), "full": text[-6000:] + (mark + hang)[:20_000] + tail}


def group_rss_gib(group: int) -> float:
    """Return the summed resident memory of a process group, GiB."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**30


class Run:
    """The cells of one OUT: what is on disk of each, and what is to do."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        budgets = {"0": 0, "part": args.part_gb, "half": args.half_gb, "all": args.all_gb}
        self.offload = {(model, name): gb for model in ("tiny", "mid") for name, gb in budgets.items()}
        self.cells = tuple(
            cell for cell in CELLS if (not args.only or cell.name in args.only) and (args.stock or cell.tree != "stock")
        )
        self.session = time.time()
        self.method = Method(args.decode_tokens, args.warmup_tokens, 0, 500)
        trees = {self.tree(cell) for cell in self.cells}
        content = {path: fingerprint([Path(path)]) for path in trees}
        self.series = {path: records.series(path) for path in trees}
        other = [args.other_model] if args.other_model else []
        shared = fingerprint([args.model, *other, *([bits.SHIM / "sitecustomize.py"] if args.repeatable else [])])
        self.inputs = {
            cell.name: fingerprint([], [content[self.tree(cell)], shared, *self.server_args(cell)])
            for cell in self.cells
        }
        self.results = {cell.name: records.kept(self.path(cell), self.inputs[cell.name]) or {} for cell in self.cells}

    def path(self, cell: Cell) -> Path:
        """Return where the record of a cell lies."""
        return Path(self.args.out) / "cells" / f"{cell.name}.json"

    def tree(self, cell: Cell) -> str:
        """Return the folder of the package that serves a cell."""
        return str(self.args.stock if cell.tree == "stock" else self.args.patched)

    def server_args(self, cell: Cell) -> list[str]:
        """Return the SGLang arguments of a cell."""
        return [*COMMON_ARGS, *self.args.arg, *cell.server_args(self.offload)]

    def rounds_left(self, cell: Cell) -> int:
        """Return how many turns of timing a cell lacks."""
        if self.args.answers_only or cell.expect == "fails":
            return 0
        mine = self.results[cell.name].get("samples", [])
        return max(0, self.args.rounds - len(timing.paired(mine, mine, self.method)))

    def missing(self, cell: Cell) -> bool:
        """Return whether something of a cell is not on disk; what failed and was to, is."""
        result = self.results[cell.name]
        if "error" in result:
            return cell.expect != "fails"
        return self.unasked(cell) or self.rounds_left(cell) > 0

    def unasked(self, cell: Cell) -> bool:
        """Return whether a cell lacks the answers that this run is to get."""
        wanted = not self.args.timings_only or cell.expect == "fails"
        return wanted and "runs" not in self.results[cell.name]

    # --- the stages ---

    def boot(self, seat: Seat) -> None:
        """Start the server of a seat."""
        args, log = self.args, Path(self.args.out) / f"{seat.cell.name}.log"
        seat.record |= {"repeatable": args.repeatable, "series": self.series[self.tree(seat.cell)]}
        seat.server = launch(
            args.model,
            python=sys.executable,
            pythonpath=self.tree(seat.cell),
            log_path=log,
            extra_args=self.server_args(seat.cell),
            env=seat.environment | (bits.environment(self.tree(seat.cell)) if args.repeatable else {}),
            timeout_s=min(args.boot_timeout, self.clock.left_s),
            device="cuda",
        )
        if args.repeatable and not bits.replaced(log):
            raise ServerError(f"{log}: no function was replaced", remedy="see tests/gpu/repeatable")

    def answer(self, seat: Seat) -> None:
        """Ask the server of a seat."""
        assert seat.server
        reload = self.args.model if seat.cell.updates_weights else None
        seat.record |= ask(seat.server, reload, self.args.other_model)
        seat.record["rss_gib"] = group_rss_gib(seat.server.pid)
        if self.args.repeatable:
            seat.record["replaced"] = bits.replaced(seat.server.log_path)

    def turn(self, seat: Seat, number: int) -> None:
        """Time the server of a seat once."""
        seat.record.setdefault("samples", []).append(take_sample(seat, number, self.session, self.method))
        seat.record |= speeds(seat.record["samples"])

    def save(self, seat: Seat) -> None:
        """Keep what is known of a seat."""
        cell = seat.cell
        seat.record["inputs"] = self.inputs[cell.name]
        seat.record["cell"] = {"name": cell.name, "tree": cell.tree, "args": self.server_args(cell)}
        self.results[cell.name] = seat.record
        records.save(self.path(cell), seat.record)
        if "error" in seat.record:
            print(f"{cell.name}: {seat.record['error']}", file=sys.stderr, flush=True)

    def go(self, clock: Clock) -> None:
        """Do what is missing, as far as the clock lets it; each wave that is timed has the base cell in it."""
        self.clock = clock
        todo = [cell for cell in self.cells if self.missing(cell)]
        base = [cell for cell in self.cells if cell.name == BASE]
        while todo:
            wave = todo[: self.args.jobs]
            if base and base[0] not in wave and any(map(self.rounds_left, wave)):
                wave = [*base, *wave[: max(1, self.args.jobs - 1)]]
            todo = [cell for cell in todo if cell not in wave]
            taken = seats(wave, self.args.gpus)
            rounds = max(map(self.rounds_left, wave))
            for seat in taken:
                seat.record = records.without_error(self.results[seat.cell.name])
                seat.asked = not self.unasked(seat.cell)
                if seat.cell.name != BASE:
                    seat.rounds = self.rounds_left(seat.cell)
            run(
                taken, self.boot, self.answer, self.turn, rounds=rounds, save=self.save, failed=failure, clock=clock,
                quiet=Quiet(self.args.quiet_lock or self.args.out / "quiet.lock"),
            )  # fmt: skip

    # --- the outcome ---

    def judge(self) -> tuple[list[str], list[str]]:
        """Return what is wrong, and what is not known yet."""
        bad, unknown = [], []
        reference = self.results.get("reference", {})
        for cell in self.cells:
            result = self.results[cell.name]
            if "error" in result:
                if cell.expect != "fails":
                    bad.append(f"{cell.name}: {result['error']}")
                elif not re.search(cell.fails_with, result["error"]):
                    bad.append(f"{cell.name}: stock failed otherwise than with {cell.fails_with!r}: {result['error']}")
                continue
            if self.unasked(cell):
                unknown.append(f"{cell.name}: no answers")
                continue
            if cell.expect == "fails":
                bad.append(f"{cell.name}: stock was expected to fail and served")
            if left := self.rounds_left(cell):
                unknown.append(f"{cell.name}: {left} of {self.args.rounds} rounds missing")
            if "runs" not in result:
                continue
            if fault := update_fault(result):
                bad.append(f"{cell.name}: {fault}")
            if not self.args.repeatable or not cell.held_to_twin:
                continue
            twin = self.results.get(cell.twin, {})
            if "runs" not in twin:
                unknown.append(f"{cell.name}: {cell.twin} did not serve, so no bits compared")
            elif fault := bits_fault(cell, result, twin):
                bad.append(f"{cell.name}: {fault}")
            if "runs" not in reference:
                unknown.append(f"{cell.name}: no reference, so no tokens compared")
                continue
            if result["long"]["ids"] != reference["long"]["ids"]:
                same = common_prefix(reference["long"]["ids"], result["long"]["ids"])
                bad.append(f"{cell.name}: {same} of {DECODE_TOKENS} greedy tokens are the reference's")
            if self.args.floor is not None:
                moved = worst(reference["runs"][0], result["runs"][0])[0]
                if moved > self.args.floor:
                    bad.append(f"{cell.name}: {moved:.3g} from the reference, floor {self.args.floor:.3g}")
        return bad, unknown


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--other-model", type=Path, help="checkpoint of the same shapes: update to it, and back")
    parser.add_argument("--stock", help="folder with the stock sglang package (default: leave the stock cells out)")
    parser.add_argument("--patched", required=True, help="folder with the patched sglang package")
    parser.add_argument("--part-gb", type=int, default=1)
    parser.add_argument("--half-gb", type=int, required=True)
    parser.add_argument("--all-gb", type=int, default=1000)
    parser.add_argument("--only", nargs="*", help="names of cells")
    parser.add_argument("--jobs", type=int, default=6, help="servers that boot at once; timing takes 2 at least")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--answers-only", action="store_true", help="no decode speed and PCIe traffic")
    what.add_argument("--timings-only", action="store_true", help="nothing else")
    parser.add_argument("--rounds", type=int, default=5, help="turns of timing for each server")
    parser.add_argument("--decode-tokens", type=int, default=100, help="counted decode steps of one turn")
    parser.add_argument("--warmup-tokens", type=int, default=20, help="decode steps before them")
    parser.add_argument("--repeatable", action="store_true", help="servers repeat their bits: tests/gpu/repeatable")
    parser.add_argument("--floor", type=float, help="with --repeatable: largest dlogprob from the reference")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds after which the run ends, with a table")
    parser.add_argument("--gpus", type=gpu_list, default=[None], help="NVML indices, such as 0,1: spread over them")
    parser.add_argument("--quiet-lock", type=Path, help="lock file shared with other scripts that time on this machine")
    parser.add_argument("--boot-timeout", type=float, default=400)
    parser.add_argument("--arg", action="append", default=[], help="one more server argument for every cell")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only or ()) - {cell.name for cell in CELLS}):
        parser.error(f"--only {' '.join(unknown)}: no such cell, see tests/gpu/cells.py")
    return args


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every cell ended as declared."""
    args = parse(argv)
    (args.out / "cells").mkdir(parents=True, exist_ok=True)
    clock = Clock(args.budget)
    this: Run | None = None
    bad: list[str] = []
    unknown: list[str] = ["nothing was begun"]
    try:
        with clock.armed():
            this = Run(args)
            this.go(clock)
    finally:
        if this:
            text = table({name: result for name, result in this.results.items() if result}, this.cells)
            (args.out / "table.md").write_text(text)
            print(text, flush=True)
            bad, unknown = this.judge()
    unknown += clock.skipped
    print("\n".join(bad + unknown) or "every cell ended as declared", file=sys.stderr)
    if bad:
        return exit_codes.NEGATIVE
    return exit_codes.INCONCLUSIVE if unknown else exit_codes.HOLDS


if __name__ == "__main__":
    raise SystemExit(main())
