"""A finished needle run as a `Report`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from q4kit.needle.plan import Config
from q4kit.needle.runner import Ended, RunResult
from q4kit.needle.score import MEANING, Outcome
from q4kit.needle.summary import Judgement, Summary, may_claim
from q4kit.report import Report, Table

SCHEMA = "q4kit.needle/1"


def report(
    result: RunResult,
    summary: Summary,
    judgement: Judgement,
    config: Config,
    provenance: Mapping[str, Any],
    *,
    repro: str = "",
) -> Report:
    """Return the report: verdict, what may be claimed, grid, controls, logprob needle, misses."""
    out = Report(title="Needles", verdict=judgement.verdict.value, evidence=judgement.evidence)
    out.facts = [
        ("seed", config.seed),
        ("mode", f"{config.mode.value}, text {config.kind.value}, {config.distractors} distractors a prompt"),
    ]
    if repro:
        out.facts.append(("repro", repro))
    if result.ended is not Ended.COMPLETE:
        out.warnings.append(f"partial result ({result.ended.value}): {result.fault or 'stopped by the user'}")
    out.warnings += [f"control {c.control.value} at {c.length}: {c.good}/{c.trials} {c.what}"
                     for c in summary.controls if not c.passed]  # fmt: skip
    out.warnings += [f"logprob needle: {fault}" for fault in result.logprob_faults]
    if result.trials:
        out.blocks.append("May be claimed:\n" + "\n".join("  " + line for line in may_claim(summary)))
        out.blocks.append(grid_table(summary))
        out.blocks.append(control_table(summary))
    if summary.logprob_cells:
        out.blocks.append(logprob_table(summary))
    misses = miss_table(result)
    if misses.rows:
        out.blocks.append(misses)
    out.data = {
        "schema": SCHEMA,
        "partial": result.ended is not Ended.COMPLETE,
        "ended": result.ended.value,
        "fault": result.fault or None,
        "config": {
            **{k: v for k, v in config.__dict__.items() if k not in ("mode", "kind")},
            "mode": config.mode.value,
            "kind": config.kind.value,
            "lengths": list(config.lengths),
            "depths": list(config.depths),
        },
        "overall": summary.overall.to_json(),
        "by_length": [c.to_json() for c in summary.by_length],
        "cells": [c.to_json() for c in summary.cells],
        "controls": [c.to_json() for c in summary.controls],
        "logprob_cells": [c.to_json() for c in summary.logprob_cells],
        "logprob_by_length": [c.to_json() for c in summary.logprob_by_length],
        "trials": [t.to_json() for t in result.trials],
        "logprob_trials": [t.to_json() for t in result.logprobs],
        "provenance": dict(provenance),
    }
    return out


def grid_table(summary: Summary) -> Table:
    """Return k/n with its lower bound per length and depth."""
    table = Table(["length", "depth", "k/n", f"at least ({summary.confidence:.0%})", "outcomes"], title="Retrieval")
    for cell in [*summary.cells, *summary.by_length]:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(cell.outcomes.items()))
        depth = "all" if cell.depth is None else f"{cell.depth:.0%}"
        table.add(cell.length, depth, f"{cell.found}/{cell.trials}", f"{cell.bound:.1%}", outcomes)
    return table


def control_table(summary: Summary) -> Table:
    table = Table(["control", "length", "as expected", "passed", "expectation"], title="Controls")
    for c in summary.controls:
        table.add(c.control.value, c.length, f"{c.good}/{c.trials}", c.passed, c.what)
    return table


def logprob_table(summary: Summary) -> Table:
    """Return the gain of the forced code per cell, in nats per code."""
    table = Table(
        ["length", "depth", "n", "gain", "interval", "tokens a code"],
        title="Logprob needle: logprob of the code with the needle minus without it, nats a code",
    )
    for cell in [*summary.logprob_cells, *summary.logprob_by_length]:
        g = cell.gain
        interval = "one trial" if g.n < 2 else f"{g.low:+.3f} .. {g.high:+.3f}"
        table.add(cell.length, "all" if cell.depth is None else f"{cell.depth:.0%}", g.n, g.mean, interval, cell.tokens)
    return table


def miss_table(result: RunResult, limit: int = 20) -> Table:
    """Return the trials that did not come out FOUND (absent controls excepted), with the beginning of the answer."""
    table = Table(["control", "length", "depth", "class", "wanted", "found", "whose", "answer begins"], title="Misses")
    misses = [t for t in result.trials if t.score.outcome is not Outcome.FOUND and t.control.value != "absent"]
    for t in misses[:limit]:
        table.add(
            t.control.value, t.length, f"{t.depth:.1%}", t.score.outcome.value, t.code, t.score.found[:40],
            t.score.owner, repr(t.text[:40]),
        )  # fmt: skip
    seen = {t.score.outcome for t in misses[:limit]}
    table.notes = [f"{o.value}: {MEANING[o]}" for o in Outcome if o in seen]
    if len(misses) > limit:
        table.notes.append(f"... and {len(misses) - limit} more in the JSON result")
    return table
