#!/usr/bin/env python3
"""The per-patch gate: serve every prefix of the series, judge each patch against its neighbour.

For each chosen prefix k: a tree of its own with the first k patches, a real server, an oracle recording, a short
bench, memory and boot time. The recording is compared with the last prefix that served. With --jobs, servers boot
and are recorded side by side; each is timed alone. OUT keeps one JSON a prefix and the raw recordings; a second call
goes on where the first stopped. Read docs/GATE.md.

Exit codes: 0 every patch is EQUIVALENT (or fails as declared with --fails-with), 1 a patch is DIFFERENT or broke
serving, 2 usage, 3 inconclusive, partial, or nothing compared, 4 environment fault (a server that is killed, or not
up in time, leaves no record), 130 interrupted (Ctrl-C, SIGTERM or SIGHUP; every server is ended first).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error, UsageError
from q4kit.gate import commands, gpu
from q4kit.gate.plan import Config, choose_prefixes, parse_arguments, parse_expectation
from q4kit.report import dump_json
from q4kit.series import Series, load


def progress(line: str) -> None:
    """Print one progress line; stderr keeps stdout clean."""
    print(f"gate: {line}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results; goes on where it stopped")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prefixes", metavar="K,K,...", help="these prefixes only")
    parser.add_argument("--from", dest="first", type=int, metavar="K", help="first prefix (0, the pin)")
    parser.add_argument("--to", dest="last", type=int, metavar="K", help="last prefix (the whole series)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--python", default=sys.executable, metavar="PY", help="interpreter that serves (this one)")
    parser.add_argument(
        "--server-args",
        default="",
        metavar="ARGS",
        help='more server arguments, one string; a prefix that does not know one yet is recorded as such. "=" needed: '
        '--server-args="--flag value"',
    )
    parser.add_argument("--short", action="store_true", help="60 positions a leg and two requests: the form of CI")
    parser.add_argument(
        "--floor",
        type=int,
        metavar="N",
        help="restarts for the oracle's floor (1, with --device cuda 5; 0 with --short)",
    )
    parser.add_argument("--tolerance", type=float, metavar="NATS", help="largest |change| that you declare harmless")
    parser.add_argument("--plant", type=Path, metavar="PATCH", help="a fault put on top of the tree, to be caught")
    parser.add_argument("--plant-at", type=int, metavar="K", help="from this prefix on (the last)")
    parser.add_argument("--serves-from", type=int, metavar="K", help="prefixes below K must fail, from K on serve")
    parser.add_argument("--fails-with", metavar="REGEX", help="what they must fail with")
    parser.add_argument("--ballast-free-gib", type=float, metavar="GIB", help="leave so much memory free on each GPU")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="servers that boot and are recorded side by side: a wave (1)"
    )
    parser.add_argument(
        "--gpus", metavar="G,G,...", help="GPUs that a wave is spread over (those of CUDA_VISIBLE_DEVICES, else 0)"
    )
    parser.add_argument("--timeout", type=float, default=400.0, metavar="S", help="until a server is healthy (400)")
    parser.add_argument("--budget", type=float, metavar="S", help="start no wave that would end after S seconds")
    parser.add_argument("--retry-failed", action="store_true", help="measure prefixes that did not serve again")
    parser.add_argument("--table-only", action="store_true", help="judge what is there, start nothing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


FLOOR = {"cpu": 1, "cuda": 5}
"""Restarts for the floor. A CPU server repeats its bits. On a GPU, too few leave every row INCONCLUSIVE: floors of 3, 4
and 5 starts of one server on an H200 would have caught the fault that EQUIVALENT must exclude in 12 %, 82 % and 99.5 %
of the comparisons (docs/GATE.md)."""


def config_of(args: argparse.Namespace, series: Series) -> Config:
    """Return the settings of a command line."""
    prefixes = choose_prefixes(series.length, args.prefixes, args.first, args.last)
    server_args = tuple(shlex.split(args.server_args))
    parse_arguments(server_args)
    floor = (0 if args.short else FLOOR[args.device]) if args.floor is None else args.floor
    if floor < 0:
        raise UsageError(f"--floor {floor}: must be 0 or more", remedy=f"give a count; the default is {FLOOR}")
    if args.gpus is not None and args.device != "cuda":
        raise UsageError("--gpus needs --device cuda", remedy="leave it out: nothing is served on a GPU")
    return Config(
        model=args.model.resolve(),
        python=args.python,
        prefixes=prefixes,
        device=args.device,
        server_args=server_args,
        short=args.short,
        floor_runs=floor,
        plant=commands.plant(args.plant, args.plant_at, prefixes),
        expect=parse_expectation(args.serves_from, args.fails_with),
        free_gib=args.ballast_free_gib,
        tolerance=args.tolerance,
        timeout_s=args.timeout,
        budget_s=args.budget,
        jobs=args.jobs,
        gpus=gpu.chosen(args.gpus) if args.device == "cuda" else (),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the gate; return the exit code."""
    args = build_parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            signal.signal(number, signal.default_int_handler)
    try:
        series = load()
        result = commands.run(
            config_of(args, series),
            series,
            args.out,
            progress=progress,
            retry_failed=args.retry_failed,
            table_only=args.table_only,
        )
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, the next call goes on", file=sys.stderr)
        return exit_codes.INTERRUPTED
    print(dump_json(result.report.to_json()) if args.json else result.report.text())
    return result.exit_code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
