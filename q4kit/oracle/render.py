"""Reports of the oracle: one structure from a comparison, a floor or a self-test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from q4kit.oracle.align import ItemPair
from q4kit.oracle.floor import Floor
from q4kit.oracle.judge import Comparison
from q4kit.oracle.recording import Recording
from q4kit.oracle.summary import SEED_MAX, SEED_MEAN, LegSummary
from q4kit.provenance import Difference
from q4kit.report import Report, Table, format_cell
from q4kit.stats.exchange import STATISTICS
from q4kit.stats.resample import Estimate

WORST_ROWS = 8
_LONGEST_VALUE = 60

LEG_NOTES = {
    "prefill": "teacher-forced tail of each prompt: sees prefill kernels, chunking and graphs; not decode",
    "decode": "greedy segments from fixed cuts: sees decode kernels, decode graphs, KV and state writes of decode",
}


def comparison_report(
    reference: Recording,
    candidate: Recording,
    floor: Floor | None,
    found: Comparison,
    pairs: Sequence[ItemPair],
    differences: Sequence[Difference],
) -> Report:
    """Return the report of one comparison."""
    report = Report(
        "logprob_diff compare",
        verdict=found.verdict,
        evidence=found.evidence,
        facts=[
            ("reference", _who(reference)),
            ("candidate", _who(candidate)),
            ("floor", _floor_line(floor)),
            ("fixed thresholds", _seed_policy(found)),
            *((f"{leg} leg", LEG_NOTES[leg]) for leg in found.legs),
        ],
        warnings=[*found.warnings],
    )
    for side, recording in (("reference", reference), ("candidate", candidate)):
        report.warnings += cache_warnings(side, recording.cache_unknown, len(recording.results))
    if found.heterogeneous:
        report.warnings.append(
            "the floor is not one population: " + ", ".join(found.heterogeneous) + " differ from the other runs"
        )
    if differences:
        report.blocks.append(_difference_table(differences))
    report.blocks += [_figures(found), _percentiles(found), _bins(found)]
    if found.outcome is not None:
        report.blocks.append(_tests(found))
    worst = _worst(pairs)
    if worst.rows:
        report.blocks.append(worst)
    report.data = {
        "legs": {name: _leg_json(leg) for name, leg in found.legs.items()},
        "floor": None if floor is None else {"kind": floor.kind, "runs": floor.runs, "size": found.floor_size},
        "test": None
        if found.outcome is None
        else {"p": found.outcome.p, "p_each": found.outcome.p_each, "spike_p": found.outcome.spike_p},
        "power": found.power,
        "seed_policy": {name: leg.seed_holds for name, leg in found.legs.items()},
        "self_consistency_k3": {name: value and value.to_json() for name, value in found.consistency.items()},
        "provenance": {"reference": reference.provenance, "candidate": candidate.provenance},
        "differences": [[each.field, each.left, each.right] for each in differences],
    }
    return report


def cache_warnings(what: str, unknown: int, items: int) -> list[str]:
    """Return what must be said where a prefix cache cannot be excluded: that, and what it means; nothing otherwise."""
    if not unknown:
        return []
    return [
        f"{what}: the server did not say for {unknown} of {items} items how many prompt tokens came from a prefix "
        "cache, so 0 is assumed and not proven (SGLang says it with --enable-cache-report)"
    ]


def floor_report(floor: Floor, sizes: Mapping[str, tuple[float, float, int]]) -> Report:
    """Return the report of a floor; `sizes` holds (largest mean, maximum, positions) of each leg."""
    report = Report(
        "logprob_diff floor",
        facts=[
            ("kind", floor.kind),
            ("runs", len(floor.runs)),
            ("server starts", floor.restarts),
            ("plan", floor.plan),
        ],
    )
    table = Table(
        ["leg", "positions", "mean |change|", "max |change|"], title="Largest difference between two runs, nats"
    )
    for leg, (mean, largest, positions) in sizes.items():
        table.add(leg, positions, mean, largest)
        if largest == 0:
            report.warnings.append(
                f"the {leg} floor is exactly zero: this machine repeats itself to the bit, so every difference "
                "will be DIFFERENT. For changes that may round otherwise, measure a variation floor (runs with "
                "another --chunked-prefill-size, say) or state a --tolerance."
            )
    runs = Table(["run", "time", "server started", "differs in"], title="Runs")
    for index, run in enumerate(floor.runs):
        report.warnings += cache_warnings(f"run {index}", run.get("cache_unknown", 0), len(floor.items))
        runs.add(index, run["time"], run["server_started"], ", ".join(run["differences"]) or None)
    report.blocks += [table, runs]
    report.data = {
        "sizes": {leg: {"mean": m, "max": x, "positions": n} for leg, (m, x, n) in sizes.items()},
        "runs": floor.runs,
        "provenance": floor.provenance,
    }
    return report


def _who(recording: Recording) -> str:
    block = recording.provenance
    series = block.get("series")
    state = f"{series.get('state')}({series.get('prefix')})" if isinstance(series, dict) else str(series)[:60]
    model = block.get("model", {}).get("name")
    version = block.get("sglang", {}).get("version")
    device = block.get("device", {}).get("name")
    return f"{model}, SGLang {version}, series {state}, {device}, {block.get('time')}"


def _floor_line(floor: Floor | None) -> str:
    if floor is None:
        return "none given"
    return f"{floor.kind}, {len(floor.runs)} runs, {floor.restarts} server starts"


def _seed_policy(found: Comparison) -> str:
    words = [
        f"{name} {'holds' if leg.seed_holds else 'violated'} (mean {leg.mean.value:.3g}, max {leg.maximum:.3g})"
        for name, leg in found.legs.items()
    ]
    return f"mean <= {SEED_MEAN}, max <= {SEED_MAX}: " + "; ".join(words)


def _difference_table(differences: Sequence[Difference]) -> Table:
    def short(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"

    table = Table(["field", "reference", "candidate"], title="Differences in provenance (allowed)")
    for difference in differences:
        table.add(difference.field, short(difference.left), short(difference.right))
    return table


def _figures(found: Comparison) -> Table:
    legs = list(found.legs.values())
    table = Table(["figure", *(leg.leg for leg in legs)], title="Candidate minus reference, nats [95 % interval]")

    def add(name: str, values: Sequence[Any]) -> None:
        table.add(name, *values)

    add("positions", [leg.positions for leg in legs])
    add("lost behind divergences", [leg.lost for leg in legs])
    add("changed at all", [leg.nonzero for leg in legs])
    add("mean |change|", [leg.mean for leg in legs])
    add("  floor", [found.floor_size.get(leg.leg, (None, None))[0] for leg in legs])
    add("max |change|", [leg.maximum for leg in legs])
    add("  floor", [found.floor_size.get(leg.leg, (None, None))[1] for leg in legs])
    add("RMS", [leg.rms for leg in legs])
    add("mean signed change", [leg.bias for leg in legs])
    add("signs + / -, p", [f"{leg.signs[0]} / {leg.signs[1]}, {leg.signs[2]:.2g}" for leg in legs])
    add("k3", [leg.k3 for leg in legs])
    add(
        "KL of top 10, proven .. conditional",
        [None if leg.kl is None else f"{leg.kl.low:.3g} .. {format_cell(leg.kl.high)}" for leg in legs],
    )
    add("argmax flips: near-ties", [len(leg.flips) - leg.real_flips for leg in legs])
    add("argmax flips: real", [leg.real_flips for leg in legs])
    add("diverged segments", [len(leg.divergences) for leg in legs])
    add("values that are bounds", [leg.bounds for leg in legs])
    notes = [
        f"decode against prefill inside the {side}: k3 {value}"
        for side, value in found.consistency.items()
        if isinstance(value, Estimate)
    ]
    table.notes = notes
    return table


def _percentiles(found: Comparison) -> Table:
    legs = list(found.legs.values())
    table = Table(["percentile", *(leg.leg for leg in legs)], title="Signed change, nats [95 % interval]")
    for percent in legs[0].percentiles:
        table.add(f"{percent} %", *(leg.percentiles[percent] for leg in legs))
    return table


def _bins(found: Comparison) -> Table:
    table = Table(
        ["leg", "place", "positions", "mean |change|", "max |change|", "flips: near-ties", "flips: real"],
        title="By place",
    )
    for leg in found.legs.values():
        for name, place in leg.bins.items():
            table.add(
                leg.leg, name, place.positions, place.mean, place.maximum, place.near_ties, place.real_flips
            )  # fmt: skip
    return table


def _tests(found: Comparison) -> Table:
    assert found.outcome is not None
    table = Table(["leg", "statistic", "p"], title="Is it one more run of the same thing? (redrawn within positions)")
    for name, p in sorted(found.outcome.p_each.items(), key=lambda entry: entry[1]):
        leg, _, statistic = name.partition("/")
        table.add(leg, STATISTICS[statistic], p)
    table.notes = [
        f"overall p {found.outcome.p:.3g} (corrected for looking at all of them); largest single position: chance "
        f"{found.outcome.spike_p:.3g}"
    ]
    return table


def _worst(pairs: Sequence[ItemPair]) -> Table:
    table = Table(
        ["item", "pos", "token", "reference", "candidate", "change", "reference's best", "candidate's best"],
        title="Worst positions",
    )
    rows = [(pair.name, row) for pair in pairs for row in pair.rows if row.logprob != row.ref.logprob]
    rows.sort(key=lambda entry: -abs(entry[1].logprob - entry[1].ref.logprob))
    for name, row in rows[:WORST_ROWS]:
        table.add(
            name,
            str(row.ref.pos),
            str(row.ref.token),
            row.ref.logprob,
            row.logprob,
            row.logprob - row.ref.logprob,
            " ".join(f"{token}:{value:.3f}" for token, value in row.ref.top[:3]),
            " ".join(f"{token}:{value:.3f}" for token, value in row.other.top[:3]),
        )
    return table


def _leg_json(leg: LegSummary) -> dict[str, Any]:
    return {
        "positions": leg.positions,
        "lost": leg.lost,
        "bounds": leg.bounds,
        "nonzero": leg.nonzero,
        "mean": leg.mean.to_json(),
        "rms": leg.rms.to_json(),
        "bias": leg.bias.to_json(),
        "max": leg.maximum,
        "percentiles": {str(percent): value.to_json() for percent, value in leg.percentiles.items()},
        "signs": list(leg.signs),
        "k3": leg.k3.to_json(),
        "kl": None if leg.kl is None else {"low": leg.kl.low, "high": leg.kl.high, "missing": leg.kl.missing},
        "flips": {"near_tie": len(leg.flips) - leg.real_flips, "real": leg.real_flips},
        "divergences": [[each.item, each.offset, each.margin] for each in leg.divergences],
        "bins": {
            name: {
                "positions": place.positions,
                "mean": place.mean,
                "max": place.maximum,
                "flips": {"near_tie": place.near_ties, "real": place.real_flips},
            }
            for name, place in leg.bins.items()
        },
    }
