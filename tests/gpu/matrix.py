#!/usr/bin/env python3
"""Serve a random Qwen4-Exp checkpoint in every cell of tests/gpu/cells.py and compare the answers with the reference.

--jobs servers boot side by side (a boot is mostly imports and graph capture), spread over --gpus; then they are asked,
one a GPU at a time, and timed one after the other, while the rest is stopped (SIGSTOP). With --quiet-lock, which
several such scripts can share on one machine, nobody boots or asks while another one times. Raw answers are kept in
OUT/cells/; a second run skips what is there for the same trees, checkpoint and arguments, and asks other cells again
(their old answers stay as CELL.json.old). The table goes to OUT/table.md and stdout.

Per cell: teacher-forced logprobs of prompts of 1 to 3,000 tokens (chunk edges included), twice for the A/A floor; 200
greedy tokens; two requests at once; decode speed; PCIe bytes a decoded token (NVML counters, sampled). Last, where the
cell allows it, the same checkpoint is loaded again (/update_weights_from_disk) and the prompts are scored once more:
they may move by twice the A/A floor. That shows that an update leaves nothing broken or freed, not that new weights are
used (tests/gpu/offload.py and tests/patches hold that).

Two of the pin's kernels add in a varying order (atomics in hc_mix up to 16 rows, the QSA top-k from 2,052 tokens on),
so the floor is not zero. --arg=--enable-deterministic-inference avoids both; with --answers-only, since its kernels are
slower, it decides equality by bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit.errors import Q4Error, ServerError
from q4kit.server.client import GREEDY, Client
from q4kit.server.launch import ServerProcess, launch
from tests.gpu.cells import CELLS, Cell
from tests.gpu.inputs import fingerprint
from tests.gpu.wave import Quiet, Seat, gpu_list, run, seats

CHUNK = 2048
LENGTHS = (1, 2, 5, 63, 64, 65, 127, 700, CHUNK - 1, CHUNK, CHUNK + 1, 3000)
DECODE_TOKENS = 200
RATE_TOKENS = 64
RATE_REPEATS = 3
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
    """Return output ids and the logprobs of prompt and output tokens."""
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


def decode_rate(client: Client, ids: list[int]) -> tuple[float, float]:
    """Return (tokens/s, seconds to the first token) of one streamed request, by the server's token counts."""
    client.flush_cache()
    events = []
    start = time.monotonic()
    payload = {"input_ids": ids, "sampling_params": {**GREEDY, "max_new_tokens": RATE_TOKENS}}
    for event in client.stream_generate(payload):
        if event.completion_tokens:
            events.append((event.t_monotonic, event.completion_tokens))
    (t0, n0), (t1, n1) = events[0], events[-1]
    return (n1 - n0) / (t1 - t0), t0 - start


def update_weights(server: ServerProcess, model: Path) -> dict[str, Any]:
    """Load `model` again into the running server; return the server's answer ("success", "message")."""
    url = f"{server.base_url}/update_weights_from_disk"
    try:
        answer = requests.post(url, json={"model_path": str(model)}, timeout=300)
        record = answer.json()
    except (requests.RequestException, ValueError) as error:
        raise ServerError(f"{url}: {error}", remedy="The update ended the server; read its log.") from error
    return {"success": bool(record.get("success")), "message": str(record.get("message", record))[:300]}


def ask(server: ServerProcess, reload: Path | None = None) -> dict[str, Any]:
    """Return the answers of one healthy server; `reload`: checkpoint to load again at the end."""
    with Client(server.base_url, timeout_s=300) as client:
        result: dict[str, Any] = {"runs": []}
        for _ in range(2):  # the second run is the A/A floor
            client.flush_cache()
            result["runs"].append([generate(client, ids, 4) for ids in prompts()])
        client.flush_cache()
        result["long"] = generate(client, prompts()[7], DECODE_TOKENS)
        client.flush_cache()
        with ThreadPoolExecutor(2) as pool:
            pair = [pool.submit(generate, client, prompts()[i], 32) for i in (7, 8)]
            result["pair"] = [future.result() for future in pair]
        info = client.server_info()
        states = info.get("internal_states") or [{}]
        result["server"] = {k: v for k, v in states[0].items() if isinstance(v, int | float | str)}
        if reload:
            result["update"] = update_weights(server, reload)
            client.flush_cache()
            result["update"]["run"] = [generate(client, ids, 4) for ids in prompts()]
    return result


