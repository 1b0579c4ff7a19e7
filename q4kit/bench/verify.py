"""Does a measurement agree with a published number? Pure, apart from nothing.

First the conditions are compared field by field; a speed under other flags, on another GPU or with another text is
NOT COMPARABLE and says which fields differ. Only then the equivalence test of `q4kit.stats.equivalence` speaks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from q4kit import exit_codes
from q4kit.bench.runner import Api, BenchConfig
from q4kit.bench.texts import TextKind
from q4kit.claims.ledger import HIGHER_IS_BETTER, Claim
from q4kit.errors import UsageError
from q4kit.report import Report, Table
from q4kit.stats import equivalence
from q4kit.stats.equivalence import Equivalence, Reference

if TYPE_CHECKING:
    from q4kit.bench.commands import DomainOptions

DEFAULT_MARGIN = 0.03

_SAMPLE_KEYS = {"pp": "prefill_rate", "tg": "decode_rate", "ttft": "ttft_s", "tpot": "tpot_s"}
_TO_UNIT = {"tok/s": 1.0, "s": 1.0, "ms": 1e3, "tokens": 1.0}
_OWN_CONDITIONS = ("context", "tokens", "text", "domain")
"""Conditions that select samples in the measurement; all others are looked up in its provenance."""


class Verdict(StrEnum):
    AGREES = "AGREES"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_COMPARABLE = "NOT COMPARABLE"


_EXIT = {
    Verdict.AGREES: exit_codes.HOLDS,
    Verdict.FASTER: exit_codes.HOLDS,
    Verdict.SLOWER: exit_codes.NEGATIVE,
    Verdict.INCONCLUSIVE: exit_codes.INCONCLUSIVE,
    Verdict.NOT_COMPARABLE: exit_codes.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Mismatch:
    """A condition on which claim and measurement differ; `found` is None when the measurement does not say."""

    name: str
    expected: Any
    found: Any


@dataclass(frozen=True)
class Answer:
    """Verdict with what it rests on. `sample` is in the claim's unit."""

    verdict: Verdict
    sample: tuple[float, ...]
    mismatches: tuple[Mismatch, ...]
    varied: tuple[Mismatch, ...]
    test: Equivalence | None
    margin: float

    @property
    def exit_code(self) -> int:
        return _EXIT[self.verdict]

    @property
    def evidence(self) -> str:
        """The one line that the verdict rests on."""
        if self.verdict is Verdict.NOT_COMPARABLE:
            return "differs in " + ", ".join(m.name for m in self.mismatches)
        assert self.test is not None
        low, high = self.test.low, self.test.high
        line = (
            f"{self.test.difference:+.2%} (interval {low:+.2%} .. {high:+.2%}), limits "
            f"{self.test.lower_limit:+.2%} .. {self.test.upper_limit:+.2%}, n = {self.test.n}"
        )
        if self.verdict is Verdict.INCONCLUSIVE:
            more = self.test.more_repeats
            line += f"; run {more} more" if more else "; more repeats of this kind will not decide"
        return line


def judge(
    claim: Claim,
    measurement: Mapping[str, Any],
    *,
    margin: float | None = None,
    alpha: float = 0.05,
    vary: Sequence[str] = (),
) -> Answer:
    """Return the verdict on `claim` from a bench result (`Report.data` or its JSON file).

    `vary` names conditions that are allowed to differ; they are listed in the answer.

    Raises:
        UsageError: the claim has no metric that the bench measures.
    """
    if claim.metric not in HIGHER_IS_BETTER:
        raise UsageError(
            f"claim {claim.id!r} has no metric that the bench measures",
            remedy=f"verify works for {', '.join(HIGHER_IS_BETTER)}",
        )
    chosen = margin if margin is not None else claim.margin if claim.margin is not None else DEFAULT_MARGIN
    differing = conditions_that_differ(claim, measurement)
    varied = tuple(m for m in differing if m.name in vary)
    blocking = [m for m in differing if m.name not in vary]
    sample = samples(claim, measurement)
    if not sample:
        blocking.append(Mismatch("samples", _selection(claim), "no valid sample under these conditions"))
    if blocking:
        return Answer(Verdict.NOT_COMPARABLE, sample, tuple(blocking), varied, None, chosen)
    reference = Reference(claim.value, claim.high, claim.sd, claim.n)
    better = HIGHER_IS_BETTER[claim.metric]
    if "domain" in claim.conditions:
        groups = list(domain_samples(claim, measurement).values())
        statistic = _domain_statistic(claim.metric, len(groups))
        test = equivalence.compare_statistic(groups, statistic, reference, chosen, alpha=alpha, higher_is_better=better)
    else:
        test = equivalence.compare(sample, reference, chosen, alpha=alpha, higher_is_better=better)
    return Answer(Verdict(test.verdict.value), sample, (), varied, test, chosen)


