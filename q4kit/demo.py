"""The one-page report of scripts/demo.sh, and whether the demo holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit import exit_codes
from q4kit.report import Report, Table

SERIES_APPLIED = 11
"""Exit code of `series.py status` for an applied series (docs/SERIES.md)."""

READER_LINE = "PLE rows: "
"""How the log line begins that names the open row reader (patch 0013)."""


@dataclass(frozen=True)
class Step:
    """One tool run of the demo: its result file's stem, what it proves, and what must come out."""

    stem: str
    proves: str
    verdict: str
    exit_code: int


STEPS: tuple[Step, ...] = (
    Step("chat", "the chat route answers, whole and streamed, twice the same", "HOLDS", exit_codes.HOLDS),
    Step("oracle", "stock and patched give the same logprobs", "EQUIVALENT", exit_codes.HOLDS),
    Step("fault-oracle", "a disturbed weight does not pass", "DIFFERENT", exit_codes.NEGATIVE),
    Step("needle", "exact lengths, controls and scoring on the live server (a random model finds nothing)", "", 0),
    Step("bench", "token counts of the live server", "", exit_codes.HOLDS),
)


def _load(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _reader(log: Path) -> str:
    """Return what the server's log says of the reader that serves the table's rows; empty without the line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(READER_LINE)[2] for line in lines if READER_LINE in line), "")


def build(results: Path) -> tuple[Report, int]:
    """Return the report over the files in `results`, and 0 when every step came out as it must, else 1.

    The server's log must say that the table is read from disk. Every step needs `STEM.json` (the tool's --json) and
    `STEM.exit` (its exit code); a missing file is a failed step.
    """
    table = Table(["step", "what it shows", "expected", "found", "evidence", "holds"])
    failed: list[str] = []
    series = _load(results / "series.json") or {}
    applied = series.get("state") == "applied"
    table.add("series", "the patches are on the installed SGLang", "applied", series.get("state"), "", applied)
    if not applied:
        failed.append("series")
    reader = _reader(results / "patched.log")
    table.add(
        "disk", "the n-gram table is served from disk", "a row reader", reader or "none in the log", "", bool(reader)
    )
    if not reader:
        failed.append("disk")
    for step in STEPS:
        data = _load(results / f"{step.stem}.json") or {}
        try:
            code = int((results / f"{step.stem}.exit").read_text())
        except (OSError, ValueError):
            code = -1
        verdict = data.get("verdict")
        holds = bool(data) and code == step.exit_code and (not step.verdict or verdict == step.verdict)
        expected = step.verdict or f"exit {step.exit_code}"
        found = f"{verdict or 'no result'}, exit {code}"
        table.add(step.stem, step.proves, expected, found, data.get("evidence") or "", holds)
        if not holds:
            failed.append(step.stem)
    report = Report(
        title="Demo: the patched SGLang serves a tiny random Qwen4-Exp",
        verdict="HOLDS" if not failed else "FAILS",
        evidence="every step came out as it must" if not failed else f"look at: {', '.join(failed)}",
        blocks=[table],
        data={"failed": failed, "series": series},
    )
    fault = _load(results / "fault.json")
    if fault:
        report.facts.append(("planted fault", {k: fault[k] for k in ("tensor", "relative", "rms_change")}))
    for stem, title in (("bench", "Speed"), ("needle", "Needle")):
        markdown = results / f"{stem}.md"
        if markdown.exists():
            report.blocks.append(f"### {title} (a CPU and a random model: mechanics, not a speed claim)")
            report.blocks.append(markdown.read_text(encoding="utf-8"))
    return report, exit_codes.NEGATIVE if failed else exit_codes.HOLDS
