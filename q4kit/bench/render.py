"""A finished run as a `Report`: headline, tables, warnings, and everything raw in `data`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from q4kit import exit_codes
from q4kit.bench import domains
from q4kit.bench.accounting import Refusal
from q4kit.bench.runner import BenchConfig, Ended, RunResult
from q4kit.bench.summary import DomainSummary, PointSummary, summarise, summarise_domains
from q4kit.report import Report, Table
from q4kit.stats.intervals import MeanInterval

SCHEMA = "q4kit.bench/1"
NOISY_CV = 0.05
"""Standard deviation over mean of a rate, above which the report warns."""


def report(result: RunResult, config: BenchConfig, provenance: Mapping[str, Any], *, repro: str = "") -> Report:
    """Return the report of a run, complete or cut short."""
    points = [summarise(p) for p in result.points if p.repeats]
    rows = summarise_domains(result.answers)
    refused = sum(len(p.repeats) - len(p.valid) for p in result.points) + sum(
        not a.sample.valid for a in result.answers
    )
    measured = sum(len(p.repeats) for p in result.points) + len(result.answers)
    if result.ended is not Ended.COMPLETE:
        verdict = "PARTIAL"
    elif not measured or refused == measured:
        verdict = "REFUSED"
    else:
        verdict = "MEASURED" if not refused else "PARTLY REFUSED"
    out = Report(title="Speed", verdict=verdict, evidence=f"{measured - refused} of {measured} requests valid")
    out.facts = [("repro", repro)] if repro else []
    if result.ended is not Ended.COMPLETE:
        why = result.fault or "stopped by the user"
        out.warnings.append(f"partial result ({result.ended.value}): {why}")
    out.warnings += _warnings(result, points)
    if points:
        out.blocks.append(speed_table(points))
        out.blocks.append(detail_table(points))
        load = load_table(result)
        if load.rows:
            out.blocks.append(load)
    if rows:
        out.blocks.append(domain_table(rows))
    details = _refusal_lines(result)
    if details:
        out.blocks.append("Refused:\n" + "\n".join(details))
    out.data = {
        "schema": SCHEMA,
        "partial": result.ended is not Ended.COMPLETE,
        "ended": result.ended.value,
        "fault": result.fault or None,
        "config": {
            "contexts": list(config.contexts),
            "kinds": [k.value for k in config.kinds],
            "tokens": config.tokens,
            "repeats": config.repeats,
            "seed": config.seed,
            "page_cache": config.page_cache,
            "domain_prompts_sha256": domains.fingerprint() if result.answers else None,
        },
        "points": [
            {
                "context": p.context,
                "kind": p.kind.value,
                "tokens": p.tokens,
                "summary": summarise(p).to_json() if p.repeats else None,
                "warmup": p.warmup.to_json() if p.warmup else None,
                "resend": p.resend.to_json() if p.resend else None,
                "samples": [r.to_json() for r in p.repeats],
            }
            for p in result.points
        ],
        "domains": [r.to_json() for r in rows],
        "answers": [{"domain": a.domain, "index": a.index, **a.sample.to_json()} for a in result.answers],
        "provenance": dict(provenance),
    }
    return out


def exit_code(result: RunResult) -> int:
    """Return 0 when every request is valid, 1 on NaN, 3 when any was refused, 4 on a fault, 130 on Ctrl-C."""
    if result.ended is Ended.INTERRUPTED:
        return exit_codes.INTERRUPTED
    if result.ended is Ended.FAULT:
        return exit_codes.FAULT
    samples = [r.sample for p in result.points for r in p.repeats] + [a.sample for a in result.answers]
    if any(Refusal.NAN in s.refusals for s in samples):
        return exit_codes.NEGATIVE
    return exit_codes.HOLDS if samples and all(s.valid for s in samples) else exit_codes.INCONCLUSIVE


def speed_table(points: Sequence[PointSummary]) -> Table:
    """Return the headline table in llama-bench's notation: pp10001, tg200@d10001."""
    table = Table(
        ["test", "text", "page cache", "n", "tok/s", "95 % interval", "sd", "TTFT s"], title="Tokens per second"
    )
    for p in points:
        table.add(p.pp_name, p.kind, p.page_cache, p.valid, *_cells(p.prefill), p.ttft.mean if p.ttft else None)
    for p in points:
        table.add(p.tg_name, p.kind, p.page_cache, p.valid, *_cells(p.decode), None)
    return table


