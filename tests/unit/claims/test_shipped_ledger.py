"""The ledger that ships: it parses, and its figures are the published ones."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from q4kit.bench.verify import config_for
from q4kit.claims.check import check_ledger, heading_anchors
from q4kit.claims.ledger import HIGHER_IS_BETTER, load
from q4kit.errors import UsageError

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = load(ROOT / "results" / "claims.toml").claims


def test_every_claim_of_ours_has_its_raw_file_and_every_formula_its_value() -> None:
    campaign = ROOT / "docs" / "CAMPAIGN.md"
    anchors = heading_anchors(campaign.read_text()) if campaign.exists() else []

    def read(name: str) -> bytes | None:
        return (ROOT / name).read_bytes() if (ROOT / name).is_file() else None

    assert check_ledger(load(ROOT / "results" / "claims.toml"), read, anchors) == []


def test_published_domain_table_is_consistent_with_its_own_totals() -> None:
    """Overall TPOT is the mean of the domain medians; overall rate is tokens over the summed durations."""
    domains = ("chat", "stem", "maths", "code")
    tpot = statistics.fmean(CLAIMS[f"nvme-{d}-tpot"].value for d in domains)
    assert tpot == pytest.approx(CLAIMS["nvme-overall-tpot"].value, abs=0.005)
    seconds = sum(5120 / CLAIMS[f"nvme-{d}-rate"].value for d in domains)
    assert 4 * 5120 / seconds == pytest.approx(CLAIMS["nvme-overall-rate"].value, abs=0.01)


def test_claims_of_others_are_cited_and_state_a_base() -> None:
    others = [c for c in CLAIMS.values() if c.owner == "theirs"]
    assert len(others) >= 30
    assert all(c.source and c.base for c in others)


def test_measurable_claims_can_be_measured_or_say_why_not() -> None:
    measurable = [c for c in CLAIMS.values() if c.metric]
    assert {c.metric for c in measurable} == set(HIGHER_IS_BETTER)
    for claim in measurable:
        if {"context", "domain"} & set(claim.conditions):
            config, options = config_for(claim, 5)
            assert config.contexts or options is not None
        else:
            with pytest.raises(UsageError, match="states no context length"):
                config_for(claim, 5)
