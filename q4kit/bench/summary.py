"""From samples to the numbers of a report: intervals, drift, domain totals. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from q4kit.bench.accounting import StreamSample
from q4kit.bench.runner import DomainAnswer, Point
from q4kit.stats.intervals import MeanInterval, Trend, mann_kendall, t_interval


@dataclass(frozen=True)
class PointSummary:
    """Numbers of one point. Rates in tokens per second, times in seconds; None when no repeat was valid."""

    pp_name: str
    tg_name: str
    context: int
    kind: str
    page_cache: str
    measured: int
    valid: int
    prefill: MeanInterval | None
    decode: MeanInterval | None
    ttft: MeanInterval | None
    drift: Trend | None
    chunk_sizes: dict[int, int]
    first_chunk_tokens: int | None
    accept_length: float | None
    disk_read_bytes: int | None
    cached_resend_tokens: int | None
    cached_resend_ttft_s: float | None
    refusals: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        data = dict(self.__dict__)
        for key in ("prefill", "decode", "ttft", "drift"):
            data[key] = data[key].to_json() if data[key] is not None else None
        data["chunk_sizes"] = {str(k): v for k, v in self.chunk_sizes.items()}
        return data


def summarise(point: Point, *, confidence: float = 0.95) -> PointSummary:
    """Return the summary of a point; refused samples count in `refusals` and nowhere else."""
    samples = [r.sample for r in point.valid]
    chunks: Counter[int] = Counter()
    for sample in samples:
        chunks.update(sample.chunk_sizes)
    reads = [r.disk_read_bytes for r in point.valid]
    states = sorted({r.page_cache.value for r in point.repeats}) or ["unknown"]
    accept = [s.accept_length for s in samples if s.accept_length is not None]
    return PointSummary(
        pp_name=f"pp{point.context}",
        tg_name=f"tg{point.tokens}@d{point.context}",
        context=point.context,
        kind=point.kind.value,
        page_cache="+".join(states),
        measured=len(point.repeats),
        valid=len(samples),
        prefill=_interval([s.prefill_rate for s in samples], confidence),
        decode=_interval([s.decode_rate for s in samples], confidence),
        ttft=_interval([s.ttft_s for s in samples], confidence),
        drift=mann_kendall([s.decode_rate for s in samples if s.decode_rate]) if samples else None,
        chunk_sizes=dict(sorted(chunks.items())),
        first_chunk_tokens=max((s.first_chunk_tokens or 0 for s in samples), default=None),
        accept_length=statistics.fmean(accept) if accept else None,
        disk_read_bytes=sum(r for r in reads if r is not None) if reads and None not in reads else None,
        cached_resend_tokens=point.resend.cached_tokens if point.resend else None,
        cached_resend_ttft_s=point.resend.ttft_s if point.resend else None,
        refusals=dict(Counter(r.name for repeat in point.repeats for r in repeat.sample.refusals)),
    )


@dataclass(frozen=True)
class DomainSummary:
    """One row of the domain table, the columns of the published one."""

    domain: str
    requests: int
    refused: int
    input_tokens: int
    output_tokens: int
    duration_s: float
    output_rate: float | None
    """Output tokens over the wall time of the requests, time to first token included."""
    accept_length: float | None
    median_ttft_s: float | None
    median_tpot_s: float | None

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def summarise_domains(answers: Sequence[DomainAnswer]) -> list[DomainSummary]:
    """Return one row a domain and, with more than one, an overall row.

    Overall TTFT is the median over all requests; overall TPOT the mean of the domain medians, as the published
    table defines them.
    """
    order = list(dict.fromkeys(a.domain for a in answers))
    rows = [_domain(d, [a.sample for a in answers if a.domain == d]) for d in order]
    if len(rows) > 1:
        whole = _domain("overall", [a.sample for a in answers])
        medians = [r.median_tpot_s for r in rows if r.median_tpot_s is not None]
        tpot = statistics.fmean(medians) if medians else None
        rows.append(DomainSummary(**{**whole.__dict__, "median_tpot_s": tpot}))
    return rows


def _domain(name: str, samples: Sequence[StreamSample]) -> DomainSummary:
    good = [s for s in samples if s.valid]
    outputs = sum(s.completion_tokens or 0 for s in good)
    duration = sum(s.latency_s for s in good)
    accept = [s for s in good if s.accept_length]
    # Tokens over verify steps of the whole domain, as the server's own counter would say; not a mean of means.
    steps = sum((s.completion_tokens or 0) / (s.accept_length or 1) for s in accept)
    return DomainSummary(
        domain=name,
        requests=len(samples),
        refused=len(samples) - len(good),
        input_tokens=sum(s.prompt_tokens or 0 for s in good),
        output_tokens=outputs,
        duration_s=duration,
        output_rate=outputs / duration if duration > 0 else None,
        accept_length=sum(s.completion_tokens or 0 for s in accept) / steps if steps else None,
        median_ttft_s=statistics.median(s.ttft_s for s in good if s.ttft_s is not None) if good else None,
        median_tpot_s=statistics.median(s.tpot_s for s in good if s.tpot_s is not None) if good else None,
    )


def _interval(values: Sequence[float | None], confidence: float) -> MeanInterval | None:
    """Return the interval of rates or times, which are never negative."""
    numbers = [v for v in values if v is not None]
    return t_interval(numbers, confidence=confidence).cut_at(0.0) if numbers else None
