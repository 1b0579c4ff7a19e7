"""The report of a gate run: patch -> oracle verdict, speed, boot time, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from q4kit.gate.judge import Row, conclusion
from q4kit.gate.plan import Config
from q4kit.oracle.floor import Floor
from q4kit.report import Report, Table
from q4kit.series import Series

COLUMNS = (
    "prefix", "patch", "oracle", "against", "max |change|", "decode tok/s", "prefill tok/s", "boot s", "RSS GiB",
    "peak GiB", "GPU GiB", "on GPU",
)  # fmt: skip


def patch_name(series: Series, prefix: int) -> str:
    """Return the subject of the last patch of a prefix."""
    return series.entries[prefix - 1].subject if prefix else f"the pin, {series.base.tag}"


def report(config: Config, series: Series, rows: Sequence[Row], floor: Floor | None, facts: dict[str, Any]) -> Report:
    """Return the report over judged rows."""
    verdict, evidence, _ = conclusion(rows)
    context = max(config.bench.contexts)
    table = Table(
        COLUMNS,
        notes=[
            f"Speeds: mean of {config.bench.repeats} requests one at a time, {context} prompt tokens, "
            f"{config.bench.tokens} generated.",
            "Each prefix is compared with the one before it in this table that served (column against).",
            "RSS: sum over the server's processes; peak: sum of each one's own peak, an upper bound.",
            "GPU GiB: given back when it ended. On GPU: how many servers, itself included, shared the GPU and the "
            "memory left free on it; all but the one that is timed are paused.",
        ],
    )
    shown: set[int] = set()
    for row in rows:
        whole = row.prefix in shown
        shown.add(row.prefix)
        table.add(*_cells(series, row, context, whole))
    details = [
        f"prefix {row.prefix} ({patch_name(series, row.prefix)}): {row.evidence}"
        for row in rows
        if row.evidence and not row.evidence.startswith("bit-identical")
    ]
    out = Report(
        "gate",
        verdict=verdict,
        evidence=evidence,
        facts=[
            ("model", config.model.name),
            ("device", config.device),
            ("server arguments", " ".join(config.arguments())),
            ("floor", _floor_line(floor)),
            *facts.items(),
        ],
        blocks=[table, *details],
    )
    if config.plant is not None:
        out.warnings.append(f"a fault is planted from prefix {config.plant.at} on: {config.plant.file.name}")
    out.data = {"rows": [_row_json(series, row) for row in rows]}
    return out


def _floor_line(floor: Floor | None) -> str:
    return "none" if floor is None else f"{len(floor.runs)} runs over {floor.restarts} server starts ({floor.kind})"


def _cells(series: Series, row: Row, context: int, whole: bool) -> list[Any]:
    record = row.record
    change = max((leg.maximum for leg in row.comparison.legs.values()), default=None) if row.comparison else None
    name = "the whole way" if whole else patch_name(series, row.prefix)
    head = [row.prefix, name, str(row.verdict), row.against, change]
    if record is None or record.outcome != "served" or whole:
        return [*head, *[None] * (len(COLUMNS) - len(head))]
    speed: dict[str, Any] = next((each for each in record.speed if each["context"] == context), {})
    return [
        *head,
        speed.get("decode_tok_s"),
        speed.get("prefill_tok_s"),
        record.boot_s and round(record.boot_s, 1),
        record.rss_gib and round(record.rss_gib, 2),
        record.peak_rss_gib and round(record.peak_rss_gib, 2),
        record.gpu_gib if record.gpu_gib is None else round(record.gpu_gib, 2),
        record.sharing if record.gpu else None,
    ]


def _row_json(series: Series, row: Row) -> dict[str, Any]:
    legs = row.comparison.legs if row.comparison else {}
    return {
        "prefix": row.prefix,
        "patch": series.entries[row.prefix - 1].file if row.prefix else None,
        "subject": patch_name(series, row.prefix),
        "verdict": str(row.verdict),
        "evidence": row.evidence,
        "against": row.against,
        "legs": {
            name: {
                "positions": leg.positions,
                "changed": leg.nonzero,
                "lost": leg.lost,
                "mean": leg.mean.value,
                "max": leg.maximum,
                "seed_rule_holds": leg.seed_holds,
            }
            for name, leg in legs.items()
        },
        "record": row.record.to_json() if row.record else None,
    }
