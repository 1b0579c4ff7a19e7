#!/usr/bin/env python3
"""Patch series for the pinned SGLang: fetch the pin, apply, revert, status, export, verify, radar.

Concepts, guarantees and every exit code: docs/SERIES.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error, UsageError
from q4kit.series import (
    base,
    export,
    installed,
    lint,
    manifest,
    prefix_tests,
    radar,
    render,
    state,
    targets,
    verify,
    wheel,
    worktree,
)


def progress(line: str) -> None:
    """Print one progress line; stderr keeps stdout clean for --json."""
    print(f"series: {line}", file=sys.stderr, flush=True)


def emit(args: argparse.Namespace, text: str, data: Any) -> None:
    """Print the result as text, or as JSON with --json."""
    print(json.dumps(data, indent=2, default=_plain) if args.json else text)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        plain = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return plain | ({"ok": value.ok} if hasattr(value, "ok") else {})
    return str(value)


def target_of(args: argparse.Namespace) -> targets.Target:
    """Return the work tree or installed package that the command line names."""
    if args.installed == (args.target is not None):
        raise UsageError("name a work tree or --installed, one of the two", remedy=f"series.py {args.command} --help")
    if args.installed:
        return targets.installed_target(args.python, args.series.base.package)
    return targets.work_tree(args.target, args.series.base.package)


def cmd_fetch(args: argparse.Namespace) -> int:
    dest = args.dest or wheel.cache_dir() / "tree"
    path = base.fetch(args.series, dest, python=args.python, source=args.source, progress=progress)
    emit(args, f"{path}: SGLang {args.series.base.version}; PYTHONPATH={path}/{base.PREFIX} runs it", {"path": path})
    return exit_codes.HOLDS


def cmd_apply(args: argparse.Namespace) -> int:
    target = target_of(args)
    if isinstance(target, targets.InstalledTarget):
        result = installed.apply(target, series=args.series, to=args.to, progress=progress)
    else:
        result = worktree.apply(target.root, series=args.series, to=args.to, progress=progress)
    emit(args, render.change(result, "apply"), result)
    return exit_codes.HOLDS


def cmd_revert(args: argparse.Namespace) -> int:
    target = target_of(args)
    if isinstance(target, targets.InstalledTarget):
        result = installed.revert(target, series=args.series, progress=progress)
    else:
        result = worktree.revert(target.root, series=args.series, progress=progress)
    emit(args, render.change(result, "revert"), result)
    return exit_codes.HOLDS


def cmd_status(args: argparse.Namespace) -> int:
    found = state.status(target_of(args), series=args.series)
    emit(args, render.state(found), found.to_json())
    return found.exit_code


def cmd_tree(args: argparse.Namespace) -> int:
    to = args.series.check_prefix(args.to)
    path = base.tree_at(to, series=args.series, python=args.python, dest=args.dest, progress=progress)
    emit(args, f"{path}: prefix {to}; PYTHONPATH={path}/{base.PREFIX} runs it", {"path": path, "prefix": to})
    return exit_codes.HOLDS


def cmd_export(args: argparse.Namespace) -> int:
    result = export.export(
        args.worktree,
        series=args.series,
        base=args.base,
        mode=args.command,
        allow_fewer=getattr(args, "allow_fewer", False),
        new_pin=getattr(args, "new_pin", False),
        old=getattr(args, "old", None),
        progress=progress,
    )
    emit(args, render.exported(result), result)
    return exit_codes.HOLDS


def cmd_verify(args: argparse.Namespace) -> int:
    def show(report: verify.PrefixReport) -> None:
        print(render.prefix(report, args.series.length), file=sys.stderr if args.json else sys.stdout, flush=True)

    result = verify.verify(
        args.series,
        python=args.python,
        run_tests=not args.no_tests,
        imports=not args.no_imports,
        full=args.full,
        offline_only=args.offline,
        report=show,
        progress=progress,
    )
    emit(args, render.verified(result), result)
    return exit_codes.HOLDS if result.ok else exit_codes.NEGATIVE


def cmd_test(args: argparse.Namespace) -> int:
    series = args.series
    names = {"stock": [0], "all": list(range(series.length + 1))}
    if args.prefix not in names and not args.prefix.isdecimal():
        raise UsageError(f"--prefix {args.prefix}", remedy="a number of patches, `stock` or `all`")
    prefixes = names.get(args.prefix) or [series.check_prefix(int(args.prefix))]
    prefix_tests.require_pytest(args.python)
    results: dict[int, list[prefix_tests.Outcome]] = {}
    for k in prefixes:
        what = prefix_tests.plan(series, k, full=True, patch=args.patch)
        tree = base.tree_at(k, series=series, python=args.python, progress=progress)
        results[k] = prefix_tests.run(series, what, tree, python=args.python, progress=progress)
    lines = [f"prefix {k}: {render.outcome(t)}" for k, outcomes in results.items() for t in outcomes]
    bad = sum(bool(t.problem) for outcomes in results.values() for t in outcomes)
    ran = sum(map(len, results.values()))
    emit(args, "\n".join([*lines, f"{ran - bad} of {ran} tests as declared"]), results)
    return exit_codes.NEGATIVE if bad else exit_codes.HOLDS if ran else exit_codes.INCONCLUSIVE


def cmd_lint(args: argparse.Namespace) -> int:
    found = lint.lint(args.series)
    emit(args, "\n".join([*found, f"{len(found)} findings in {args.series.length} patches"]), found)
    return exit_codes.NEGATIVE if found else exit_codes.HOLDS


def cmd_radar(args: argparse.Namespace) -> int:
    results = [radar.radar(v, series=args.series, python=args.python, progress=progress) for v in args.wheel]
    if args.markdown:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        command = f"tools/series.py radar --wheel {' '.join(args.wheel)} --markdown"
        text = render.radar_document(results, args.series, when, command)
    else:
        text = render.radar(results)
    emit(args, text, results)
    return exit_codes.HOLDS if all(r.ok for r in results) else exit_codes.NEGATIVE


def interpreter(text: str) -> str:
    """Return the path of a program as it can be run from any folder. Links are kept: an environment's Python is one."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a program that can be run")
    return os.path.abspath(found)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(prog="series.py", description=__doc__.split("\n")[0])
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = sub.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
        made.set_defaults(run=run)
        return made

    def python(made: argparse.ArgumentParser, text: str) -> None:
        made.add_argument("--python", type=interpreter, default=sys.executable, metavar="PY", help=text)

    made = command("fetch", cmd_fetch, "make a git work tree of the pin from the wheel, a clone or a package")
    made.add_argument("dest", nargs="?", type=Path, metavar="DEST", help="folder to make (default: in the cache)")
    made.add_argument(
        "--from", dest="source", type=Path, metavar="SOURCE", help="a clone at the tag, or an unpatched package"
    )
    python(made, "interpreter whose compiled extensions to put in (default: this one)")

    for name, run, text in (
        ("apply", cmd_apply, "bring a work tree or an installed package to a prefix of the series"),
        ("revert", cmd_revert, "bring it byte-for-byte back to the pin"),
        (
            "status",
            cmd_status,
            "say which of clean (exit 10), applied (11), absorbed (12), drifted (13) it is",
        ),
    ):
        made = command(name, run, text)
        made.add_argument("target", nargs="?", type=Path, metavar="WORKTREE", help="root of a git work tree")
        made.add_argument("--installed", action="store_true", help="the package installed in an environment instead")
        python(made, "that environment's interpreter (default: this one)")
        if name == "apply":
            made.add_argument("--to", type=int, metavar="K", help="number of patches (default: all)")

    made = command("tree", cmd_tree, "make a runnable tree at a prefix, compiled extensions included")
    made.add_argument("--to", type=int, metavar="K", help="number of patches (default: all)")
    made.add_argument("dest", nargs="?", type=Path, metavar="DEST", help="folder to make (default: kept in the cache)")
    python(made, "interpreter that will run it (default: this one)")

    for name, text in (
        ("export", "write the patch files and series.toml from the commits of a work tree"),
        ("new", "append the new commits of a work tree; the recorded patches must not change"),
        ("refresh", "export, with the range-diff and the patch counts before and after"),
    ):
        made = command(name, cmd_export, text)
        made.add_argument("worktree", type=Path, metavar="WORKTREE")
        made.add_argument("--base", metavar="REV", help="commit of the pin (default: found by its content)")
        if name == "refresh":
            made.add_argument("--allow-fewer", action="store_true", help="let the number of patches go down")
            made.add_argument("--new-pin", action="store_true", help="[base] was changed, the commits rebased onto it")
            made.add_argument("--old", metavar="BASE..TIP", help="the commits before that, for the range-diff")
    made = command("verify", cmd_verify, "prove every prefix on a fresh tree: ids, compile, import, tests, round trip")
    made.add_argument("--offline", action="store_true", help="only what the folder proves: blob chain and lints")
    made.add_argument("--no-tests", action="store_true", help="leave the tests of the patches out")
    made.add_argument("--no-imports", action="store_true", help="leave out importing the touched modules")
    made.add_argument("--full", action="store_true", help="every test at every prefix, not only where it changes")
    python(made, "interpreter with SGLang's dependencies that runs imports and tests (default: this one)")

    made = command("test", cmd_test, "run the patches' tests at one prefix against what is declared for it")
    made.add_argument("--prefix", required=True, metavar="K", help="number of patches, `stock` or `all`")
    made.add_argument("--patch", type=int, metavar="N", help="only the tests of this patch")
    python(made, "interpreter that runs them (default: this one)")

    command("lint", cmd_lint, "check headers, metadata and added lines")

    made = command("radar", cmd_radar, "try the series on other released versions, one line a patch")
    made.add_argument("--wheel", nargs="+", required=True, metavar="VERSION", help="versions, or `newest`")
    made.add_argument("--markdown", action="store_true", help="print docs/RADAR.md")
    python(made, "interpreter whose wheels to look at (default: this one)")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parser().parse_args(argv)
    try:
        args.series = manifest.load()
        return int(args.run(args))
    except Q4Error as exc:
        print(exc.render(), file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; `status` says what state things are in", file=sys.stderr)
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
