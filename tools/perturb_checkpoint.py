#!/usr/bin/env python3
"""Copy a checkpoint with noise added to one tensor: the fault that demo.sh expects the oracle to catch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from q4kit import exit_codes
from q4kit.errors import Q4Error
from q4kit.perturb import perturb


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="checkpoint folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--tensor", required=True, help="regular expression that matches one tensor name")
    parser.add_argument("--relative", type=float, default=0.05, help="noise over the tensor's deviation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        record = perturb(args.source, args.target, tensor=args.tensor, relative=args.relative, seed=args.seed)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(json.dumps(record))
    return exit_codes.HOLDS


if __name__ == "__main__":
    raise SystemExit(main())
