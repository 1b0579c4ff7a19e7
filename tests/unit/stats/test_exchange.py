"""The exchangeability test: exact where it claims to be, sensitive where it must be."""

from __future__ import annotations

import numpy as np
import pytest

from q4kit.stats.exchange import STATISTICS, ExchangeTest, Group, deviations, spike
from q4kit.stats.power import Fault, detection_rate

POSITIONS, RUNS = 200, 5
BINS = np.arange(POSITIONS, dtype=np.int64) // 50


def noise(seed: int, scale: float = 1e-3, columns: int = RUNS + 1) -> np.ndarray:
    draw = np.random.default_rng(seed)
    shape = (POSITIONS, columns)
    return scale * draw.lognormal(0, 1.6, shape) * draw.choice([-1.0, 1.0], shape)


@pytest.fixture(scope="module")
def exchange() -> ExchangeTest:
    return ExchangeTest([(POSITIONS, RUNS + 1)], redraws=1000)


def group(values: np.ndarray) -> Group:
    return Group("prefill", values, BINS)


def test_deviations_of_equal_entries_are_exactly_zero() -> None:
    values = np.full((3, 7), -0.1) * np.array([[1], [3], [7]])
    assert (deviations(values) == 0).all()


def test_deviation_is_the_entry_minus_the_mean_of_the_others() -> None:
    assert deviations(np.array([[4.0, 1.0, 2.0, 3.0]]))[0].tolist() == pytest.approx([2.0, -2.0, -2 / 3, 2 / 3])


def test_false_alarms_stay_at_the_stated_rate_under_heavy_tails(exchange: ExchangeTest) -> None:
    alarms = sum(exchange.run([group(noise(seed))]).alarm for seed in range(600))
    # 0.5 % of 600 is 3; 9 or more has probability 0.4 % at that rate.
    assert alarms <= 8


def test_p_is_uniform_when_nothing_changed(exchange: ExchangeTest) -> None:
    values = np.array([exchange.run([group(noise(seed))]).p for seed in range(300)])
    assert 0.4 < values.mean() < 0.6
    assert 0.02 < (values <= 0.05).mean() + 0.01 < 0.11


def test_positions_of_very_different_noise_cost_no_false_alarms(exchange: ExchangeTest) -> None:
    scales = np.where(np.arange(POSITIONS) % 10 == 0, 100.0, 0.01)[:, None]
    alarms = sum(exchange.run([group(noise(seed) * scales)]).alarm for seed in range(400))
    assert alarms <= 7


@pytest.mark.parametrize(
    ("name", "fault", "leading"),
    [
        ("damaged positions", lambda v, s: v + 0.2 * (np.arange(POSITIONS) % 25 == 0), None),
        ("shift of all", lambda v, s: v - 0.004, None),
        ("noise three times as large", lambda v, s: 3 * v, None),
        ("one prompt", lambda v, s: v + 0.02 * (BINS == 2), None),
    ],
)
def test_each_kind_of_change_is_caught(exchange: ExchangeTest, name: str, fault, leading) -> None:
    caught = 0
    for seed in range(60):
        values = noise(seed)
        values[:, 0] = fault(values[:, 0], seed)
        caught += exchange.run([group(values)]).alarm
    assert caught >= 57, name


def test_damage_in_one_place_is_named_as_such(exchange: ExchangeTest) -> None:
    draw = np.random.default_rng(3)
    values = 1e-3 * draw.normal(size=(POSITIONS, RUNS + 1))
    # Signs alternate, so that only the size changes, and only in one bin of four.
    values[:, 0] += 2e-3 * (BINS == 1) * np.where(np.arange(POSITIONS) % 2, 1, -1)
    outcome = exchange.run([group(values)])
    assert outcome.alarm
    assert outcome.p_each["prefill/bin"] <= 0.002


def test_one_far_position_is_caught_by_the_tail_where_redrawing_cannot(exchange: ExchangeTest) -> None:
    values = noise(5)
    values[17, 0] += 30.0
    outcome = exchange.run([group(values)])
    assert outcome.spike_p < 1e-3
    assert outcome.spike_at == ("prefill", 17)
    assert outcome.alarm


def test_the_tail_stays_silent_on_noise_of_its_own_kind() -> None:
    alarms = sum(spike([group(noise(seed))])[0] <= 0.002 for seed in range(500))
    assert alarms <= 5


def test_the_same_data_always_give_the_same_outcome() -> None:
    outcomes = [ExchangeTest([(POSITIONS, RUNS + 1)], redraws=500).run([group(noise(7))]) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def test_two_groups_are_judged_together_and_named_apart() -> None:
    both = ExchangeTest([(POSITIONS, RUNS + 1)] * 2, redraws=1000)
    values = noise(8)
    values[:, 0] += 0.01
    outcome = both.run([group(noise(9)), Group("decode", values, BINS)])
    assert outcome.alarm
    assert outcome.leading.startswith("decode/")
    assert {name.partition("/")[2] for name in outcome.p_each} == set(STATISTICS)


def test_two_runs_are_enough_to_see_a_large_fault() -> None:
    test = ExchangeTest([(POSITIONS, 3)], redraws=1000)
    values = noise(10, columns=3)
    values[:: POSITIONS // 10, 0] += 1.0
    assert test.run([group(values)]).alarm


def test_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 are needed"):
        Group("prefill", np.zeros((4, 2)), np.zeros(4, dtype=np.int64))


def test_values_that_are_not_finite_are_refused() -> None:
    values = noise(11)
    values[3, 2] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        group(values)


def test_groups_of_another_shape_are_refused(exchange: ExchangeTest) -> None:
    with pytest.raises(ValueError, match="the test was made for"):
        exchange.run([Group("prefill", noise(12)[:50], BINS[:50])])


def test_detection_grows_with_the_fault_and_is_the_false_alarm_rate_at_zero() -> None:
    groups = [group(noise(13))]
    rates = [detection_rate(groups, 0, Fault(0.05, size), trials=60) for size in (0.0, 0.01, 0.2)]
    assert rates[0] <= 0.1
    assert rates[0] <= rates[1] <= rates[2]
    assert rates[2] >= 0.97


def test_a_fault_plants_what_it_says() -> None:
    planted = Fault(0.05, 0.25).plant(np.zeros(POSITIONS), np.random.default_rng(0))
    assert np.count_nonzero(planted) == 10
    assert set(np.abs(planted[planted != 0])) == {0.25}
