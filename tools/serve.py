#!/usr/bin/env python3
"""Serve Qwen3.8-Flash-Next as published, or a tiny stand-in, with the patched SGLang: look, start, prove, wait.

Checks the machine and the checkpoint first and reports everything that is wrong at once; then starts the server,
waits for its health, warms it up, freezes garbage collection, runs the chat smoke test, writes environment.json and
waits. Ctrl-C or SIGTERM ends the server in order. Every argument: docs/SERVING.md. What stands after -- goes to SGLang.

Exit codes: the server's own once it served (0 after an orderly stop); 1 smoke test, 2 usage, 4 refused by a check or
the server did not come up, 130 stopped before it was ready.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error, UsageError
from q4kit.server.launch import LOOPBACK, plan
from q4kit.serving import facts, preflight, profiles
from q4kit.serving.budget import FORMATS, KV_BYTES, Settings
from q4kit.serving.checkpoint import Checkpoint, inspect
from q4kit.serving.profiles import PROFILES, Options, Profile
from q4kit.serving.run import Plan, StopRequested, catch_signals, exclusive, serve
from q4kit.serving.shape import Shape, from_config
from q4kit.tinymodel import PRESETS, generate

ROOT = Path(__file__).resolve().parent.parent
HOSTS = (LOOPBACK, "0.0.0.0")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="scripts/serve.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--profile", choices=list(PROFILES), required=True, help="class of machine")
    p.add_argument("--model", type=Path, help="checkpoint folder (tiny: made in .cache/serve/model when left out)")
    p.add_argument("--host", choices=HOSTS, default=LOOPBACK, help="0.0.0.0 lets other machines in (127.0.0.1)")
    p.add_argument("--port", type=int, default=30000, help="(30000)")
    p.add_argument("--context", type=int, help="prompt plus answer, tokens (the profile's)")
    p.add_argument("--max-requests", type=int, help="requests at a time (the profile's)")
    p.add_argument("--resident-experts", type=int, metavar="K", help="paged experts: K a layer on the GPU")
    p.add_argument("--offload-gib", type=int, metavar="N", help="GiB of experts in host RAM (the least that fits)")
    p.add_argument("--in-place", action="store_true", help="read offloaded experts over PCIe for small batches")
    p.add_argument("--kv-dtype", choices=sorted(KV_BYTES), default="bf16", help="(bf16)")
    p.add_argument("--table-dir", type=Path, help="flat n-gram table on another disk (tools/ple_table.py export)")
    p.add_argument("--reader", choices=["auto", "io_uring", "pread", "mmap"], default="auto", help="table rows (auto)")
    p.add_argument("--run-dir", type=Path, help="log, smoke.json, environment.json (.cache/serve/PROFILE)")
    p.add_argument("--environment", type=Path, help="provenance of the server (RUN_DIR/environment.json)")
    p.add_argument("--timeout", type=float, default=1800, help="seconds until health (1800)")
    p.add_argument("--memory-max", help="cap of host memory by a systemd scope, e.g. 60G")
    p.add_argument("--accept", action="append", default=[], metavar="CHECK", help="start although CHECK is refused")
    p.add_argument("--dry-run", action="store_true", help="print checks and command, start nothing")
    p.add_argument("sglang", nargs="*", metavar="-- ARG", help="further SGLang arguments")
    return p


def size(text: str) -> int:
    """Return "60G", "512M" or bytes as systemd counts them: powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text)
    if not match or int(match[1]) == 0:
        raise UsageError(f"--memory-max {text!r}", remedy="a number and K, M, G or T, like 60G")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def tiny_model(make: bool) -> Path:
    """Return the folder of the tiny checkpoint, making it if it is not there (unless only looked at)."""
    folder = ROOT / ".cache" / "serve" / "model"
    if make and not (folder / "config.json").is_file():
        print(f"making a tiny random checkpoint: {folder}", file=sys.stderr)
        generate(folder, PRESETS["mini"], force=folder.exists())
    return folder


def choose(profile: Profile, options: Options, checkpoint: Checkpoint) -> tuple[Shape, Settings] | None:
    """Return the model's shape and the settings for it; None where the checkpoint's config cannot be used.

    What is wrong with the config is a problem of the checkpoint, to be reported with all others.
    """
    if not checkpoint.config:
        return None
    try:
        shape = from_config(checkpoint.config, checkpoint.path.name)
    except UsageError as error:
        checkpoint.problems.append((str(error), error.remedy))
        return None
    named = checkpoint.expert_format
    # The flags of a profile are printed even for a format that it refuses.
    assumed = named if named in FORMATS else (profile.formats or ("bf16",))[0]
    return shape, profiles.settings(profile, options, shape, assumed)


