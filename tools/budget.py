#!/usr/bin/env python3
"""GPU memory and host RAM of a configuration, part by part, before anything is started.

Exit codes: 0 computed (and fits, where --vram or --ram is given), 1 does not fit, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.report import Report, Table, dump_json
from q4kit.serving import budget
from q4kit.serving.budget import FORMATS, GIB, KV_BYTES, Settings
from q4kit.serving.shape import PUBLISHED, load


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=PUBLISHED, help="checkpoint, config.json, or a file of data/models/")
    p.add_argument("--context", type=int, default=32768, help="prompt plus answer, tokens (32768)")
    p.add_argument("--max-requests", type=int, default=2, help="requests at a time (2)")
    p.add_argument("--expert-format", choices=sorted(FORMATS), default="nvfp4")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--resident-experts", type=int, metavar="K", help="paged experts: K a layer on the GPU")
    where.add_argument("--offload-gib", type=int, metavar="N", help="--cpu-offload-gb: N GiB of experts in host RAM")
    p.add_argument("--kv-dtype", choices=sorted(KV_BYTES), default="bf16")
    p.add_argument(
        "--table", choices=["nvme", "pinned", "gpu"], default="nvme", help="where the n-gram table is (nvme)"
    )
    p.add_argument("--tokens", type=int, help="tokens of the KV pool (context x max-requests)")
    p.add_argument("--state-slots", type=int, help="GDN state slots (8 a request)")
    p.add_argument("--chunk", type=int, default=2048, help="chunked prefill size, tokens (2048)")
    p.add_argument("--vram", type=float, help="GiB of the GPU; exit 1 if the sum is larger")
    p.add_argument("--ram", type=float, help="GiB of free host RAM; exit 1 if the sum is larger")
    p.add_argument("--json", action="store_true", help="machine-readable output")
    p.add_argument("--markdown", action="store_true", help="a table for a document")
    return p


def main(argv: list[str] | None = None) -> int:
    """Return 0, 1 when a given limit is exceeded, 2 on usage errors."""
    args = parser().parse_args(argv)
    settings = Settings(
        context=args.context, max_requests=args.max_requests, expert_format=args.expert_format,
        resident_experts=args.resident_experts, offload_gib=args.offload_gib, kv_dtype=args.kv_dtype,
        table=args.table, tokens=args.tokens, state_slots=args.state_slots, chunk=args.chunk,
    )  # fmt: skip
    try:
        shape = load(args.model)
        found = budget.compute(shape, settings)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    table = Table(["part", "VRAM GiB", "RAM GiB", "disk GiB", "how"])
    for item in found.items:
        cells = [round(item.nbytes / GIB, 2) if item.place == place else None for place in ("vram", "ram", "disk")]
        table.add(item.name + (" (estimate)" if item.estimate else ""), *cells, item.formula)
    vram, ram, disk = (found.total(place) / GIB for place in ("vram", "ram", "disk"))
    table.add("sum", round(vram, 2), round(ram, 2), round(disk, 2), "")
    report = Report(f"Memory budget of {shape.name}", blocks=[table])
    report.facts = [
        ("parameters", f"{shape.parameters / 1e9:.1f} B, {shape.routed_parameters / 1e9:.1f} B of them routed experts")
    ]
    if not FORMATS[settings.expert_format].served:
        report.warnings.append(f"SGLang 0.5.23 with this series cannot serve {settings.expert_format} experts")
    over = [
        f"{name} {value:.1f} GiB of {limit:g}"
        for name, value, limit in (("VRAM", vram, args.vram), ("RAM", ram, args.ram))
        if limit is not None and value > limit
    ]
    if args.vram is not None or args.ram is not None:
        report.verdict, report.evidence = ("DOES NOT FIT", ", ".join(over)) if over else ("FITS", "")
    report.data = {"bytes": {place: found.total(place) for place in ("vram", "ram", "disk")}}
    if args.json:
        print(dump_json(report.to_json()), end="")
    else:
        print(table.markdown() if args.markdown else report.text())
    return exit_codes.NEGATIVE if over else exit_codes.HOLDS


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
