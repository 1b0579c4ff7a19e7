"""The two commands of `tools/bench_speed.py`, without argparse and without printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from q4kit import exit_codes, provenance
from q4kit.bench import domains, plot, render, verify
from q4kit.bench.runner import Api, BenchConfig, Ended, Progress, RunResult, run_contexts, run_domains
from q4kit.bench.summary import summarise
from q4kit.claims.ledger import Claim
from q4kit.errors import UsageError
from q4kit.report import Report
from q4kit.server.client import Client


@dataclass(frozen=True)
class Outcome:
    """What a command leaves behind: a report, a picture where asked for, and the exit code."""

    report: Report
    exit_code: int
    png: bytes | None = None


@dataclass(frozen=True)
class DomainOptions:
    """The four-domain run: which domains, how many tokens each, by which route."""

    names: tuple[str, ...] = ()
    tokens: int = domains.OUTPUT_TOKENS
    limit: int | None = None
    """Questions per domain; None takes all ten."""
    api: Api = Api.NATIVE
    chat: Mapping[str, Any] | None = None


def run(
    client: Client,
    config: BenchConfig,
    domain_options: DomainOptions | None,
    *,
    progress: Progress,
    repro: str = "",
    picture: bool = False,
) -> Outcome:
    """Measure, and return a report even when the user or the server cut the run short."""
    chosen = _questions(domain_options) if domain_options is not None else []
    # Asked for first: a server that is down is an error, not a partial result, and Ctrl-C must not lose it.
    table = {"table": config.table[0]} if config.table else {}
    block = provenance.collect(client, tool="bench_speed", files=table)
    client.server_info()
    result = RunResult()
    if config.contexts:
        run_contexts(client, config, result, progress=progress)
    if domain_options is not None and result.ended is Ended.COMPLETE:
        run_domains(
            client, chosen, domain_options.tokens, result,
            api=domain_options.api, progress=progress, chat=domain_options.chat,
        )  # fmt: skip
    out = render.report(result, config, block, repro=repro)
    png = None
    points = [summarise(p) for p in result.points if p.valid]
    if picture and points:
        png = plot.speed_png(points, f"{block.get('model', {}).get('name', '')} on {_device(block)}")
    return Outcome(out, render.exit_code(result), png)


def verify_claim(
    claim: Claim,
    measurement: Mapping[str, Any] | None,
    client: Client | None,
    *,
    repeats: int,
    margin: float | None,
    alpha: float,
    vary: Sequence[str],
    progress: Progress,
    repro: str = "",
) -> Outcome:
    """Compare a stored measurement, or a fresh one of the claim's own conditions, with the claim."""
    fresh: Report | None = None
    if measurement is None:
        if client is None:
            raise UsageError("verify needs a measurement: --result FILE or --base-url URL")
        config, options = verify.config_for(claim, repeats)
        outcome = run(client, config, options, progress=progress)
        if outcome.exit_code not in (exit_codes.HOLDS, exit_codes.INCONCLUSIVE):
            return replace(outcome, png=None)
        fresh = outcome.report
        measurement = outcome.report.data
    answer = verify.judge(claim, measurement, margin=margin, alpha=alpha, vary=vary)
    report = verify.report(claim, answer, repro=repro)
    if fresh is not None:
        report.data["measurement"] = fresh.data
    return Outcome(report, answer.exit_code)


def write_outputs(outcome: Outcome, *, csv: Path | None = None) -> None:
    """Write the first table of the report as CSV (the other formats are the report's own)."""
    from q4kit.report import Table, write_atomic

    if csv is None:
        return
    tables = [b for b in outcome.report.blocks if isinstance(b, Table)]
    if not tables:
        raise UsageError("nothing was measured, so there is no table to write as CSV")
    write_atomic(csv, "\n".join(t.csv() for t in tables[:1]).encode())


def _questions(options: DomainOptions) -> list[domains.Question]:
    try:
        chosen = domains.questions(options.names or None)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error
    return [q for q in chosen if options.limit is None or q.index < options.limit]


def _device(block: Mapping[str, Any]) -> str:
    device = block.get("device", {})
    return str(device.get("name", device.get("kind", ""))) if isinstance(device, Mapping) else str(device)