def detail_table(points: Sequence[PointSummary]) -> Table:
    table = Table(
        ["context", "text", "first chunk", "chunk sizes", "accept length", "drift", "disk read MB",
         "same prompt again: cached", "TTFT s"],
        title="How it was counted",
    )  # fmt: skip
    for p in points:
        sizes = " ".join(f"{size}x{count}" for size, count in p.chunk_sizes.items())
        table.add(
            p.context, p.kind, p.first_chunk_tokens, sizes, p.accept_length, _drift(p),
            p.disk_read_bytes / 1e6 if p.disk_read_bytes is not None else None,
            p.cached_resend_tokens, p.cached_resend_ttft_s,
        )  # fmt: skip
    return table


def load_table(result: RunResult) -> Table:
    """Return GPU clocks, power, temperature and PCIe link under load, least and greatest over a point's repeats."""
    names = {
        "clocks.sm": "SM MHz",
        "clocks.mem": "memory MHz",
        "power.draw": "W",
        "temperature.gpu": "C",
        "pcie.link.gen.current": "PCIe gen",
        "pcie.link.width.current": "PCIe width",
    }
    table = Table(["context", "text", *names.values(), "throttle reasons"], title="GPU under load")
    for p in result.points:
        loads = [r.load for r in p.repeats if r.load]
        if not loads:
            continue
        cells = []
        for name in names:
            seen = [v for load in loads for v in load.get(name, ())]
            cells.append(f"{min(seen):g} .. {max(seen):g}" if seen else None)
        reasons = sorted({r for load in loads for r in load.get("throttle_reasons", ())})
        table.add(p.context, p.kind.value, *cells, " ".join(reasons))
    return table


def domain_table(rows: Sequence[DomainSummary]) -> Table:
    table = Table(
        ["domain", "requests", "refused", "input tokens", "output tokens", "duration s", "output tok/s",
         "accept length", "median TTFT ms", "median TPOT ms"],
        title="Four domains",
    )  # fmt: skip
    for r in rows:
        table.add(
            r.domain, r.requests, r.refused, r.input_tokens, r.output_tokens, r.duration_s, r.output_rate,
            r.accept_length, _ms(r.median_ttft_s), _ms(r.median_tpot_s),
        )  # fmt: skip
    return table


def _cells(interval: MeanInterval | None) -> tuple[Any, Any, Any]:
    if interval is None:
        return None, "refused", None
    if interval.n < 2:
        return interval.mean, "one sample", None
    low = f"{interval.low:.4g}" + (" (cut)" if interval.cut else "")
    return interval.mean, f"{low} .. {interval.high:.4g}", interval.sd


def _drift(p: PointSummary) -> str:
    if p.drift is None or not p.drift.detectable:
        return "n < 5: not testable"
    word = f"{p.drift.slope_per_repeat:+.2%} a repeat (p = {p.drift.p_value:.3f})"
    return word if p.drift.drifts else "none seen: " + word


def _warnings(result: RunResult, points: Sequence[PointSummary]) -> list[str]:
    lines = []
    for p in points:
        if p.drift and p.drift.drifts:
            lines.append(
                f"{p.tg_name} ({p.kind}) drifts {p.drift.slope_per_repeat:+.2%} a repeat: the mean is of a moving thing"
            )
        if "+" in p.page_cache:
            lines.append(f"{p.pp_name} ({p.kind}) mixes page-cache states {p.page_cache}: measure them apart")
        for name, rate in ((p.pp_name, p.prefill), (p.tg_name, p.decode)):
            if rate and rate.n > 1 and rate.cv > NOISY_CV:
                lines.append(f"{name} ({p.kind}) spreads by {rate.cv:.0%}: is the machine idle?")
    for point in result.points:
        if point.resend and point.resend.cached_tokens == 0:
            lines.append(
                f"pp{point.context}: the same prompt again was not served from a prefix cache (off, or too short)"
            )
    silent = sum(a.sample.valid and a.sample.cached_tokens is None for a in result.answers)
    if silent:
        lines.append(
            f"the server did not say for {silent} of {len(result.answers)} answers how much of the prompt was cached: "
            "0 is assumed and not proven, so TTFT may be a cache's (SGLang says it with --enable-cache-report)"
        )
    return lines


def _refusal_lines(result: RunResult) -> list[str]:
    lines = []
    for p in result.points:
        for r in p.repeats:
            lines += [f"  pp{p.context} ({p.kind.value}) repeat {r.index}: {d}" for d in r.sample.details]
    for a in result.answers:
        lines += [f"  {a.domain} {a.index}: {d}" for d in a.sample.details]
    return lines


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
