#!/usr/bin/env python3
"""Run commands against a real SGLang server that lives only as long as they do.

Starts `python -m sglang.launch_server` on a free port of 127.0.0.1, waits for its health, runs each --run
command through the shell with Q4_BASE_URL set, and stops the server whatever happens. The first command that
fails ends the run, unless --keep-going; the exit code is then that command's. Exit code 4: the server did not
come up (the end of its log is printed).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error
from q4kit.server.launch import launch


def main(argv: list[str] | None = None) -> int:
    """Return the exit code of the first --run command that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint")
    parser.add_argument("--run", action="append", required=True, metavar="CMD", help="shell command; repeats")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has sglang (this one)")
    parser.add_argument("--pythonpath", help="a tree to import sglang from instead, e.g. TREE/python")
    parser.add_argument("--log", type=Path, default=Path("server.log"), help="server log (server.log)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until health (300)")
    parser.add_argument("--keep-going", action="store_true", help="run all, report the first failure")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("server_args", nargs="*", metavar="-- SERVER_ARG", help="passed on to SGLang")
    args = parser.parse_args(argv)
    failure = exit_codes.HOLDS
    try:
        with launch(
            args.model,
            python=args.python,
            pythonpath=args.pythonpath,
            extra_args=args.server_args,
            log_path=args.log,
            timeout_s=args.timeout,
            device=args.device,
        ) as server:
            env = os.environ | {"Q4_BASE_URL": server.base_url}
            for command in args.run:
                code = subprocess.run(["bash", "-c", command], env=env, check=False).returncode
                failure = failure or code
                if code and not args.keep_going:
                    break
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return failure


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
