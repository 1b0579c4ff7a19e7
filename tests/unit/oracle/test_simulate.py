"""The self-test: the required rates, and that it can fail."""

from __future__ import annotations

import json

import pytest

from q4kit.errors import UsageError
from q4kit.oracle import floor as floors
from q4kit.oracle import simulate
from q4kit.report import dump_json
from q4kit.stats import exchange


@pytest.fixture(scope="module")
def found() -> simulate.SelfTest:
    return simulate.run(None, trials=100)


def test_two_percent_off_by_0_2_is_caught_and_false_alarms_stay_rare(found: simulate.SelfTest) -> None:
    assert found.rates[simulate.REQUIRED].value >= 0.99
    assert found.rates[simulate.NOTHING].value <= 0.02
    assert found.holds


def test_at_least_three_faults_that_fixed_thresholds_miss_are_caught(found: simulate.SelfTest) -> None:
    assert len(found.missed_by_seed) >= 3
    assert simulate.REQUIRED in found.missed_by_seed


def test_the_smallest_fault_is_stated(found: simulate.SelfTest) -> None:
    assert found.smallest is not None
    assert found.smallest <= 0.2


def test_the_json_form_holds_the_two_rates(found: simulate.SelfTest) -> None:
    data = json.loads(dump_json(simulate.report(found).to_json()))
    assert data["detection"] == found.rates[simulate.REQUIRED].value
    assert data["false_alarm"] == found.rates[simulate.NOTHING].value
    assert all(data["structural"].values())


def test_the_published_noise_has_the_published_mean() -> None:
    import numpy as np

    source = simulate.published_noise()
    draw = np.random.default_rng(5)
    means = [np.abs(t[:, 0] - t[:, 1]).mean() for t in (source.draw(draw)[0] for _ in range(300))]
    assert np.mean(means) == pytest.approx(simulate.NOISE_MEAN, rel=0.05)


def test_a_deaf_oracle_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = lambda self, groups, alpha=exchange.ALPHA: exchange.Outcome(1.0, {}, "", 1.0, None, False)  # noqa: E731
    monkeypatch.setattr(exchange.ExchangeTest, "run", deaf)
    found = simulate.run(None, trials=100)
    assert found.rates[simulate.REQUIRED].value == 0
    assert not found.holds


def test_a_jumpy_oracle_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    jumpy = lambda self, groups, alpha=exchange.ALPHA: exchange.Outcome(0.0, {}, "", 0.0, None, True)  # noqa: E731
    monkeypatch.setattr(exchange.ExchangeTest, "run", jumpy)
    assert not simulate.run(None, trials=100).holds


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 100"):
        simulate.run(None, trials=10)


def test_a_zero_floor_has_nothing_to_test() -> None:
    runs = [simulate.small_recording() for _ in range(3)]
    for index, run in enumerate(runs):
        run.provenance.update(time=str(index), server_started="s")
    with pytest.raises(UsageError, match="this floor is exactly zero"):
        simulate.run(floors.build(runs))
