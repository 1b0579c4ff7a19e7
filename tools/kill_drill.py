#!/usr/bin/env python3
"""Kill `series.py apply --installed` at random moments on a copy of an installed SGLang, and restore it each time."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.series import drill, manifest, targets

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 every kill was named and mended, 1 one was not, 2 usage, 4 environment fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter whose SGLang is copied (this one)")
    parser.add_argument("--count", type=int, default=20, help="kills (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record here")
    args = parser.parse_args(argv)
    try:
        drill.check_count(args.count)  # before the copy, which takes a while
        series = manifest.load(ROOT / "upstream" / "series-q4head")
        source = targets.installed_target(args.python, series.base.package)
        with tempfile.TemporaryDirectory(prefix="kill-drill-") as scratch:
            python = drill.copy_environment(source, Path(scratch) / "checkout")
            tool = str(ROOT / "tools" / "series.py")
            result = drill.run(
                python,
                series,
                command=[sys.executable, tool, "apply", "--installed", "--python", python],
                count=args.count,
                seed=args.seed,
                progress=lambda line: print(f"drill: {line}", file=sys.stderr, flush=True),
            )
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if args.json:
        args.json.write_text(json.dumps(result.to_json(), indent=1) + "\n")
    states = ", ".join(f"{count} {name}" for name, count in sorted(result.states().items()))
    restored = sum(t.restored for t in result.trials)
    what = f"an apply of {result.patches} patches to {result.files} files"
    print(f"{len(result.trials)} kills of {what}: {states}; {restored} restored byte for byte")
    print("HOLDS" if result.holds else "DOES NOT HOLD")
    return exit_codes.HOLDS if result.holds else exit_codes.NEGATIVE


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