def run(args: argparse.Namespace) -> int:
    """Check, print, and serve unless it is a dry run."""
    profile = PROFILES[args.profile]
    if args.model is None and profile.device == "cuda":
        raise UsageError("--model is missing", remedy="name the checkpoint folder")
    profiles.check_extra(args.sglang)
    model = (args.model or tiny_model(make=True)).absolute()
    run_dir = (args.run_dir or ROOT / ".cache" / "serve" / profile.name).absolute()
    environment = (args.environment or run_dir / "environment.json").absolute()
    memory_max = size(args.memory_max) if args.memory_max else None
    table_dir = args.table_dir.absolute() if args.table_dir else None
    options = Options(
        args.context, args.max_requests, args.resident_experts, args.offload_gib, args.kv_dtype, table_dir,
        args.reader, args.in_place, tuple(args.sglang),
    )  # fmt: skip
    checkpoint = inspect(model, table_dir)
    chosen = choose(profile, options, checkpoint)
    machine = facts.gather(
        model=table_dir or model, run_dir=run_dir, python=sys.executable, host=args.host, port=args.port
    )
    shape, settings = chosen or (None, None)
    checks = preflight.check(
        profile, machine, checkpoint, shape, settings, memory_max=memory_max, accept=args.accept, extra=args.sglang
    )
    unknown = sorted(set(args.accept) - {c.name for c in checks})
    if unknown:
        raise UsageError(f"--accept {unknown[0]!r}", remedy=f"one of: {', '.join(sorted({c.name for c in checks}))}")
    print(f"profile {profile.name}: {profile.what}\n")
    print(preflight.table(checks).text())
    if settings is not None:
        flags = profiles.flags(profile, options, settings)
        prefix = scope(memory_max) if memory_max else []
        command, whole = plan(
            model, python=sys.executable, port=args.port, host=args.host, extra_args=flags, device=profile.device
        )
        print("\ncommand:\n" + render([*prefix, *command], whole))
    refused = preflight.refused(checks)
    if refused or settings is None:
        names = ", ".join(dict.fromkeys(c.name for c in refused))
        print(f"\nerror: {profile.name} is refused here: {names}\nremedy: the last column above", file=sys.stderr)
        return exit_codes.FAULT
    if args.dry_run:
        print("\ndry run: nothing was started")
        return exit_codes.HOLDS
    catch_signals()
    job = Plan(
        model=model, python=sys.executable, device=profile.device, flags=flags, env={}, host=args.host, port=args.port,
        prefix=prefix, timeout_s=args.timeout, log=run_dir / "server.log", environment=environment,
        smoke_json=run_dir / "smoke.json",
    )  # fmt: skip
    with exclusive(run_dir):
        print(f"\nstarting; log: {job.log}", flush=True)
        return serve(job, say, progress)


def scope(memory_max: int) -> list[str]:
    """Return the systemd-run command that puts a process and its children under a memory limit."""
    user = [] if os.geteuid() == 0 else ["--user"]
    limit = ["-p", f"MemoryMax={memory_max}", "-p", "MemorySwapMax=0"]
    return ["systemd-run", *user, "--scope", "--quiet", "--collect", *limit, "--"]


def render(command: list[str], environment: dict[str, str]) -> str:
    """Return the command for a shell, with the variables that differ from the caller's."""
    changed = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    words = [f"{k}={shlex.quote(v)}" for k, v in sorted(changed.items())] + [shlex.quote(c) for c in command]
    lines, line = [], ""
    for word in words:
        if line and (len(line) + len(word) > 110 or word.startswith("--")):
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return " \\\n    ".join([*lines, line])


def say(text: str) -> None:
    """Print at once: a log file or a pipe must not hold a line back."""
    clear_progress()
    print(text, flush=True)


def clear_progress() -> None:
    """Take the line that `progress` overwrites off the terminal, if there is one."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def progress(seconds: float, line: str) -> None:
    """Show what the server does: one line that overwrites itself, or a line every 15 s where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{seconds:5.0f} s  {line[:100]}", end="", file=sys.stderr, flush=True)
    elif int(seconds) % 15 == 0:
        print(f"{seconds:5.0f} s  {line[:140]}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except Q4Error as error:
        clear_progress()
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except (StopRequested, KeyboardInterrupt):
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
