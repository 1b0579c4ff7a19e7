#!/usr/bin/env python3
"""Plant known faults into a tiny model and its server, and show what the oracle sees and the fixed rule does not.

OUT keeps the raw recordings; what is there is not measured again, and a folder of another model, base or definition of
a fault is refused. Exit codes: 0 the oracle calls every fault DIFFERENT and the fixed rule (mean <= 0.01, max <= 0.5
nats, prefill) none, 1 otherwise, 2 usage, 3 recordings that cannot be compared, 4 environment or server fault,
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error, UsageError
from q4kit.gate import faults
from q4kit.report import write_atomic, write_json
from q4kit.series import load
from q4kit.server import model_folder


def progress(line: str) -> None:
    """Print one progress line; stderr keeps stdout clean."""
    print(f"faults: {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the recordings, table.md and table.json")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint of make_tiny_model.py --preset mini")
    parser.add_argument("--faults", type=Path, default=faults.FOLDER / "faults.toml", help="the list (data/faults)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault (repeats)")
    parser.add_argument(
        "--floor-runs", type=int, default=faults.FLOOR_RUNS, metavar="N",
        help="runs of the undamaged model in the floor, a server start each, the reference among them (default 5)",
    )  # fmt: skip
    parser.add_argument("--python", default=sys.executable, metavar="PY", help="interpreter that serves (this one)")
    args = parser.parse_args(argv)
    try:
        listed = faults.read_faults(args.faults)
        unknown = set(args.only or ()) - {fault.name for fault in listed}
        if unknown:
            raise UsageError(
                f"no fault {', '.join(sorted(unknown))}", remedy="one of " + ", ".join(fault.name for fault in listed)
            )
        model_folder.check(args.model)
        chosen = [fault for fault in listed if not args.only or fault.name in args.only]
        bench = faults.Bench(
            args.out.resolve(), args.model.resolve(), load(), args.python, progress, floor_runs=args.floor_runs
        )
        found = faults.find(bench, chosen)
        report = faults.report(args.model.name, found, bench.provenance(found))
        write_atomic(args.out / "table.md", report.markdown().encode())
        write_json(args.out / "table.json", report.to_json())
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: the recordings so far are kept", file=sys.stderr)
        return exit_codes.INTERRUPTED
    print(report.text())
    return faults.exit_code(found)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
