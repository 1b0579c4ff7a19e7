#!/usr/bin/env python3
"""Make the summary and the ratios of a run of tests/gpu/matrix.py: `summarise.py OUT/cells SUMMARY.json`.

Per cell: logprobs against the reference cell, the A/A floor, decode speed, bytes a token over PCIe, memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.matrix import common_prefix, worst


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


def main(argv: list[str] | None = None) -> int:
    """Return 0 once the summary is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    cells = {path.stem: json.loads(path.read_text()) for path in sorted(args.cells.glob("*.json"))}
    args.out.write_text(json.dumps(summary(cells), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