def time_decode(server: ServerProcess, gpu: int) -> dict[str, Any]:
    """Return decode speed and host-to-device traffic of one healthy server on the GPU of this NVML index."""
    result: dict[str, Any] = {}
    with Client(server.base_url, timeout_s=300) as client:
        rates = []
        with PcieMeter(gpu) as meter:
            for seed in range(RATE_REPEATS):
                rng = random.Random(seed)
                rates.append(decode_rate(client, [rng.randrange(3, 500) for _ in range(421)]))
        result["decode_tok_s"] = statistics.median(rate for rate, _ in rates)
        result["ttft_s"] = statistics.median(ttft for _, ttft in rates)
        result["decode_samples"] = rates
        if meter.mean is not None:
            result["pcie_rx_bytes_s"] = meter.mean
            result["pcie_samples"] = len(meter.samples)
    return result


def update_fault(result: dict[str, Any]) -> str | None:
    """Return what is wrong after the weight update of a cell that served, None where nothing is or none was made."""
    update = result.get("update")
    if update is None:
        return None
    if not update["success"]:
        return f"weight update refused: {update['message']}"
    floor, moved = worst(*result["runs"])[0], worst(result["runs"][0], update["run"])[0]
    if moved > 2 * floor:
        return f"logprobs moved by {moved:.3g} with an update to the same weights, by {floor:.3g} without"
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


def table(results: dict[str, dict[str, Any]], cells: tuple[Cell, ...]) -> str:
    """Return the markdown table of all cells."""
    reference = results.get("reference", {})
    lines = [
        "| cell | tree | budget | graph | PLE | outcome | max abs dlogprob | mean | A/A max | 200 tokens equal "
        "| pair equal | decode tok/s | PCIe MB/token | RSS GiB | after an update, max abs dlogprob |",
        "| --- " * 15 + "|",
    ]
    for cell in cells:
        result = results.get(cell.name)
        if result is None:
            continue
        head = f"| {cell.name} | {cell.tree} | {cell.budget} | {cell.graph} | {cell.ple} |"
        if "error" in result:
            lines.append(f"{head} {result['error']} |" + " |" * 9)
            continue
        floor = worst(result["runs"][0], result["runs"][1])
        row = [head, " served |"]
        if reference.get("runs"):
            largest, mean, _ = worst(reference["runs"][0], result["runs"][0])
            same = common_prefix(reference["long"]["ids"], result["long"]["ids"])
            pair = all(r["ids"] == c["ids"] for r, c in zip(reference["pair"], result["pair"], strict=True))
            row.append(f" {largest:.3g} | {mean:.3g} | {floor[0]:.3g} | {same}/{DECODE_TOKENS} | {pair} |")
        else:
            row.append(f" - | - | {floor[0]:.3g} | - | - |")
        pcie = result.get("pcie_rx_bytes_s")
        per_token = f"{pcie / result['decode_tok_s'] / 1e6:.2f}" if pcie else "-"
        rate = f"{result['decode_tok_s']:.1f}" if "decode_tok_s" in result else "-"
        row.append(f" {rate} | {per_token} | {result['rss_gib']:.1f} |")
        update = result.get("update")
        row.append(f" {worst(result['runs'][0], update['run'])[0]:.3g} |" if update else " - |")
        lines.append("".join(row))
    return "\n".join(lines) + "\n"


def failure(seat: Seat, error: Q4Error) -> dict[str, Any]:
    """Return the record of a server that did not serve: the line that says why, and the end of the log."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if "Error" in line] or text.splitlines()
    tail = seat.server.log_tail(60) if seat.server else ""
    return {"error": lines[-1][:300].replace("|", "/"), "full": text[-6000:] + tail}


def group_rss_gib(group: int) -> float:
    """Return the summed resident memory of a process group, GiB."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**30


