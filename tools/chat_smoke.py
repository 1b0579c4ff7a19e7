#!/usr/bin/env python3
"""Ask a running server one chat question three times (whole, again, streamed): answers must be well formed and equal.

On a GPU, where equal bits are not promised, a text that differs is a warning with its position.

Exit codes: 0 holds, 1 an answer is wrong or differs, 2 usage, 4 the server failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4kit import cli, exit_codes, smoke
from q4kit.errors import Q4Error
from q4kit.report import dump_json, write_json
from q4kit.server.client import Client


def main(argv: list[str] | None = None) -> int:
    """Return 0 when the answers hold, 1 when not, 4 when there was none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="(http://127.0.0.1:30000)")
    parser.add_argument("--timeout", type=float, default=600, help="longest silence of the server, seconds (600)")
    parser.add_argument("--json", type=Path, help="also write the report as JSON; - prints it instead")
    args = parser.parse_args(argv)
    try:
        with Client(args.base_url, args.timeout) as client:
            report, code = smoke.run(client).report()
        if args.json and str(args.json) != "-":
            write_json(args.json, report.to_json())
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    print(dump_json(report.to_json()) if str(args.json) == "-" else report.text(), end="")
    return code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
