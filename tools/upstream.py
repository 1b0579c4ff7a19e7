#!/usr/bin/env python3
"""Write docs/UPSTREAM.md, the pull request text of every patch, or check that it is current.

Exit codes: 0 written or current, 1 not current (check), 2 a patch message or a note is wrong.
"""

from __future__ import annotations

import argparse
import sys

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.report import write_atomic
from q4kit.series import load
from q4kit.upstream import DOCUMENT, document, load_notes


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["render", "check"])
    command = parser.parse_args(argv).command
    try:
        series = load()
        path = series.root / DOCUMENT
        text = document(series, load_notes(series.root))
        if command == "render":
            write_atomic(path, text.encode())
            print(f"{path}: {series.length} patches")
            return exit_codes.HOLDS
        if path.exists() and path.read_text(encoding="utf-8") == text:
            print(f"{path}: current")
            return exit_codes.HOLDS
        print(f"{path}: not what `tools/upstream.py render` writes now", file=sys.stderr)
        return exit_codes.NEGATIVE
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
