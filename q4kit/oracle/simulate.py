"""Self-test: faults of known size, planted where the answer is known, and the share that is caught.

By default the floor is simulated from the published campaign's own noise: heavy-tailed (log-normal,
sigma 1.6), mean |change| between two runs 0.002 nats, 450 positions a leg, five A/A runs. Every trial
draws a new reference, a new floor and a new candidate, so the rates hold over floors and not only for a
lucky one. With a measured floor, its own runs are redrawn position by position instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from q4kit.errors import Q4Error, UsageError
from q4kit.oracle import align
from q4kit.oracle import recording as recordings
from q4kit.oracle.floor import Floor
from q4kit.oracle.judge import REQUIRED_POWER
from q4kit.oracle.measure import checked_position
from q4kit.oracle.plan import Options, make_plan
from q4kit.oracle.recording import ItemResult, Position, Recording
from q4kit.oracle.summary import SEED_MAX, SEED_MEAN
from q4kit.report import Report, Table
from q4kit.stats.exchange import ExchangeTest, Group
from q4kit.stats.intervals import clopper_pearson
from q4kit.stats.resample import Floats

POSITIONS, BINS, AA_RUNS = 450, 6, 6
"""Positions of a leg, prompts they belong to, A/A runs (the reference and five more)."""
NOISE_MEAN, NOISE_SIGMA = 0.002, 1.6
REDRAWS = 500
MAX_FALSE_ALARMS = 0.01
"""Required of the self-test; the test is built for half of it."""
REQUIRED = "2 % of tokens off by 0.2 nats"
NOTHING = "nothing (A/A)"
SWEEP = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Sizes tried for the smallest fault on 2 % of tokens, nats."""
_MORE = 2.5
"""The two rows with a required rate get this many times the trials."""

Draw = np.random.Generator
Plant = Callable[[Floats, npt.NDArray[np.int64], Floats, Draw], Floats]
"""(candidate values [positions], bins, noise of a second run [positions], generator) -> faulty values."""


def share_off(share: float, size: float) -> Plant:
    """Return a fault: `share` of the positions off by `size` nats, each in a random direction."""

    def plant(values: Floats, bins: npt.NDArray[np.int64], noise: Floats, draw: Draw) -> Floats:
        count = max(round(share * values.size), 1)
        hit = draw.choice(values.size, size=count, replace=False)
        faulty = values.copy()
        faulty[hit] += size * draw.choice([-1.0, 1.0], size=count)
        return faulty

    return plant


def one_off(size: float) -> Plant:
    """Return a fault: a single position off by `size` nats."""
    return share_off(0.0, size)


def shift_all(size: float) -> Plant:
    """Return a fault: every position lower by `size` nats."""
    return lambda values, bins, noise, draw: values - size


def shift_bin(size: float) -> Plant:
    """Return a fault: one prompt's positions lower by `size` nats (a damaged page, a lost prefix)."""
    return lambda values, bins, noise, draw: values - size * (bins == draw.integers(bins.max() + 1))


def more_noise(factor: float) -> Plant:
    """Return a fault: the run's own noise is `factor` times as large."""
    return lambda values, bins, noise, draw: values + (factor - 1) * noise


