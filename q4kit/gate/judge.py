"""From records and recordings to verdicts: each prefix against the last one before it that served."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from q4kit import exit_codes
from q4kit.gate.plan import Expectation
from q4kit.gate.store import Record
from q4kit.oracle import align, judge
from q4kit.oracle.floor import Floor
from q4kit.oracle.judge import Comparison
from q4kit.oracle.recording import Recording


class Verdict(StrEnum):
    """What the gate says about one prefix."""

    REFERENCE = "REFERENCE"
    """The first prefix that served: nothing to compare it with."""
    EQUIVALENT = judge.EQUIVALENT
    DIFFERENT = judge.DIFFERENT
    INCONCLUSIVE = judge.INCONCLUSIVE
    FAILS = "FAILS"
    """Does not serve, and neither did any prefix before it: a result, no judgement."""
    FAILS_AS_EXPECTED = "FAILS AS EXPECTED"
    FAILS_OTHERWISE = "FAILS OTHERWISE"
    """Was expected to fail with another line."""
    BROKEN = "BROKEN"
    """Does not serve although a prefix before it did, or although it was expected to."""
    SERVES_UNEXPECTEDLY = "SERVES UNEXPECTEDLY"
    UNKNOWN_ARGUMENT = "UNKNOWN ARGUMENT"
    """An argument comes with a later patch: nothing was started."""
    MISSING = "NOT MEASURED"


NEGATIVE = frozenset({Verdict.DIFFERENT, Verdict.BROKEN, Verdict.FAILS_OTHERWISE, Verdict.SERVES_UNEXPECTEDLY})


@dataclass(frozen=True)
class Row:
    """One prefix with its verdict; `against` is the prefix it was compared with."""

    prefix: int
    record: Record | None
    verdict: Verdict
    evidence: str = ""
    against: int | None = None
    comparison: Comparison | None = None


def judge_all(
    prefixes: Sequence[int],
    records: Mapping[int, Record],
    recording: Callable[[int], Recording],
    floor: Floor | None,
    *,
    tolerance: float | None = None,
    expect: Expectation | None = None,
) -> list[Row]:
    """Return one row a prefix, and behind them the whole way: the last served prefix against the first.

    Args:
        recording: returns the oracle recording of a served prefix.
    """
    rows: list[Row] = []
    served: list[int] = []
    for prefix in prefixes:
        record = records.get(prefix)
        if record is None:
            rows.append(Row(prefix, None, Verdict.MISSING, "run the gate again: it goes on where it stopped"))
        elif record.outcome == "argument":
            rows.append(Row(prefix, record, Verdict.UNKNOWN_ARGUMENT, record.reason))
        elif record.outcome == "failed":
            rows.append(_failed(record, bool(served), expect))
        elif expect is not None and prefix < expect.serves_from:
            rows.append(Row(prefix, record, Verdict.SERVES_UNEXPECTEDLY, f"expected to fail with {expect.pattern!r}"))
        else:
            rows.append(_served(record, served[-1] if served else None, recording, floor, tolerance))
            served.append(prefix)
    if len(served) > 2:
        rows.append(_served(records[served[-1]], served[0], recording, floor, tolerance))
    return rows


def _failed(record: Record, served_before: bool, expect: Expectation | None) -> Row:
    where = f"{record.stage}: {record.reason}"
    if expect is not None and record.prefix < expect.serves_from:
        as_said = re.search(expect.pattern, record.reason) is not None
        verdict = Verdict.FAILS_AS_EXPECTED if as_said else Verdict.FAILS_OTHERWISE
    else:
        verdict = Verdict.BROKEN if served_before or expect is not None else Verdict.FAILS
    return Row(record.prefix, record, verdict, where)


def _served(
    record: Record,
    against: int | None,
    recording: Callable[[int], Recording],
    floor: Floor | None,
    tolerance: float | None,
) -> Row:
    if against is None:
        return Row(record.prefix, record, Verdict.REFERENCE)
    reference, candidate = recording(against), recording(record.prefix)
    align.check_plans(reference, candidate)
    found = judge.compare(reference, candidate, floor, tolerance=tolerance)
    return Row(record.prefix, record, Verdict(found.verdict), found.evidence, against, found)


def conclusion(rows: Sequence[Row]) -> tuple[str, str, int]:
    """Return verdict, evidence and exit code of a whole run.

    1 with any negative row; 3 when something is missing, not timed or inconclusive, or nothing was compared; else 0.
    """
    negative = [row for row in rows if row.verdict in NEGATIVE]
    if negative:
        first = negative[0]
        return "DOES NOT HOLD", f"prefix {first.prefix}: {first.verdict}: {first.evidence}", exit_codes.NEGATIVE
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    if counts[Verdict.MISSING]:
        return "PARTIAL", f"{counts[Verdict.MISSING]} prefixes are not measured", exit_codes.INCONCLUSIVE
    untimed = sorted({row.prefix for row in rows if row.record is not None and not row.record.timed})
    if untimed:
        return "PARTIAL", f"{len(untimed)} prefixes are not timed", exit_codes.INCONCLUSIVE
    open_rows = [row for row in rows if row.verdict is Verdict.INCONCLUSIVE]
    if open_rows:
        return (
            "INCONCLUSIVE",
            f"prefix {open_rows[0].prefix}: {open_rows[0].evidence}",
            exit_codes.INCONCLUSIVE,
        )
    if not counts[Verdict.EQUIVALENT] and not counts[Verdict.FAILS_AS_EXPECTED]:
        return "INCONCLUSIVE", "no two prefixes served: nothing was compared", exit_codes.INCONCLUSIVE
    said = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return "HOLDS", ", ".join(said), exit_codes.HOLDS
