#!/usr/bin/env python3
"""Copy a checkpoint with one tensor damaged (noise, a factor, rows moved by one): the fault that demo.sh plants."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.perturb import KINDS, perturb


def _span(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    try:
        return int(first), int(end)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected FIRST:END, e.g. 3:4") from None


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="checkpoint folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--tensor", required=True, help="regular expression that matches one tensor name")
    parser.add_argument("--kind", choices=KINDS, default="noise", help="what is done to it (noise)")
    parser.add_argument(
        "--relative", type=float, default=0.05, help="noise over the tensor's deviation, or the share that scale adds"
    )
    parser.add_argument("--rows", type=_span, metavar="FIRST:END", help="only these rows of the first dimension")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        record = perturb(
            args.source,
            args.target,
            tensor=args.tensor,
            relative=args.relative,
            seed=args.seed,
            kind=args.kind,
            rows=args.rows,
        )
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(json.dumps(record))
    return exit_codes.HOLDS


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