FAULTS: dict[str, Plant | None] = {
    NOTHING: None,
    REQUIRED: share_off(0.02, 0.2),
    "2 % of tokens off by 0.1 nats": share_off(0.02, 0.1),
    "5 % of tokens off by 0.1 nats": share_off(0.05, 0.1),
    "3 of 450 tokens off by 0.2 nats": share_off(3 / 450, 0.2),
    "one prompt lower by 0.02 nats": shift_bin(0.02),
    "all tokens lower by 0.002 nats": shift_all(0.002),
    "noise x 3": more_noise(3.0),
    "noise x 2": more_noise(2.0),
    "one token off by 4 nats": one_off(4.0),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a fault was caught."""

    caught: int
    trials: int
    seed_caught: int

    @property
    def value(self) -> float:
        """Share caught by this oracle."""
        return self.caught / self.trials

    @property
    def seed(self) -> float:
        """Share caught by the published fixed thresholds."""
        return self.seed_caught / self.trials

    def interval(self) -> str:
        """Return the 95 % interval of the share caught."""
        found = clopper_pearson(self.caught, self.trials, side="two-sided")
        return f"{100 * found.low:.1f} .. {100 * found.high:.1f} %"


@dataclass(slots=True)
class SelfTest:
    """Outcome of the self-test.

    Attributes:
        source: where the noise came from.
        rates: per planted fault; `NOTHING` is the false-alarm rate.
        sweep: per size on 2 % of tokens.
        structural: per broken input, the error that named it ("" when it was not refused).
    """

    source: str
    rates: dict[str, Rate]
    sweep: dict[float, Rate]
    structural: dict[str, str]
    required: bool = True
    """Whether the required rates were asked of this noise (a measured floor may be too coarse)."""

    @property
    def smallest(self) -> float | None:
        """Return the smallest swept size from which on everything is caught at 99 %, nats."""
        found = None
        for size in sorted(self.sweep, reverse=True):
            if self.sweep[size].value < REQUIRED_POWER:
                break
            found = size
        return found

    @property
    def missed_by_seed(self) -> list[str]:
        """Return the faults that are caught here at 99 % and by the fixed thresholds in under 10 %."""
        return [
            name
            for name, rate in self.rates.items()
            if name != NOTHING and rate.value >= REQUIRED_POWER and rate.seed < 0.1
        ]

    @property
    def holds(self) -> bool:
        """Whether detection, false alarms and refusals are as required."""
        nothing = self.rates[NOTHING]
        # Few trials show 1.2 % now and then at a true 0.5 %: fail only when more than 1 % is established.
        false_alarm = clopper_pearson(nothing.caught, nothing.trials, side="lower").low
        return (
            self.rates[REQUIRED].value >= REQUIRED_POWER
            and false_alarm <= MAX_FALSE_ALARMS
            and all(self.structural.values())
        )


@dataclass(slots=True)
class _Source:
    """Draws A/A data: one column a run, and one more column of a further run's noise."""

    name: str
    shapes: list[tuple[int, int]]
    bins: list[npt.NDArray[np.int64]]
    draw: Callable[[Draw], list[Floats]]
    names: list[str] = field(default_factory=lambda: list(align.LEGS))


def published_noise() -> _Source:
    """Return the simulated floor calibrated to the published campaign."""
    draw = np.random.default_rng(0)
    trial = _signed_lognormal(draw, (200_000, 2))
    scale = NOISE_MEAN / float(np.abs(trial[:, 0] - trial[:, 1]).mean())
    bins = np.arange(POSITIONS, dtype=np.int64) * BINS // POSITIONS
    return _Source(
        name=f"simulated: log-normal sigma {NOISE_SIGMA}, mean |change| {NOISE_MEAN} nats, {POSITIONS} positions a leg",
        shapes=[(POSITIONS, AA_RUNS + 1)] * 2,
        bins=[bins] * 2,
        draw=lambda generator: [scale * _signed_lognormal(generator, (POSITIONS, AA_RUNS + 2)) for _ in align.LEGS],
    )


def _signed_lognormal(draw: Draw, shape: tuple[int, int]) -> Floats:
    return np.asarray(draw.lognormal(0.0, NOISE_SIGMA, shape) * draw.choice([-1.0, 1.0], shape))


def leg_values(floor: Floor, leg: str) -> Floats | None:
    """Return the floor's values of a leg, shape [positions, runs]; None when it has none."""
    values, _ = _leg_table(floor, leg)
    return np.array(values) if values else None


def _leg_table(floor: Floor, leg: str) -> tuple[list[list[float]], list[int]]:
    values, bins = [], []
    prompts = list(dict.fromkeys(item.item.prompt for item in floor.items))
    for item in floor.items:
        if item.item.leg != leg:
            continue
        first = 0 if leg == "prefill" else 1
        for offset in range(first, min(len(run) for run in item.logprobs)):
            values.append([run[offset] for run in item.logprobs])
            bins.append(prompts.index(item.item.prompt))
    return values, bins


def measured_noise(floor: Floor) -> _Source:
    """Return the noise of a measured floor, redrawn position by position among its runs."""
    tables = {leg: _leg_table(floor, leg) for leg in align.LEGS}
    kept = {
        leg: (np.array(values), np.array(bins, dtype=np.int64))
        for leg, (values, bins) in tables.items()
        if values and float(np.ptp(np.array(values), axis=1).max()) > 0
    }
    if not kept:
        raise UsageError(
            "this floor is exactly zero: any planted fault is caught, there is nothing to test",
            remedy="Run selftest without --floor, or with a variation floor.",
        )
    runs = len(floor.runs)
    if runs < 3:
        raise UsageError(f"{runs} runs in the floor, selftest needs 3 (one plays the candidate)")

    def draw(generator: Draw) -> list[Floats]:
        drawn = []
        for values, _ in kept.values():
            shuffled = generator.permuted(values, axis=1)
            spare = generator.permuted(values, axis=1)[:, :1] - values.mean(axis=1, keepdims=True)
            drawn.append(np.concatenate([shuffled, spare], axis=1))
        return drawn

    return _Source(
        name=f"measured floor: {runs} runs; positions: "
        + ", ".join(f"{leg} {values.shape[0]}" for leg, (values, _) in kept.items()),
        shapes=[values.shape for values, _ in kept.values()],
        bins=[bins for _, bins in kept.values()],
        draw=draw,
        names=list(kept),
    )


def _rate(source: _Source, test: ExchangeTest, plant: Plant | None, trials: int, seed: int) -> Rate:
    """Return how often `plant`, put into the last leg or the first by turns, is caught."""
    draw = np.random.default_rng(seed)
    caught = seed_caught = 0
    for trial in range(trials):
        tables = source.draw(draw)
        groups, alarm = [], False
        for number, table in enumerate(tables):
            values, spare = table[:, :-1].copy(), table[:, -1]
            if plant is not None and number == trial % len(tables):
                values[:, 0] = plant(values[:, 0], source.bins[number], spare, draw)
            change = np.abs(values[:, 0] - values[:, 1])
            alarm |= bool(change.mean() > SEED_MEAN or change.max() > SEED_MAX)
            groups.append(Group(source.names[number], values, source.bins[number]))
        caught += test.run(groups).alarm
        seed_caught += alarm
    return Rate(caught, trials, seed_caught)


def run(floor: Floor | None, *, trials: int = 400, seed: int = 1) -> SelfTest:
    """Return the self-test on a measured floor, or on the published noise."""
    if trials < 100:
        raise UsageError(f"--trials {trials}: at least 100, or no rate near 99 % can be told")
    source = measured_noise(floor) if floor else published_noise()
    test = ExchangeTest(source.shapes, redraws=REDRAWS, seed=seed)
    rates = {
        name: _rate(source, test, plant, int(trials * _MORE) if name in (NOTHING, REQUIRED) else trials // 2, seed + at)
        for at, (name, plant) in enumerate(FAULTS.items())
    }
    sweep: dict[float, Rate] = {}
    for at, size in enumerate(sorted(SWEEP, reverse=True)):
        sweep[size] = _rate(source, test, share_off(0.02, size), trials // 4, seed + 100 + at)
        if sweep[size].value < 0.5:
            break
    return SelfTest(source.name, rates, dict(sorted(sweep.items())), structural_faults())


# -- broken inputs that must be refused by name -----------------------------------------------------


def small_recording() -> Recording:
    """Return a synthetic recording with both legs, for the refusals."""
    options = Options(scored=16, decode_tokens=5, top=3)
    prompts = {"a": [7 + index % 40 for index in range(80)], "b": [9 + index % 50 for index in range(120)]}
    provenance = {"model": {"config_sha256": "c", "weights": "w", "dtype": "d"}, "device": {"kind": "k", "name": "n"}}
    header = {
        "backend": "sglang",
        "prompt_set": {"name": "synthetic", "sha256": "0"},
        "tokenizer": "t",
        "options": dataclasses.asdict(options),
        "provenance": provenance,
    }
    made = Recording(header, prompts)
    for item in make_plan(prompts, options):
        sequence = prompts[item.prompt][: item.length] + [11 + index for index in range(item.generate)]
        positions = [
            Position(pos, sequence[pos], -1.25, [(sequence[pos], -1.25), (1, -1.5), (2, -2.0)], None)
            for pos in range(item.first, len(sequence))
        ]
        made.results.append(ItemResult(item, positions, 0))
    return made


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except Q4Error as error:
        return str(error)
    return ""


def structural_faults() -> dict[str, str]:
    """Return, per broken input, the refusal it meets."""
    good = small_recording()

    def broken(change: Callable[[Recording], None]) -> str:
        other = small_recording()
        change(other)

        def both() -> None:
            align.check_plans(good, recordings.decode(recordings.encode(other), "candidate"))
            align.pair(good, other)

        return _refusal(both)

    def header(name: str, value: Any) -> Callable[[Recording], None]:
        return lambda other: other.header.__setitem__(name, value)

    def shift(other: Recording) -> None:
        for position in other.results[0].positions:
            position.token += 1

    def swap(other: Recording) -> None:
        positions = other.results[0].positions
        positions[1], positions[2] = positions[2], positions[1]

    def twice(other: Recording) -> None:
        positions = other.results[0].positions
        positions[1] = positions[0]

    return {
        "NaN log-probability": _refusal(lambda: checked_position(9, 5, (math.nan, 5), (), "prefill/a")),
        "token ids shifted by one": broken(shift),
        "two positions swapped": broken(swap),
        "one position twice": broken(twice),
        "one position missing": broken(lambda other: other.results[0].positions.__delitem__(-1)),
        "no positions at all": broken(lambda other: other.results.clear()),
        "another tokenizer": broken(header("tokenizer", "u")),
        "another prompt set": broken(header("prompt_set", {"name": "synthetic", "sha256": "1"})),
        "other prompt ids": broken(lambda other: other.prompts["a"].__setitem__(0, 1)),
        "another model": broken(lambda other: other.provenance["model"].__setitem__("config_sha256", "x")),
        "file cut short": _refusal(lambda: recordings.decode(recordings.encode(good)[:-200], "candidate")),
        "file edited": _refusal(
            lambda: recordings.decode(recordings.encode(good).replace(b"-1.25,", b"-1.26,", 1), "candidate")
        ),
    }


def report(found: SelfTest) -> Report:
    """Return the report of a self-test."""
    required, nothing = found.rates[REQUIRED], found.rates[NOTHING]
    result = Report(
        "logprob_diff selftest",
        verdict="HOLDS" if found.holds else "FAILS",
        evidence=f"{REQUIRED}: caught in {required.value:.2%}; false alarms {nothing.value:.2%}",
        facts=[
            ("noise", found.source),
            ("smallest fault on 2 % of tokens caught at 99 %", f"{found.smallest} nats"),
            ("caught here, missed by mean <= 0.01 and max <= 0.5", "; ".join(found.missed_by_seed) or "none"),
        ],
    )
    table = Table(["planted fault", "caught %", "95 % interval", "fixed thresholds %", "trials"], title="Detection")
    for name, rate in found.rates.items():
        table.add(name, round(100 * rate.value, 2), rate.interval(), round(100 * rate.seed, 2), rate.trials)
    sweep = Table(["nats on 2 % of tokens", "caught %", "95 % interval", "trials"], title="Resolution")
    for size, rate in found.sweep.items():
        sweep.add(size, round(100 * rate.value, 2), rate.interval(), rate.trials)
    refusals = Table(["broken input", "refused with"], title="Refusals")
    for name, message in found.structural.items():
        refusals.add(name, message or "NOT REFUSED")
    result.blocks = [table, sweep, refusals]
    result.data = {
        "detection": required.value,
        "false_alarm": nothing.value,
        "smallest_caught": found.smallest,
        "missed_by_seed": found.missed_by_seed,
        "rates": {
            name: {"caught": rate.caught, "trials": rate.trials, "seed_policy": rate.seed_caught}
            for name, rate in found.rates.items()
        },
        "structural": found.structural,
    }
    return result
