#!/usr/bin/env python3
"""Single-stream speed of a running SGLang server, and whether it agrees with a published number.

  run      measure prefill and decode over context lengths, or four domains (--domains)
  verify   compare a measurement, stored or fresh, with a claim of results/claims.toml

Exit codes: 0 measured / AGREES or FASTER; 1 NaN / SLOWER; 2 usage; 3 refused, INCONCLUSIVE, NOT COMPARABLE;
4 server or environment fault (partial result kept); 130 interrupted (partial result kept).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from q4kit import cli, exit_codes
from q4kit.bench import commands, machine
from q4kit.bench.runner import PUBLISHED_CONTEXTS, Api, BenchConfig
from q4kit.bench.texts import TextKind
from q4kit.claims import ledger
from q4kit.errors import Q4Error, UsageError
from q4kit.provenance import short_paths
from q4kit.report import dump_json, write_atomic, write_json
from q4kit.server.client import Client

LEDGER = Path(__file__).resolve().parent.parent / "results" / "claims.toml"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands_ = top.add_subparsers(required=True)
    run = commands_.add_parser("run", help="measure")
    run.set_defaults(func=do_run)
    run.add_argument(
        "-c",
        "--contexts",
        type=int,
        nargs="*",
        metavar="N",
        help=f"prompt lengths, tokens (default {' '.join(map(str, PUBLISHED_CONTEXTS))}; none with --domains)",
    )
    run.add_argument(
        "-t",
        "--text",
        type=TextKind,
        choices=list(TextKind),
        nargs="+",
        default=[TextKind.FILLER],
        help="text kinds; filler hides the cost of a disk-backed table (default filler)",
    )
    run.add_argument("-n", "--tokens", type=int, default=200, help="tokens to generate (default 200)")
    run.add_argument("-r", "--repeats", type=int, default=5)
    run.add_argument("--seed", type=int, default=0, help="seed of the texts; every repeat has its own text")
    run.add_argument("--no-warmup", action="store_true")
    run.add_argument("--settle", type=float, default=0.0, metavar="S", help="pause before each repeat, seconds")
    run.add_argument("--table", type=Path, help="file or folder of a disk-backed table, to tell cold from warm")
    run.add_argument("--page-cache", choices=["as-is", "cold", "warm"], default="as-is")
    run.add_argument("--domains", nargs="*", metavar="NAME", help="run chat, stem, maths, code (or the named ones)")
    run.add_argument("--domain-tokens", type=int, default=512)
    run.add_argument("--domain-limit", type=int, metavar="K", help="only the first K questions a domain")
    run.add_argument("--api", type=Api, choices=list(Api), default=Api.NATIVE, help="route of the domain run")
    run.add_argument("--no-thinking", action="store_true", help="chat template with enable_thinking=false")
    run.add_argument("--csv", type=Path)
    run.add_argument("--plot", type=Path, metavar="PNG", help="speed over context (needs matplotlib)")
    verify = commands_.add_parser("verify", help="compare with a published number")
    verify.set_defaults(func=do_verify)
    verify.add_argument("--claim", required=True, metavar="ID")
    verify.add_argument("--ledger", type=Path, default=LEDGER)
    verify.add_argument("--result", type=Path, help="JSON of an earlier 'run'; without it the claim is measured now")
    verify.add_argument("-r", "--repeats", type=int, default=5)
    verify.add_argument("--margin", type=float, help="relative, 0.03 = 3 %% (default: the claim's)")
    verify.add_argument("--alpha", type=float, default=0.05)
    verify.add_argument("--vary", nargs="*", default=[], metavar="FIELD", help="conditions allowed to differ")
    for sub in (run, verify):
        sub.add_argument("--base-url", default="http://127.0.0.1:30000" if sub is run else None)
        sub.add_argument("--timeout", type=float, default=600.0, help="seconds without an answer")
        sub.add_argument("--json", help="write the full result here ('-' for stdout)")
        sub.add_argument("--md", type=Path, help="write the report as markdown")
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return top


def do_run(args: argparse.Namespace) -> commands.Outcome:
    contexts = args.contexts
    if contexts is None:
        contexts = list(PUBLISHED_CONTEXTS) if args.domains is None else []
    config = BenchConfig(
        contexts=tuple(contexts), kinds=tuple(args.text), tokens=args.tokens, repeats=args.repeats, seed=args.seed,
        warmup=not args.no_warmup, page_cache=args.page_cache, settle_s=args.settle,
        table=tuple(machine.table_files(args.table)) if args.table else (),
    )  # fmt: skip
    options = None
    if args.domains is not None:
        chat: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}} if args.no_thinking else {}
        options = commands.DomainOptions(tuple(args.domains), args.domain_tokens, args.domain_limit, args.api, chat)
    with Client(args.base_url, args.timeout) as client:
        outcome = commands.run(
            client, config, options, progress=progress(args), repro=repro(), picture=args.plot is not None
        )
    commands.write_outputs(outcome, csv=args.csv)
    if args.plot and outcome.png:
        write_atomic(args.plot, outcome.png)
    return outcome


def do_verify(args: argparse.Namespace) -> commands.Outcome:
    claims = ledger.load(args.ledger).claims
    if args.claim not in claims:
        near = ledger.nearest(claims, args.claim)
        listing = (
            "python tools/claims.py list" if args.ledger == LEDGER else shlex.join(["grep", "^id", str(args.ledger)])
        )
        raise UsageError(
            f"no claim {args.claim!r} in {args.ledger.name}",
            remedy=(f"did you mean {near!r}? " if near else "") + f"`{listing}` prints the ids",
        )
    stored = read_result(args.result) if args.result else None
    client = Client(args.base_url, args.timeout) if args.base_url else None
    return commands.verify_claim(
        claims[args.claim], stored, client, repeats=args.repeats, margin=args.margin, alpha=args.alpha,
        vary=args.vary, progress=progress(args), repro=repro(),
    )  # fmt: skip


def read_result(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.name} cannot be read as a bench result: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != "q4kit.bench/1":
        raise UsageError(f"{path.name} is not a bench result (schema q4kit.bench/1 expected)")
    return data


def progress(args: argparse.Namespace) -> Any:
    return (lambda _: None) if args.quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def repro() -> str:
    """Return the command line of this run, without telling where its author keeps things."""
    return short_paths(shlex.join(["python", "tools/bench_speed.py", *sys.argv[1:]]))


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        outcome = args.func(args)
        if args.md:
            write_atomic(args.md, outcome.report.markdown().encode())
        if args.json == "-":
            print(dump_json(outcome.report.to_json()))
        else:
            if args.json:
                write_json(Path(args.json), outcome.report.to_json())
            print(outcome.report.text(), end="")
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return exit_codes.INTERRUPTED
    return int(outcome.exit_code)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
