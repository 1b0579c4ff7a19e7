"""One gate run from settings to report: measure what is missing, judge what is there."""

from __future__ import annotations

import contextlib
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit import exit_codes
from q4kit.errors import UsageError
from q4kit.gate import judge, table, trees
from q4kit.gate.ballast import Ballast
from q4kit.gate.plan import Config, Plant
from q4kit.gate.run import Gate, Progress
from q4kit.gate.store import Store, planted_hash, settings, tree_id
from q4kit.report import Report, write_atomic, write_json
from q4kit.series import Series
from q4kit.server import model_folder


@dataclass(frozen=True)
class Result:
    """What a command hands to its CLI."""

    report: Report
    exit_code: int


def plant(file: Path | None, at: int | None, prefixes: tuple[int, ...]) -> Plant | None:
    """Return the planted fault of `--plant FILE --plant-at K` (default: the last prefix)."""
    if file is None:
        if at is not None:
            raise UsageError("--plant-at without --plant", remedy="name the patch file")
        return None
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", remedy="name a patch file") from error
    at = prefixes[-1] if at is None else at
    if at > prefixes[-1]:
        raise UsageError(f"--plant-at {at}: no chosen prefix has it", remedy=f"use {prefixes[-1]} or less")
    return Plant(file.resolve(), at, hashlib.sha256(content).hexdigest())


def run(
    config: Config,
    series: Series,
    folder: Path,
    *,
    progress: Progress,
    retry_failed: bool = False,
    table_only: bool = False,
) -> Result:
    """Measure what `folder` does not hold yet, judge all of it, and write `table.md` and `table.json` there."""
    began = time.monotonic()
    model_folder.check(config.model)
    if config.free_gib is not None and config.device != "cuda":
        raise UsageError("--ballast-free-gib needs --device cuda", remedy="leave it out: a CPU has no GPU memory")
    if config.jobs < 1:
        raise UsageError(f"--jobs {config.jobs}: must be 1 or more", remedy="start with the number of cores / 8")
    store = Store(folder.resolve())
    facts: dict[str, Any] = {}
    with store.locked():
        store.check_settings(settings(config))
        try:
            if not table_only:
                with contextlib.ExitStack() as stack:
                    if config.free_gib is not None:
                        facts["GPU ballast"] = _ballasts(stack, config, config.free_gib)
                    gate = Gate(config, series, store, progress, began=began)
                    ran = gate.run(retry_failed=retry_failed)
                if ran.complete:
                    for tree in store.trees():
                        trees.remove_tree(tree, series, config.python)
        finally:
            result = judged(config, series, store, facts)
            write_atomic(store.folder / "table.md", result.report.markdown().encode())
            write_json(store.folder / "table.json", result.report.to_json())
    return result


def _ballasts(stack: contextlib.ExitStack, config: Config, free_gib: float) -> str:
    """Hold memory on every GPU until the stack ends; return what the report says of it."""
    held = [Ballast(config.python, free_gib, gpu) for gpu in config.gpus]
    with ThreadPoolExecutor(len(held)) as pool:  # each loads torch
        list(pool.map(stack.enter_context, held))
    said = (f"GPU {b.gpu}: {b.report['held_gib']:.1f} GiB held, {b.report['free_gib']:.1f} GiB free" for b in held)
    return "; ".join(said)


def judged(config: Config, series: Series, store: Store, facts: dict[str, Any]) -> Result:
    """Return the verdicts over what is on disk."""
    records = {
        prefix: record
        for prefix in config.prefixes
        if (record := store.read(prefix)) is not None
        and record.tree == tree_id(series, prefix)
        and record.planted == planted_hash(config, prefix)
    }
    served = [prefix for prefix, record in records.items() if record.outcome == "served"]
    floor = store.floor(served[0]) if served else None
    rows = judge.judge_all(
        config.prefixes, records, store.recording, floor, tolerance=config.tolerance, expect=config.expect
    )
    code = judge.conclusion(rows)[2] if rows else exit_codes.INCONCLUSIVE
    return Result(table.report(config, series, rows, floor, facts), code)