def samples(claim: Claim, measurement: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the valid samples that match the claim's context, token count, text and domain, in its unit."""
    scale = _TO_UNIT.get(claim.unit)
    if scale is None:
        raise UsageError(f"claim {claim.id!r}: unit {claim.unit!r} is none of {', '.join(_TO_UNIT)}")
    want = claim.conditions
    found: list[float] = []
    if "domain" in want:
        return tuple(v for group in domain_samples(claim, measurement).values() for v in group)
    key = _SAMPLE_KEYS.get(claim.metric)
    for point in measurement.get("points", []):
        if "context" in want and point["context"] != want["context"]:
            continue
        if "text" in want and point["kind"] != want["text"]:
            continue
        if "tokens" in want and point["tokens"] != want["tokens"]:
            continue
        for s in point["samples"]:
            if not s["refusals"] and key and s[key] is not None:
                found.append(s[key] * scale)
    return tuple(found)


def domain_samples(claim: Claim, measurement: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the valid answers' values by domain, in the claim's unit."""
    scale = _TO_UNIT[claim.unit]
    groups: dict[str, list[float]] = {}
    for answer in measurement.get("answers", []):
        wanted = claim.conditions["domain"] in ("overall", answer["domain"])
        value = _domain_value(claim.metric, answer) if wanted and not answer["refusals"] else None
        if value is not None:
            groups.setdefault(answer["domain"], []).append(value * scale)
    return groups


def _domain_statistic(metric: str, groups: int) -> Callable[..., float]:
    """Return the statistic that the published domain table uses for a metric.

    Rates and accept lengths are ratios of sums, which for equal token counts is the harmonic mean over requests.
    TTFT is the median over all requests; TPOT the median of a domain, or the mean of the domains' medians.
    """

    def over_all(of: Callable[[Any], Any]) -> Callable[..., float]:
        return lambda *parts: float(of(np.concatenate([np.asarray(p, dtype=float) for p in parts])))

    if metric in ("throughput", "accept_length"):
        return over_all(lambda values: len(values) / np.sum(1 / values))
    if metric == "tpot" and groups > 1:
        return lambda *parts: float(np.mean([np.median(p) for p in parts]))
    return over_all(np.median)


def _domain_value(metric: str, answer: Mapping[str, Any]) -> float | None:
    if metric == "throughput":
        return float(answer["completion_tokens"]) / float(answer["latency_s"])
    value = answer["accept_length" if metric == "accept_length" else _SAMPLE_KEYS[metric]]
    return None if value is None else float(value)


def conditions_that_differ(claim: Claim, measurement: Mapping[str, Any]) -> list[Mismatch]:
    """Return every stated condition of the claim that the measurement does not meet, by name.

    `gpu` and every condition but the selecting ones are compared with the provenance; what the measurement does
    not know counts as different, since equal ignorance proves nothing.
    """
    provenance = measurement.get("provenance", {})
    found: list[Mismatch] = []
    if measurement.get("partial"):
        found.append(Mismatch("partial", False, True))
    device = provenance.get("device", {})
    name = device.get("name") if isinstance(device, Mapping) else device
    if claim.gpu and not _same_gpu(claim.gpu, name):
        found.append(Mismatch("gpu", claim.gpu, name))
    for key, expected in claim.conditions.items():
        if key in _OWN_CONDITIONS:
            continue
        if key == "page_cache":
            actual: Any = "+".join(sorted({s["page_cache"] for p in _points(claim, measurement) for s in p["samples"]}))
        elif key == "model":
            actual = (provenance.get("model") or {}).get("name")
        elif key == "sglang":
            actual = (provenance.get("sglang") or {}).get("version")
        else:
            actual = _lookup(provenance, key)
        if actual != expected:
            found.append(Mismatch(key, expected, actual))
    args = provenance.get("server_args", {})
    for flag in claim.flags:
        key, expected = parse_flag(flag)
        actual = args.get(key) if isinstance(args, Mapping) else None
        if not _flag_equal(expected, actual):
            found.append(Mismatch(f"--{key.replace('_', '-')}", expected, actual))
    return found


def _points(claim: Claim, measurement: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    want = claim.conditions
    return [
        p
        for p in measurement.get("points", [])
        if want.get("context") in (None, p["context"]) and want.get("text") in (None, p["kind"])
    ]


def parse_flag(flag: str) -> tuple[str, str | bool]:
    """Return (server argument, value) of a flag as typed: `--kv-cache-dtype=fp8_e4m3` or `--language-model-only`."""
    name, _, value = flag.removeprefix("--").partition("=")
    return name.replace("-", "_"), value if value else True


def _flag_equal(expected: str | bool, actual: Any) -> bool:
    if isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, bool) or actual is None:
        return expected.lower() == str(actual).lower()
    if isinstance(actual, int | float):
        try:
            return float(expected) == float(actual)
        except ValueError:
            return False
    return expected == str(actual)


def _same_gpu(expected: str, found: Any) -> bool:
    """Return whether the claimed GPU is the reported one; vendors' prefixes do not matter, the rest does."""

    def key(text: str) -> str:
        return text.lower().replace("nvidia", "").replace("geforce", "").strip()

    return isinstance(found, str) and key(expected) == key(found)


def _lookup(data: Mapping[str, Any], dotted: str) -> Any:
    value: Any = data
    for part in dotted.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _selection(claim: Claim) -> str:
    return ", ".join(f"{k} {claim.conditions[k]}" for k in _OWN_CONDITIONS if k in claim.conditions) or "any"


def config_for(claim: Claim, repeats: int) -> tuple[BenchConfig, DomainOptions | None]:
    """Return the run that measures what the claim claims.

    Raises:
        UsageError: the claim does not state enough to be measured.
    """
    from q4kit.bench.commands import DomainOptions

    want = claim.conditions
    if "domain" in want:
        names = () if want["domain"] == "overall" else (str(want["domain"]),)
        return BenchConfig(contexts=()), DomainOptions(names, int(want.get("tokens", 512)), None, Api.NATIVE)
    if "context" not in want:
        raise UsageError(
            f"claim {claim.id!r} states no context length, so it cannot be measured",
            remedy="measure by hand with 'run' and pass --result",
        )
    kind = TextKind(want.get("text", "filler"))
    config = BenchConfig((int(want["context"]),), (kind,), int(want.get("tokens", 200)), repeats)
    return config, None


def report(claim: Claim, answer: Answer, *, repro: str = "") -> Report:
    """Return the report of a verdict."""
    published = f"{claim.value:g}" + (f" .. {claim.high:g}" if claim.high != claim.value else "")
    out = Report(title=f"Claim {claim.id}", verdict=answer.verdict.value, evidence=answer.evidence)
    out.facts = [
        ("claim", claim.statement),
        ("published", f"{published} {claim.unit} ({claim.source or 'this repository'}; {claim.owner})"),
        ("base", claim.base),
        ("measured", _measured(answer, claim)),
        ("margin", f"{answer.margin:.1%}"),
    ]
    if repro:
        out.facts.append(("repro", repro))
    if answer.mismatches or answer.varied:
        table = Table(["field", "claim", "measured", "allowed"], title="Conditions that differ")
        for m in (*answer.mismatches, *answer.varied):
            table.add(m.name, str(m.expected), "unknown" if m.found is None else str(m.found), m in answer.varied)
        out.blocks.append(table)
    if answer.varied:
        out.warnings.append("verdict under changed conditions: " + ", ".join(m.name for m in answer.varied))
    if claim.n is None or claim.sd is None:
        out.warnings.append("the source gives no spread, so its value is taken as exact")
    out.data = {
        "schema": "q4kit.verify/1",
        "claim_id": claim.id,
        "sample": list(answer.sample),
        "test": answer.test.to_json() if answer.test else None,
        "mismatches": [m.__dict__ for m in answer.mismatches],
        "varied": [m.__dict__ for m in answer.varied],
    }
    return out


def _measured(answer: Answer, claim: Claim) -> str:
    if not answer.sample:
        return "nothing"
    mean = statistics.fmean(answer.sample)
    sd = statistics.stdev(answer.sample) if len(answer.sample) > 1 else float("nan")
    return f"{mean:.4g} {claim.unit} (n = {len(answer.sample)}, sd {sd:.3g})"
