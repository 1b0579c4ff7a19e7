#!/usr/bin/env python3
"""Row readers of the patched SGLang beside what the disk can do (fio) and two ways that need no patch.

Without --table a random table is made once in the cache folder and kept. --quick takes under 40 seconds (after the
table and the native code have been built once) and gives the quoted ratios; the default run covers all row counts.
Cold means evicted and verified (mincore), before every series of batches. Where the table does not stay in the page
cache, the cold figures stand alone and the report says why (a smaller --size-mib may fit).

Exit codes: 0 measured; 2 usage; 4 nothing could be measured; 130 interrupted (partial result kept).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.ple import commands, contenders, measure, render, summary, table
from q4kit.report import dump_json, write_atomic


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--table", type=Path, help="flat table (folder with a ple.json) on the disk to measure")
    top.add_argument("--size-mib", type=int, default=2048, help="size of the random table (default 2048)")
    top.add_argument("--cache", type=Path, default=table.cache_folder(), help="where random tables are kept")
    top.add_argument("--quick", action="store_true", help="16 and 32,768 rows, `auto` beside the baselines")
    top.add_argument("--readers", nargs="+", choices=commands.READERS, help="default: all, with --quick auto")
    top.add_argument("--baselines", nargs="*", choices=list(contenders.BASELINES), default=list(contenders.BASELINES))
    top.add_argument("--rounds", type=int, help="interleaved rounds (default 7, with --quick 5)")
    top.add_argument("--no-fio", action="store_true", help="without the disk's limits: no ratios to them")
    top.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - for stdout, then nothing else is printed"
    )
    top.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as markdown")
    top.add_argument("--plot", type=Path, metavar="FILE", help="write rows/s over rows a batch as a PNG")
    top.add_argument("-v", "--verbose", action="store_true", help="the readers' own log lines")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the tool; see the module's docstring for exit codes."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr)
    plan = measure.QUICK if args.quick else measure.FULL
    if args.rounds:
        plan = dataclasses.replace(plan, rounds=args.rounds)
    try:
        place = args.table or table.random_table(args.cache, args.size_mib << 20)
        report, measured = commands.bench(
            place,
            plan,
            args.readers or (["auto"] if args.quick else list(commands.READERS)),
            args.baselines,
            with_fio=not args.no_fio,
            log=lambda line: print(line, file=sys.stderr),
        )
        if args.plot:
            lines = [summary.Line(**line) for line in report.data["lines"]]
            write_atomic(args.plot, render.png(lines, report.data["fio_best_iops"], "Rows from storage"))
        if args.markdown:
            write_atomic(args.markdown, report.markdown().encode())
        if args.json and args.json != "-":
            write_atomic(Path(args.json), dump_json(report.to_json()).encode())
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(dump_json(report.to_json()) if args.json == "-" else report.text(), end="")
    return exit_codes.INTERRUPTED if measured.partial else exit_codes.HOLDS


if __name__ == "__main__":
    sys.exit(cli.run(main))
