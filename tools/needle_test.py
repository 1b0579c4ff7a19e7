#!/usr/bin/env python3
"""Does a server retrieve codes from a long context? Exact lengths, controls, and bounds on what may be claimed.

Exit codes: 0 RETRIEVED (or none, with --expect none); 1 LOST, leak or NaN; 2 usage; 3 INVALID or INCONCLUSIVE;
4 server or environment fault (partial result kept); 130 interrupted (partial result kept).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from q4kit import cli, exit_codes, provenance
from q4kit.bench.texts import TextKind
from q4kit.errors import Q4Error
from q4kit.needle import plot, render, runner
from q4kit.needle.plan import Config, Mode, even_depths
from q4kit.needle.summary import judge, summarise
from q4kit.report import dump_json, write_atomic, write_json
from q4kit.server.client import Client


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base-url", default="http://127.0.0.1:30000")
    p.add_argument(
        "-l",
        "--lengths",
        type=int,
        nargs="+",
        default=[8192],
        metavar="N",
        help="prompt lengths by the server's own count, tokens, such as 131072 (default 8192)",
    )
    depth = p.add_mutually_exclusive_group()
    depth.add_argument("-d", "--depths", type=float, nargs="+", metavar="F", help="depths, 0..1")
    depth.add_argument("--grid", type=int, default=5, metavar="K", help="K even depths from 0 to 1 (default 5)")
    p.add_argument("-s", "--samples", type=int, default=1, help="trials a length and depth (default 1)")
    p.add_argument("--per-prompt", type=int, default=5, help="needles in one prompt (default 5)")
    p.add_argument("--distractors", type=int, default=5, help="same-form sentences never asked for (default 5)")
    p.add_argument("--jitter", type=float, default=0.02, help="random shift of each depth (default 0.02)")
    p.add_argument("-m", "--mode", type=Mode, choices=list(Mode), default=Mode.IGNORE_EOS)
    p.add_argument("-t", "--text", type=TextKind, choices=list(TextKind), default=TextKind.PROSE)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--answer-tokens", type=int, help="token limit of an answer (default 64; chat: 2048)")
    p.add_argument("--no-thinking", action="store_true", help="chat template with enable_thinking=false")
    p.add_argument("--short", type=int, default=1024, metavar="N", help="length of the short control, tokens")
    p.add_argument("--no-logprob", action="store_true", help="leave the logprob needle out")
    p.add_argument("--flush", action="store_true", help="flush the prefix cache before every request")
    p.add_argument("--expect", choices=["found", "none"], default="found", help="none: a model that cannot retrieve")
    p.add_argument("--require", type=float, metavar="RATE", help="lower bound that the run must support, e.g. 0.9")
    p.add_argument("--confidence", type=float, default=0.95)
    p.add_argument("--timeout", type=float, default=1800.0, help="seconds without an answer")
    p.add_argument("--json", help="write the full result here, raw answers included ('-' for stdout)")
    p.add_argument("--md", type=Path, help="write the report as markdown")
    p.add_argument("--plot", type=Path, metavar="PNG", help="heatmap (needs matplotlib)")
    p.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return p


def say(line: str) -> None:
    """Print one line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    limit = args.answer_tokens or (2048 if args.mode is Mode.CHAT else 64)
    try:
        config = Config(
            lengths=tuple(args.lengths), depths=tuple(args.depths or even_depths(args.grid)), samples=args.samples,
            per_prompt=args.per_prompt, distractors=args.distractors, jitter=args.jitter, mode=args.mode,
            kind=args.text, seed=args.seed, answer_tokens=limit, short_length=args.short,
            logprob=not args.no_logprob, share_prefix=not args.flush,
        )  # fmt: skip
        chat = {"chat_template_kwargs": {"enable_thinking": False}} if args.no_thinking else {}
        with Client(args.base_url, args.timeout) as client:
            client.health()
            block = provenance.collect(client, tool="needle_test")
            result = runner.RunResult()
            runner.run(client, config, result, chat=chat, progress=(lambda _: None) if args.quiet else say)
        summary = summarise(result, config.mode, confidence=args.confidence)
        judgement = judge(result, summary, expect=args.expect, require=args.require)
        repro = provenance.short_paths(shlex.join(["python", "tools/needle_test.py", *sys.argv[1:]]))
        report = render.report(result, summary, judgement, config, block, repro=repro)
        if args.json == "-":
            print(dump_json(report.to_json()), end="")
        else:
            if args.json:
                write_json(Path(args.json), report.to_json())
            print(report.text(), end="")
        if args.md:
            write_atomic(args.md, report.markdown().encode())
        if args.plot and summary.cells:
            write_atomic(args.plot, plot.heatmap_png(summary, f"{judgement.verdict.value}: {judgement.evidence}"))
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return exit_codes.INTERRUPTED
    return judgement.exit_code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
