#!/usr/bin/env python3
"""The ledger of quoted numbers, results/claims.toml.

  check    every number in README, WRITEUP and patch messages has a claim; every claim of ours its raw file, hash,
           rounding, CAMPAIGN entry and base; CAMPAIGN only grew
  list     the claims
  add      append a claim of ours from a raw result file (value, hash and pointer are taken from the file)

Exit codes: 0 all holds, 1 something does not, 2 usage, 4 environment fault.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.claims import repository, writer
from q4kit.claims.ledger import load
from q4kit.errors import Q4Error
from q4kit.report import Report, Table, dump_json

ROOT = Path(__file__).resolve().parent.parent


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    check = commands.add_parser("check", help="check documents, ledger and CAMPAIGN")
    check.set_defaults(func=do_check)
    listing = commands.add_parser("list", help="print the claims")
    listing.set_defaults(func=do_list)
    add = commands.add_parser("add", help="append a claim of ours")
    add.set_defaults(func=do_add)
    add.add_argument("id")
    add.add_argument("--raw", type=Path, required=True, help="result file under results/")
    add.add_argument("--pointer", required=True, help="JSON pointer of the number, e.g. /points/0/summary/decode/mean")
    add.add_argument("--unit", required=True)
    add.add_argument("--statement", required=True)
    add.add_argument("--campaign", required=True, help="anchor of the CAMPAIGN heading")
    add.add_argument("--decimals", type=int, default=2)
    add.add_argument("--scale", type=float, default=1.0, help="factor from the raw number to the unit")
    add.add_argument("--metric", default="")
    add.add_argument("--gpu", default="")
    add.add_argument("--tree", default="", help="with --gpu: the patches that ran, e.g. 'prefix 21'")
    for command in (check, listing, add):
        command.add_argument("--root", type=Path, default=ROOT, help="repository (default: this one)")
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return top


def do_check(args: argparse.Namespace) -> tuple[Report, int]:
    done = repository.check(args.root)
    ok = not done.findings
    report = Report("Claims", "HOLDS" if ok else "BROKEN", f"{len(done.findings)} findings")
    report.facts = [
        ("claims", done.claims),
        ("documents", ", ".join(done.documents)),
        ("CAMPAIGN versions", done.campaign_versions),
    ]
    if done.shallow:
        report.warnings.append("shallow clone: older versions of CAMPAIGN could not be checked")
    if not ok:
        report.blocks.append("\n".join(str(f) for f in done.findings))
    report.data = {"findings": [f.__dict__ for f in done.findings]}
    return report, exit_codes.HOLDS if ok else exit_codes.NEGATIVE


def do_list(args: argparse.Namespace) -> tuple[Report, int]:
    table = Table(["id", "owner", "value", "unit", "base", "source"])
    for c in load(args.root / repository.LEDGER).claims.values():
        value = f"{c.value:g}" + (f" .. {c.high:g}" if c.high != c.value else "")
        table.add(c.id, c.owner, value, c.unit, c.base, c.source or c.raw or c.formula)
    return Report("Claims", blocks=[table]), exit_codes.HOLDS


def do_add(args: argparse.Namespace) -> tuple[Report, int]:
    entry = writer.entry_from_raw(
        args.root, args.id, args.raw, args.pointer, unit=args.unit, statement=args.statement, campaign=args.campaign,
        decimals=args.decimals, scale=args.scale, metric=args.metric, gpu=args.gpu, tree=args.tree,
        base=repository.current_base(args.root),
    )  # fmt: skip
    writer.append(args.root / repository.LEDGER, entry)
    return Report(f"Added {args.id}", facts=list(entry.items())), exit_codes.HOLDS


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        report, code = args.func(args)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(dump_json(report.to_json()) if args.json else report.text(), end="")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