def kept(record: Path, inputs: str) -> dict[str, Any] | None:
    """Return the answers of a cell, None where there are none of these `inputs`; others are put aside."""
    if not record.exists():
        return None
    result: dict[str, Any] = json.loads(record.read_text())
    if result.get("cell", {}).get("inputs") == inputs:
        return result
    record.replace(record.with_name(f"{record.name}.old"))
    print(f"{record.stem}: measured with another tree, checkpoint or arguments: again", file=sys.stderr, flush=True)
    return None


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every cell ended as declared and no weight update to the same weights moved an answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--stock", help="folder with the stock sglang package (default: leave the stock cells out)")
    parser.add_argument("--patched", required=True, help="folder with the patched sglang package")
    parser.add_argument("--part-gb", type=int, default=1)
    parser.add_argument("--half-gb", type=int, required=True)
    parser.add_argument("--all-gb", type=int, default=1000)
    parser.add_argument("--only", nargs="*", help="names of cells")
    parser.add_argument("--jobs", type=int, default=6, help="servers that boot at once")
    parser.add_argument("--answers-only", action="store_true", help="no decode speed and PCIe traffic")
    parser.add_argument("--gpus", type=gpu_list, default=[None], help="NVML indices, such as 0,1: spread over them")
    parser.add_argument("--quiet-lock", type=Path, help="lock file shared with other scripts that time on this machine")
    parser.add_argument("--boot-timeout", type=float, default=400)
    parser.add_argument("--arg", action="append", default=[], help="one more server argument for every cell")
    args = parser.parse_args(argv)
    budgets = {"0": 0, "part": args.part_gb, "half": args.half_gb, "all": args.all_gb}
    offload = {(model, name): gb for model in ("tiny", "mid") for name, gb in budgets.items()}
    cells = tuple(c for c in CELLS if (not args.only or c.name in args.only) and (args.stock or c.tree != "stock"))
    (args.out / "cells").mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}

    def tree(cell: Cell) -> str:
        return str(args.stock if cell.tree == "stock" else args.patched)

    def server_args(cell: Cell) -> list[str]:
        return [*COMMON_ARGS, *args.arg, *cell.server_args(offload)]

    content = {path: fingerprint([Path(path)]) for path in {tree(cell) for cell in cells}}
    checkpoint = fingerprint([args.model])
    inputs = {cell.name: fingerprint([], [content[tree(cell)], checkpoint, *server_args(cell)]) for cell in cells}

    def boot(seat: Seat) -> None:
        seat.server = launch(
            args.model,
            python=sys.executable,
            pythonpath=tree(seat.cell),
            log_path=args.out / f"{seat.cell.name}.log",
            extra_args=server_args(seat.cell),
            env=seat.environment,
            timeout_s=args.boot_timeout,
            device="cuda",
        )

    def answer(seat: Seat) -> None:
        assert seat.server
        seat.record |= ask(seat.server, args.model if seat.cell.updates_weights else None)
        seat.record["rss_gib"] = group_rss_gib(seat.server.pid)

    def timed(seat: Seat) -> None:
        assert seat.server
        if not args.answers_only:
            seat.record |= time_decode(seat.server, int(seat.gpu or 0))

    def finish(cell: Cell, result: dict[str, Any]) -> None:
        result["cell"] = {"name": cell.name, "tree": cell.tree, "args": cell.server_args(offload)}
        result["cell"]["inputs"] = inputs[cell.name]
        (args.out / "cells" / f"{cell.name}.json").write_text(json.dumps(result))
        results[cell.name] = result
        print(f"{cell.name}: {result.get('error', 'served')}", file=sys.stderr, flush=True)

    todo = []
    for cell in cells:
        found = kept(args.out / "cells" / f"{cell.name}.json", inputs[cell.name])
        if found is None:
            todo.append(cell)
        else:
            results[cell.name] = found
    for first in range(0, len(todo), args.jobs):
        wave = seats(todo[first : first + args.jobs], args.gpus)
        run(wave, boot, answer, timed, quiet=Quiet(args.quiet_lock or args.out / "quiet.lock"), failed=failure)
        for seat in wave:
            finish(seat.cell, seat.record)
    text = table(results, cells)
    (args.out / "table.md").write_text(text)
    print(text)
    bad = []
    for cell in cells:
        result = results[cell.name]
        if cell.expect == "fails" and "error" not in result:
            bad.append(f"{cell.name}: stock was expected to fail and served")
        if cell.expect == "same" and "error" in result:
            bad.append(f"{cell.name}: {result['error']}")
        if "error" not in result and (fault := update_fault(result)):
            bad.append(f"{cell.name}: {fault}")
    print("\n".join(bad) or "every cell ended as declared", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
