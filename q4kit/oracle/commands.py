"""The oracle's commands: parsed arguments in, a report and an exit code out."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from q4kit import exit_codes, provenance
from q4kit.errors import Q4Error, UsageError
from q4kit.oracle import align, judge, measure, render, restart, simulate
from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle.floor import Floor
from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording
from q4kit.report import Report
from q4kit.server.client import Client

VERDICT_CODES = {
    judge.EQUIVALENT: exit_codes.HOLDS,
    judge.DIFFERENT: exit_codes.NEGATIVE,
    judge.INCONCLUSIVE: exit_codes.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a command hands to its CLI."""

    report: Report
    exit_code: int


def record(arguments: argparse.Namespace) -> Result:
    """Measure a server into a file."""
    with Client(arguments.base_url, arguments.timeout) as client:
        if arguments.like:
            target = measure.like(client, recordings.read(arguments.like))
        else:
            options = Options(
                scored=arguments.scored,
                decode_tokens=arguments.decode_tokens,
                top=arguments.top,
                max_prompt_tokens=arguments.max_prompt_tokens,
                decode=not arguments.no_decode,
            )
            target = measure.new_recording(
                client,
                options=options,
                source=arguments.prompts,
                folder=arguments.prompt_folder,
                backend=arguments.backend,
            )
        with kept(target, arguments.out):
            measure.run(client, target, progress=progress(arguments.quiet))
    facts: list[tuple[str, object]] = [
        ("file", str(arguments.out)),
        ("positions", sum(len(result.positions) for result in target.results)),
        ("content", target.content_hash()),
        ("prompt set", f"{target.header['prompt_set']['name']} {target.header['prompt_set']['sha256'][:16]}"),
    ]
    warnings = render.cache_warnings("recording", target.cache_unknown, len(target.results))
    data = {
        "complete": target.complete,
        "cache_unknown": target.cache_unknown,
        "positions": {
            leg: sum(result.item.scored for result in target.results if result.item.leg == leg) for leg in align.LEGS
        },
        "options": target.header["options"],
        "tokenizer": target.header["tokenizer"],
        "provenance": target.provenance,
    }
    return Result(Report("logprob_diff record", facts=facts, warnings=warnings, data=data), exit_codes.HOLDS)


def compare(arguments: argparse.Namespace) -> Result:
    """Judge a recording or a running server against a reference."""
    if (arguments.candidate is None) == (arguments.base_url is None):
        raise UsageError("compare needs one candidate", remedy="Give a recording or --base-url, not both.")
    if arguments.tolerance is not None and not arguments.tolerance >= 0:
        raise UsageError(f"--tolerance {arguments.tolerance}: must be a number of nats >= 0")
    reference = recordings.read(arguments.reference)
    floor = floors.read(arguments.floor) if arguments.floor else None
    floor_differences = floors.check_applies(floor, reference, vary=arguments.vary) if floor else []
    if arguments.base_url:
        with Client(arguments.base_url, arguments.timeout) as client:
            candidate = measure.like(client, reference)
            # Comparable at all? Better to know before minutes of measuring than after.
            provenance.check_comparable(reference.provenance, candidate.provenance, vary=arguments.vary)
            with kept(candidate, arguments.save):
                measure.run(client, candidate, progress=progress(arguments.quiet))
    else:
        candidate = recordings.read(arguments.candidate)
    differences = align.check_plans(reference, candidate, vary=arguments.vary)
    found = judge.compare(reference, candidate, floor, tolerance=arguments.tolerance)
    if floor is not None:
        unsure = sum(bool(run.get("cache_unknown")) for run in floor.runs)
        if unsure:
            found.warnings.append(f"{unsure} of the floor's {len(floor.runs)} runs do not say that nothing was cached")
        if len(floor.runs) < floors.ADVISED_RUNS:
            found.warnings.append(f"the floor has {len(floor.runs)} runs, {floors.ADVISED_RUNS} are advised")
        unlike = [
            each.field for each in floor_differences if each.field.startswith(("server_args", "sglang", "series"))
        ]
        if unlike:
            found.warnings.append("the floor was measured with another " + ", ".join(unlike[:5]))
    report = render.comparison_report(reference, candidate, floor, found, align.pair(reference, candidate), differences)
    return Result(report, VERDICT_CODES[found.verdict])


def floor(arguments: argparse.Namespace) -> Result:
    """Merge recordings into a floor, measuring them first when a server is given."""
    runs = [recordings.read(path) for path in arguments.recordings]
    if arguments.base_url:
        return _measured_floor(arguments, runs)
    if arguments.restart_cmd is not None:
        raise UsageError("--restart-cmd needs --base-url", remedy="Name the server that it restarts.")
    return _floor_of(runs, arguments)


