"""The self-test: the required rates, and that it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from q4kit.errors import UsageError
from q4kit.oracle import floor as floors
from q4kit.oracle import simulate
from q4kit.stats import exchange

TOOL = Path(__file__).resolve().parents[3] / "tools" / "logprob_diff.py"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Return what the real command says, at its default trial count (about 35 s)."""
    command = [sys.executable, str(TOOL), "selftest", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_two_percent_off_by_0_2_is_caught_and_false_alarms_stay_rare(told: dict[str, Any]) -> None:
    for name in (simulate.REQUIRED, simulate.NOTHING):
        assert told["rates"][name]["trials"] == 1000
    assert told["detection"] == told["rates"][simulate.REQUIRED]["caught"] / 1000 >= 0.99
    assert told["false_alarm"] == told["rates"][simulate.NOTHING]["caught"] / 1000 <= 0.01
    assert told["verdict"] == "HOLDS"


def test_at_least_three_faults_that_fixed_thresholds_miss_are_caught(told: dict[str, Any]) -> None:
    missed = told["missed_by_seed"]
    assert len(missed) >= 3
    assert simulate.REQUIRED in missed
    for name in missed:
        rate = told["rates"][name]
        assert rate["caught"] >= 0.99 * rate["trials"]
        assert rate["seed_policy"] < 0.1 * rate["trials"]


def test_the_smallest_fault_is_stated_and_every_broken_input_refused(told: dict[str, Any]) -> None:
    assert 0 < told["smallest_caught"] <= 0.2
    assert len(told["structural"]) == 12
    assert all(told["structural"].values())


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
