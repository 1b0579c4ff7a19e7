#!/usr/bin/env python3
"""PLE n-gram tables on storage: describe one, copy one out of a checkpoint into a flat file, check copies.

  inspect TABLE            what a checkpoint or flat table holds; validates it without reading rows
  export CHECKPOINT FOLDER write a flat table with checksums (the server needs none: it reads shards in place)
  verify FLAT [OTHER]      a flat table against its checksums, or two tables against each other byte for byte

Exit codes: 0 done / EQUAL; 1 DIFFERENT; 2 usage, or not a valid table; 4 disk or environment fault; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.ple import commands, flat
from q4kit.report import Report, dump_json


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--json", action="store_true", help="print JSON")
    verbs = top.add_subparsers(dest="verb", required=True)
    for verb, what in (("inspect", "describe a table"), ("export", "write a flat copy"), ("verify", "check a copy")):
        one = verbs.add_parser(verb, help=what)
        one.add_argument("table", type=Path)
        one.add_argument("--prefix", help="tensor name prefix, for a checkpoint with several tables")
        if verb == "export":
            one.add_argument("folder", type=Path)
            one.add_argument("--force", action="store_true", help="replace a flat table that is there")
        if verb == "verify":
            one.add_argument("other", type=Path, nargs="?")
    return top


def progress_line() -> flat.Progress:
    """Return a progress printer for stderr: at most one line a second on a terminal, ten in all elsewhere."""
    last = [time.monotonic(), 0.0]

    def show(done: int, total: int) -> None:
        now, share = time.monotonic(), done / total
        terminal = sys.stderr.isatty()
        if (now - last[0] < 1.0 and done < total) or (not terminal and share - last[1] < 0.1 and done < total):
            return
        last[:] = [now, share]
        end = "\r" if terminal and done < total else "\n"
        print(f"{share:6.1%} of {total / 2**30:.2f} GiB", file=sys.stderr, end=end)

    return show


def run(args: argparse.Namespace) -> tuple[Report, int]:
    """Return the report and the exit code of one command."""
    if args.verb == "inspect":
        return commands.inspect(args.table, args.prefix), exit_codes.HOLDS
    if args.verb == "export":
        report = commands.export(args.table, args.folder, args.prefix, force=args.force, progress=progress_line())
        return report, exit_codes.HOLDS
    report, equal = commands.verify(args.table, args.other, args.prefix, progress_line())
    return report, exit_codes.HOLDS if equal else exit_codes.NEGATIVE


def main(argv: list[str] | None = None) -> int:
    """Run the tool; see the module's docstring for exit codes."""
    args = parser().parse_args(argv)
    try:
        report, code = run(args)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return exit_codes.INTERRUPTED
    print(dump_json(report.to_json()) if args.json else report.text(), end="")
    return code


if __name__ == "__main__":
    sys.exit(cli.run(main))
