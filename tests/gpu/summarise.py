#!/usr/bin/env python3
"""Make the summary and the ratios of a run of tests/gpu/matrix.py: `summarise.py OUT/cells SUMMARY.json`.

Per cell: logprobs against the reference cell, the A/A floor, decode speed, bytes a token over PCIe, memory.
`summarise.py --steps OUT` prints the table of a run of tests/gpu/run_all.sh instead; `summarise.py --speeds NAME=OUT...
SUMMARY.json` makes the speeds of runs of tests/gpu/ple_nvme.py, each under its name, against their pinned cells;
`summarise.py --rates NAME=OUT/cells... SUMMARY.json` those of runs of matrix.py, against full-pinned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu import timing
from tests.gpu.cells import GRAPH_ARGS
from tests.gpu.matrix import BASE, common_prefix, worst
from tests.gpu.matrix import speeds as medians


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each cell and the ratios between them (pure)."""
    reference = cells["reference"]
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        figures: dict[str, Any] = {"tree": cell["cell"]["tree"], "args": cell["cell"]["args"]}
        if "error" in cell:
            figures["error"] = cell["error"]
        else:
            largest, mean, _ = worst(reference["runs"][0], cell["runs"][0])
            floor_largest, floor_mean, _ = worst(cell["runs"][0], cell["runs"][1])
            figures |= {
                "max_abs_dlogprob": largest,
                "mean_abs_dlogprob": mean,
                "aa_max": floor_largest,
                "aa_mean": floor_mean,
                "decode_tok_s": statistics.median(rate for rate, _ in cell["decode_samples"]),
                "decode_samples": cell["decode_samples"],
                "pcie_rx_bytes_s": cell.get("pcie_rx_bytes_s"),
                "rss_gib": cell["rss_gib"],
                "boot_s": cell["boot_s"],
                "long_equal_prefix": common_prefix(reference["long"]["ids"], cell["long"]["ids"]),
            }
            if update := cell.get("update"):
                figures["update_success"] = update["success"]
                figures["update_max_abs_dlogprob"] = worst(cell["runs"][0], update["run"])[0]
            if figures["pcie_rx_bytes_s"] is not None:
                figures["pcie_bytes_per_token"] = figures["pcie_rx_bytes_s"] / figures["decode_tok_s"]
        out[name] = figures
    base = out.get("full-pinned", {}).get("decode_tok_s")
    ratios = {
        f"{name}_over_full-pinned": figures["decode_tok_s"] / base
        for name, figures in out.items()
        if base and "decode_tok_s" in figures
    }
    return {"cells": out, "ratios": ratios}


def speeds(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each cell of a run of ple_nvme.py that was timed (pure).

    Medians over the rounds: step, us; prefill, tokens/s; and for a cell with a table on disk its ratios to the pinned
    cell with the same graphs and what it adds to a step, us, each formed within a round.
    """
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        samples = [sample for sample in cell.get("samples", []) if "decode" in sample]
        if not samples:
            continue
        figures: dict[str, Any] = {"step_us": statistics.median(sample["decode"]["step_us"] for sample in samples)}
        rates = [sample["prefill_tok_s"] for sample in samples if "prefill_tok_s" in sample]
        if rates:
            figures["prefill_tok_s"] = statistics.median(rates)
        base = f"pinned-{next(part for part in name.split('-') if part in GRAPH_ARGS)}"
        if name != base:
            method = timing.Method(**samples[-1]["method"])
            figures |= timing.compare(cells[base]["samples"], samples, method)
            figures["base"] = base
        out[name] = figures
    return out


def rates(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each cell of a run of matrix.py that was timed (pure); of one that failed its error.

    Medians over the rounds: decode, tokens/s; host-to-device traffic, MB a token; and the ratio to full-pinned, formed
    within a round ("base": None where no round has both).
    """
    base = [sample for sample in cells.get(BASE, {}).get("samples", []) if "decode" in sample]
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        samples = [sample for sample in cell.get("samples", []) if "decode" in sample]
        if "error" in cell or not samples:
            out |= {name: {"error": cell["error"]}} if "error" in cell else {}
            continue
        found = medians(samples)
        figures: dict[str, Any] = {"decode_tok_s": found["decode_tok_s"], "rounds": len(samples)}
        if "pcie_rx_bytes_s" in found:
            figures["pcie_mb_per_token"] = found["pcie_rx_bytes_s"] / found["decode_tok_s"] / 1e6
        if name != BASE:
            figures |= timing.compare(base, samples, timing.Method(**samples[-1]["method"])) or {"base": None}
        out[name] = figures
    return out


OUTCOMES = {0: "holds", 1: "FAILS", 2: "usage error", 3: "inconclusive", 4: "environment or server fault"}


def steps_table(records: list[dict[str, str]], output: dict[str, str]) -> tuple[str, int]:
    """Return the markdown table of a run_all.sh and its exit code (pure).

    Of each step, in order: `records` has its name, and its exit code and seconds or why it was skipped; `output` what
    it printed. The exit code is 0 when every step that ran holds, 1 when one does not, 4 when none could run.
    """
    lines = ["| step | outcome | checks that hold | seconds |", "| --- | --- | --- | --- |"]
    codes = []
    for record in records:
        if "skipped" in record:
            lines.append(f"| {record['name']} | skipped: {record['skipped']} | - | - |")
            continue
        code = int(record["rc"])
        codes.append(code)
        checks = [check["ok"] for check in json_lines(output.get(record["name"], "")) if "ok" in check]
        held = f"{sum(map(bool, checks))}/{len(checks)}" if checks else "-"
        outcome = OUTCOMES.get(code, f"exit {code}")
        lines.append(f"| {record['name']} | {outcome} | {held} | {record['seconds']} |")
    return "\n".join(lines) + "\n", (int(any(codes)) if codes else 4)


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines of `text`."""
    objects = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                objects.append(json.loads(line))
    return objects


def read_steps(out: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the records and the output of the steps in `out`, as `steps_table` takes them."""
    records = [
        dict(line.split("=", 1) for line in path.read_text().splitlines()) for path in sorted(out.glob("steps/*.step"))
    ]
    output = {path.stem: path.read_text(errors="replace") for path in out.glob("steps/*.out")}
    return records, output


def cells_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of the cells in `folder`, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Return 0 once the summary is written; with --steps the exit code of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--steps", type=Path, metavar="OUT", help="folder of a run of run_all.sh")
    kind.add_argument("--speeds", nargs="+", metavar="NAME=OUT", help="folders of runs of ple_nvme.py")
    kind.add_argument("--rates", nargs="+", metavar="NAME=CELLS", help="folders of timed cells of matrix.py")
    args = parser.parse_args(argv)
    if args.steps:
        text, code = steps_table(*read_steps(args.steps))
        print(text, end="")
        return code
    for option, given, figures in (("--speeds", args.speeds, speeds), ("--rates", args.rates, rates)):
        if given:
            *runs, out = given
            if not runs or any("=" not in run for run in runs):
                parser.error(f"give {option} NAME=OUT ... SUMMARY.json")
            folders = {name: Path(folder) for name, folder in (run.split("=", 1) for run in runs)}
            for folder in folders.values():
                if not any(folder.glob("*.json")):
                    parser.error(f"{folder} holds no record of a cell")
            write(Path(out), {name: figures(cells_of(folder)) for name, folder in folders.items()})
            return 0
    if args.out is None:
        parser.error("give OUT/cells and SUMMARY.json, or --steps OUT")
    write(args.out, summary(cells_of(args.cells)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