def _floor_of(runs: list[Recording], arguments: argparse.Namespace) -> Result:
    """Build and write the floor of runs."""
    built = floors.build(runs, vary=arguments.vary)
    floors.write(built, arguments.out)
    return Result(render.floor_report(built, floor_sizes(built)), exit_codes.HOLDS)


def _measured_floor(arguments: argparse.Namespace, given: list[Recording]) -> Result:
    """Build the floor of `given` and fresh runs of a server; finished runs lie beside it until it is written."""
    if arguments.restart_cmd is not None:
        restart.check(arguments.restart_cmd)
    files = [arguments.out.with_name(f"{arguments.out.name}.run{n + 1}.jsonl.gz") for n in range(arguments.runs)]
    try:
        result = _floor_of([*given, *_measure_runs(arguments, given[0] if given else None, files)], arguments)
    except Q4Error as error:
        if finished := [path.name for path in files if path.exists()]:
            error.remedy = (
                f"{error.remedy} Finished runs are kept ({', '.join(finished)}): the same command goes on after "
                "them; delete them to start over."
            ).lstrip()
        raise
    for path in files:
        path.unlink(missing_ok=True)
        _partial(path).unlink(missing_ok=True)
    return result


def _partial(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl.gz") + ".partial.jsonl.gz")


def _measure_runs(arguments: argparse.Namespace, base: Recording | None, files: list[Path]) -> list[Recording]:
    """Return runs of a server, restarted between them when a command for it is given; finished ones are read."""
    if arguments.like:
        base = recordings.read(arguments.like)
    runs: list[Recording] = []
    for number, path in enumerate(files):
        label = f"run {number + 1}/{arguments.runs} "
        if path.exists():
            runs.append(recordings.read(path))
            progress(arguments.quiet, label)(1, 1, f"kept from before: {path.name}")
            continue
        if number and arguments.restart_cmd:
            restart.run(arguments.restart_cmd, arguments.base_url)
        with Client(arguments.base_url, arguments.timeout) as client:
            pattern = base or (runs[0] if runs else None)
            run = (
                measure.like(client, pattern)
                if pattern
                else measure.new_recording(client, options=Options(), source=arguments.prompts)
            )
            if runs:
                # A run kept from before may be of another model: better to know before measuring than after.
                provenance.check_comparable(runs[0].provenance, run.provenance, vary=arguments.vary)
            with kept(run, path, partial=_partial(path)):
                measure.run(client, run, progress=progress(arguments.quiet, label))
        runs.append(run)
        # Two runs within one second would carry the same time stamp, and so the same identity.
        time.sleep(1.0)
    return runs


def floor_sizes(built: Floor) -> dict[str, tuple[float, float, int]]:
    """Return, per leg, the largest mean |change| and the largest |change| between two runs, and positions."""
    sizes: dict[str, tuple[float, float, int]] = {}
    for leg in align.LEGS:
        table = simulate.leg_values(built, leg)
        if table is not None:
            mean, largest = judge.floor_size(table)
            sizes[leg] = (mean, largest, table.shape[0])
    return sizes


def selftest(arguments: argparse.Namespace) -> Result:
    """Plant faults into a floor and report what is caught."""
    built = floors.read(arguments.floor) if arguments.floor else None
    found = simulate.run(built, trials=arguments.trials, seed=arguments.seed)
    report = simulate.report(found)
    report.data["provenance"] = provenance.collect(None, tool="logprob_diff")
    return Result(report, exit_codes.HOLDS if found.holds else exit_codes.NEGATIVE)


@contextlib.contextmanager
def kept(target: Recording, path: Path | None, *, partial: Path | None = None) -> Iterator[None]:
    """Write the recording on the way out, also when measuring stops early: nothing measured is lost.

    One that is not complete goes to `partial`, where that is given.
    """
    try:
        yield
    finally:
        if path is not None and (target.complete or target.results):
            recordings.write(target, path if target.complete else partial or path)


def progress(quiet: bool, label: str = "") -> measure.Progress:
    """Return a progress reporter on stderr: one line, rewritten on a terminal."""
    if quiet:
        return lambda done, total, name: None
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def show(done: int, total: int, name: str) -> None:
        elapsed = time.monotonic() - start
        left = f", about {elapsed / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{label}{done}/{total} {name} ({elapsed:.0f} s{left})"
        sys.stderr.write(f"\r{line:<78}" if terminal else f"{line}\n")
        if terminal and done == total:
            sys.stderr.write("\n")
        sys.stderr.flush()

    return show
