#!/usr/bin/env python3
"""Logprob oracle: is this server still computing the same thing?

record    measure a server over the fixed prompt set (or over a reference's ids with --like)
compare   a reference against a server or another recording -> EQUIVALENT, DIFFERENT, INCONCLUSIVE
floor     merge several runs of one configuration into the noise that compare judges against
selftest  plant faults of known size and show which are caught

Exit codes: 0 EQUIVALENT (or done), 1 DIFFERENT, 2 usage, 3 INCONCLUSIVE or not comparable,
4 server fault, 130 interrupted (the partial recording is kept and marked).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli, exit_codes, report
from q4kit.errors import Q4Error
from q4kit.oracle import commands
from q4kit.oracle.plan import Options
from q4kit.oracle.promptset import DEFAULT_FOLDER


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(required=True, metavar="command")

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="OUT", help='also write the report as JSON; "-" for stdout only')
    output.add_argument("--markdown", type=Path, metavar="OUT", help="also write the report as markdown")

    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest silence of the server")
    server.add_argument("--quiet", action="store_true", help="no progress on stderr")

    judged = argparse.ArgumentParser(add_help=False)
    judged.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD",
        help='a provenance field that is meant to differ, e.g. "model.weights" (repeatable)',
    )

    record = sub.add_parser("record", parents=[server, output], help="measure a server into a file")
    record.add_argument("--base-url", required=True)
    record.add_argument("--out", type=Path, required=True, help="recording to write, .jsonl or .jsonl.gz")
    record.add_argument("--like", type=Path, metavar="REF", help="measure over the ids and options of this recording")
    record.add_argument("--prompts", default="text", choices=["text", "ids"], help="texts, or the fixed ids")
    record.add_argument("--prompt-folder", type=Path, default=DEFAULT_FOLDER, help="another set with a manifest")
    record.add_argument("--backend", default="sglang", choices=["sglang", "openai"])
    defaults = Options()
    record.add_argument("--scored", type=int, default=defaults.scored, help="positions of each leg (%(default)s)")
    record.add_argument("--decode-tokens", type=int, default=defaults.decode_tokens, help="length of a decode segment")
    record.add_argument("--top", type=int, default=defaults.top, help="alternatives kept at each position")
    record.add_argument("--max-prompt-tokens", type=int, default=0, help="keep only the last N tokens of each prompt")
    record.add_argument("--no-decode", action="store_true", help="leave out the decode leg")
    record.set_defaults(run=commands.record)

    compare = sub.add_parser("compare", parents=[server, judged, output], help="judge a candidate")
    compare.add_argument("reference", type=Path)
    compare.add_argument("candidate", type=Path, nargs="?", help="a recording; or use --base-url")
    compare.add_argument("--base-url", help="measure this server now, over the reference's ids")
    compare.add_argument("--save", type=Path, metavar="FILE", help="keep the recording measured with --base-url")
    compare.add_argument("--floor", type=Path, help="A/A floor of the reference's configuration")
    compare.add_argument(
        "--tolerance", type=float, metavar="NATS", help="a largest |change| that you declare to be no difference"
    )
    compare.set_defaults(run=commands.compare)

    floor = sub.add_parser("floor", parents=[server, judged, output], help="measure or merge an A/A floor")
    floor.add_argument("recordings", type=Path, nargs="*", help="recordings of one configuration")
    floor.add_argument("--out", type=Path, required=True, help="floor to write, .jsonl or .jsonl.gz")
    floor.add_argument("--base-url", help="measure runs of this server now")
    floor.add_argument("--like", type=Path, metavar="REF", help="with --base-url: over this recording's ids")
    floor.add_argument("--prompts", default="text", choices=["text", "ids"], help="without --like: texts or fixed ids")
    floor.add_argument("--runs", type=int, default=5, help="with --base-url: runs to measure (%(default)s)")
    floor.add_argument(
        "--restart-cmd", metavar="CMD", help="shell command that restarts the server, run between the runs"
    )
    floor.set_defaults(run=commands.floor)

    selftest = sub.add_parser("selftest", parents=[output], help="plant faults and print what is caught")
    selftest.add_argument("--floor", type=Path, help="plant into this measured floor (default: published noise)")
    selftest.add_argument("--trials", type=int, default=400, help="comparisons for each fault (%(default)s)")
    selftest.add_argument("--seed", type=int, default=1)
    selftest.set_defaults(run=commands.selftest)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        result = arguments.run(arguments)
        if getattr(arguments, "markdown", None):
            report.write_atomic(arguments.markdown, result.report.markdown().encode())
        if getattr(arguments, "json", None) == Path("-"):
            sys.stdout.write(report.dump_json(result.report.to_json()))
        else:
            if getattr(arguments, "json", None):
                report.write_json(arguments.json, result.report.to_json())
            sys.stdout.write(result.report.text())
        return int(result.exit_code)
    except Q4Error as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
