"""From trials to cells, bounds, controls and the verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from q4kit import exit_codes
from q4kit.needle.plan import Control, Mode
from q4kit.needle.runner import Ended, LogprobTrial, RunResult, Trial
from q4kit.needle.score import BROKEN, RETRIEVAL, Outcome
from q4kit.stats.intervals import MeanInterval, clopper_pearson, t_interval, trials_for_lower_bound

BROKEN_LIMIT = 0.1
"""Above this share of trials without a judgeable answer the run says nothing about retrieval."""


class Verdict(StrEnum):
    RETRIEVED = "RETRIEVED"
    LOST = "LOST"
    NONE_FOUND = "NONE FOUND, AS EXPECTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    PARTIAL = "PARTIAL"


@dataclass(frozen=True)
class Cell:
    """One length x depth. `bound` is the one-sided lower Clopper-Pearson bound of the retrieval rate."""

    length: int
    depth: float | None
    found: int
    trials: int
    broken: int
    bound: float
    outcomes: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class ControlResult:
    """One control at one length: how many of its trials came out the known way."""

    control: Control
    length: int
    good: int
    trials: int
    what: str

    @property
    def passed(self) -> bool:
        return self.trials > 0 and self.good == self.trials

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "control": self.control.value, "passed": self.passed}


@dataclass(frozen=True)
class LogprobCell:
    """Gain of the forced code by the needle, nats a code, with a t interval over the trials of the cell."""

    length: int
    depth: float | None
    gain: MeanInterval
    tokens: float

    def to_json(self) -> dict[str, Any]:
        return {"length": self.length, "depth": self.depth, "gain": self.gain.to_json(), "tokens": self.tokens}


@dataclass(frozen=True)
class Summary:
    cells: list[Cell]
    by_length: list[Cell]
    overall: Cell
    controls: list[ControlResult]
    logprob_cells: list[LogprobCell]
    logprob_by_length: list[LogprobCell]
    broken_share: float
    confidence: float


def summarise(result: RunResult, mode: Mode, *, confidence: float = 0.95) -> Summary:
    """Return cells, controls and logprob cells of a run."""
    real = [t for t in result.trials if t.control is Control.NONE]
    lengths = sorted({t.length for t in real})
    depths = sorted({t.cell_depth for t in real})
    cells = [
        _cell([t for t in real if t.length == n and t.cell_depth == d], n, d, confidence)
        for n in lengths
        for d in depths
    ]
    by_length = [_cell([t for t in real if t.length == n], n, None, confidence) for n in lengths]
    gains = sorted({(t.length, t.cell_depth) for t in result.logprobs})
    return Summary(
        cells=[c for c in cells if c.trials or c.broken],
        by_length=by_length,
        overall=_cell(real, 0, None, confidence),
        controls=_controls(result.trials, mode),
        logprob_cells=[
            _gain([t for t in result.logprobs if (t.length, t.cell_depth) == key], key[0], key[1], confidence)
            for key in gains
        ],
        logprob_by_length=[
            _gain([t for t in result.logprobs if t.length == n], n, None, confidence)
            for n in sorted({t.length for t in result.logprobs})
        ],
        broken_share=sum(t.score.outcome in BROKEN for t in real) / len(real) if real else 0.0,
        confidence=confidence,
    )


def _cell(trials: Sequence[Trial], length: int, depth: float | None, confidence: float) -> Cell:
    judged = [t for t in trials if t.score.outcome in RETRIEVAL]
    found = sum(t.score.outcome is Outcome.FOUND for t in judged)
    bound = clopper_pearson(found, len(judged), confidence=confidence).low
    outcomes = Counter(t.score.outcome.value for t in trials)
    return Cell(length, depth, found, len(judged), len(trials) - len(judged), bound, dict(outcomes))


def _gain(trials: Sequence[LogprobTrial], length: int, depth: float | None, confidence: float) -> LogprobCell:
    interval = t_interval([t.gain for t in trials], confidence=confidence)
    return LogprobCell(length, depth, interval, sum(t.tokens for t in trials) / len(trials))


def _controls(trials: Sequence[Trial], mode: Mode) -> list[ControlResult]:
    found: list[ControlResult] = []
    for control in (Control.SHORT, Control.ABSENT, Control.SHIFTED):
        for length in sorted({t.length for t in trials if t.control is control}):
            chosen = [t for t in trials if t.control is control and t.length == length]
            good = sum(_as_expected(t, mode) for t in chosen)
            found.append(ControlResult(control, length, good, len(chosen), _WHAT[control]))
    return found


_WHAT = {
    Control.SHORT: "found over a short context",
    Control.ABSENT: "not produced when it is not there",
    Control.SHIFTED: "new code at a new place followed",
}


def _as_expected(trial: Trial, mode: Mode) -> bool:
    outcome = trial.score.outcome
    if trial.control is Control.ABSENT:
        if mode is Mode.CHAT:
            # NONE was on offer: naming any code instead is guessing.
            return outcome in (Outcome.SAID_NONE, Outcome.NO_CODE)
        return outcome not in (Outcome.FOUND, Outcome.PARTIAL)
    return outcome is Outcome.FOUND


def leaks(trials: Sequence[Trial]) -> list[Trial]:
    """Return absent-control trials whose answer holds the code that was not in the prompt."""
    return [
        t
        for t in trials
        if t.control is Control.ABSENT
        and t.score.outcome in (Outcome.FOUND, Outcome.PARTIAL, Outcome.FOUND_IN_THINKING_ONLY)
    ]


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    evidence: str
    exit_code: int


def judge(result: RunResult, summary: Summary, *, expect: str = "found", require: float | None = None) -> Judgement:
    """Return the verdict of a run.

    `expect` is `found` (every judged trial must find its code) or `none` (a model that cannot retrieve, such as a
    random one: no trial may). `require` asks for a lower bound of the overall rate.
    """
    all_ = summary.overall
    count = f"{all_.found}/{all_.trials} retrieved, at least {all_.bound:.0%} at {summary.confidence:.0%} confidence"
    if result.ended is Ended.INTERRUPTED:
        return Judgement(Verdict.PARTIAL, f"stopped by the user; so far {count}", exit_codes.INTERRUPTED)
    if result.ended is Ended.FAULT:
        return Judgement(Verdict.PARTIAL, f"{result.fault}; so far {count}", exit_codes.FAULT)
    nan = sum(t.score.outcome is Outcome.NAN for t in result.trials) + len(result.logprob_faults)
    if nan:
        return Judgement(Verdict.INVALID, f"NaN in {nan} answers: the numerics are broken", exit_codes.NEGATIVE)
    leaked = leaks(result.trials)
    if leaked:
        return Judgement(
            Verdict.INVALID, f"{len(leaked)} codes came back that were not in the prompt: {leaked[0].code}",
            exit_codes.NEGATIVE,
        )  # fmt: skip
    if summary.broken_share > BROKEN_LIMIT or not all_.trials:
        return Judgement(
            Verdict.INVALID,
            f"{all_.broken} of {all_.broken + all_.trials} answers cannot be judged (limit {BROKEN_LIMIT:.0%})",
            exit_codes.INCONCLUSIVE,
        )
    if expect == "none":
        ok = all_.found == 0
        return Judgement(
            Verdict.NONE_FOUND if ok else Verdict.RETRIEVED,
            count if ok else f"{count}, but none was expected",
            exit_codes.HOLDS if ok else exit_codes.NEGATIVE,
        )
    failed = [c for c in summary.controls if not c.passed]
    short = next((c for c in failed if c.control is Control.SHORT), None)
    if all_.found < all_.trials:
        why = "; not even over a short context, so this says nothing about length" if short else ""
        return Judgement(Verdict.LOST, count + why, exit_codes.NEGATIVE)
    if failed:
        names = ", ".join(f"{c.control.value} {c.good}/{c.trials} at {c.length}" for c in failed)
        return Judgement(Verdict.INVALID, f"{count}, but controls failed: {names}", exit_codes.INCONCLUSIVE)
    if require is not None and all_.bound < require:
        more = trials_for_lower_bound(require, confidence=summary.confidence) - all_.trials
        return Judgement(
            Verdict.INCONCLUSIVE, f"{count}; {require:.0%} needs {more} more trials", exit_codes.INCONCLUSIVE
        )
    return Judgement(Verdict.RETRIEVED, count, exit_codes.HOLDS)


def may_claim(summary: Summary) -> list[str]:
    """Return the sentences that this run supports, one a length; nothing beyond them."""
    lines = []
    for cell in summary.by_length:
        if cell.trials:
            lines.append(
                f"at {cell.length} tokens: {cell.found}/{cell.trials} codes retrieved; the true rate is at least "
                f"{cell.bound:.1%} with {summary.confidence:.0%} confidence"
            )
        if cell.broken:
            lines.append(f"at {cell.length} tokens: {cell.broken} answers could not be judged and are in no rate")
    need = trials_for_lower_bound(0.95, confidence=summary.confidence)
    lines.append(f"(a rate of at least 95 % needs {need} trials without a miss)")
    return lines
