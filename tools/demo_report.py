#!/usr/bin/env python3
"""Join the result files of scripts/demo.sh into one page; exit 0 only if every step came out as it must."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli
from q4kit.demo import build
from q4kit.errors import Q4Error
from q4kit.report import write_atomic, write_json


def main(argv: list[str] | None = None) -> int:
    """Return 0 when the demo holds, 1 when a step did not, 4 when the report cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder with the result files")
    parser.add_argument("--out", type=Path, required=True, help="markdown report to write")
    parser.add_argument("--json", type=Path, help="also write the report as JSON")
    args = parser.parse_args(argv)
    report, code = build(args.results)
    try:
        write_atomic(args.out, report.markdown().encode())
        if args.json:
            write_json(args.json, report.to_json())
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(report.text())
    return code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
