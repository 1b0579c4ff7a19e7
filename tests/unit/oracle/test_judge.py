"""Verdicts: each word only where it is earned."""

from __future__ import annotations

import numpy as np
import pytest

from q4kit.oracle import floor as floors
from q4kit.oracle import judge
from q4kit.oracle.plan import Options, make_plan
from q4kit.oracle.recording import ItemResult, Position, Recording
from q4kit.stats.power import Fault

SCORED = 450


def made(run: int, *, noise: float = 3.3e-4, scored: int = SCORED) -> Recording:
    """Return a synthetic run: fixed means, and noise of its own as heavy-tailed as the published one."""
    options = Options(scored=scored, decode_tokens=16, top=2)
    prompts = {"a": list(range(900)), "b": list(range(1100))}
    provenance = {
        "model": {"config_sha256": "c", "weights": "w", "dtype": "d"},
        "device": {"kind": "k", "name": "n"},
        "time": f"t{run}",
        "server_started": f"s{run}",
    }
    header = {
        "backend": "sglang",
        "prompt_set": {"name": "synthetic", "sha256": "0"},
        "tokenizer": "t",
        "options": {name: getattr(options, name) for name in Options.__dataclass_fields__},
        "provenance": provenance,
    }
    recording = Recording(header, prompts)
    mean, own = np.random.default_rng(0), np.random.default_rng(1000 + run)
    for item in make_plan(prompts, options):
        sequence = prompts[item.prompt][: item.length] + [2000] * item.generate
        positions = []
        for pos in range(item.first, len(sequence)):
            shift = noise * own.lognormal(0, 1.6) * own.choice([-1, 1])
            value = float(-1.0 - mean.random() + shift)
            positions.append(Position(pos, sequence[pos], value, [(sequence[pos], value), (1, value - 1)], value))
        recording.results.append(ItemResult(item, positions, 0))
    return recording


def spoil(recording: Recording, leg: str, share: float, size: float) -> Recording:
    rows = [p for result in recording.results if result.item.leg == leg for p in result.positions[1:]]
    for position in rows[:: round(1 / share)]:
        position.logprob += size
        position.top = [(position.token, position.logprob), (1, position.logprob - 1)]
    return recording


@pytest.fixture(scope="module")
def reference() -> Recording:
    return made(0)


@pytest.fixture(scope="module")
def floor(reference: Recording) -> floors.Floor:
    return floors.build([reference, *(made(run) for run in range(1, 6))])


@pytest.fixture(scope="module")
def zero_floor() -> floors.Floor:
    return floors.build([made(run, noise=0.0) for run in range(3)])


def test_one_more_run_is_equivalent_and_says_what_it_would_have_caught(reference, floor) -> None:
    found = judge.compare(reference, made(9), floor)
    assert found.verdict == judge.EQUIVALENT
    assert "2 % of positions off by 0.2 nats would have been caught" in found.evidence
    assert min(found.power.values()) >= 0.99


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_two_percent_of_one_leg_off_by_0_2_is_different_and_the_leg_is_named(reference, floor, leg: str) -> None:
    found = judge.compare(reference, spoil(made(9), leg, 0.02, 0.2), floor)
    assert found.verdict == judge.DIFFERENT
    assert leg in found.evidence
    # The published thresholds let the same fault pass.
    assert found.legs[leg].seed_holds


def test_identical_bits_are_equivalent_without_any_floor(reference) -> None:
    found = judge.compare(reference, made(0), None)
    assert found.verdict == judge.EQUIVALENT
    assert found.evidence.startswith("bit-identical: all 900 log-probabilities")


def test_a_change_without_a_floor_is_inconclusive(reference) -> None:
    found = judge.compare(reference, made(9), None)
    assert found.verdict == judge.INCONCLUSIVE
    assert "no floor was given" in found.evidence


def test_any_change_against_a_zero_floor_is_different(zero_floor) -> None:
    candidate = spoil(made(7, noise=0.0), "decode", 0.002, 1e-6)
    found = judge.compare(made(0, noise=0.0), candidate, zero_floor)
    assert found.verdict == judge.DIFFERENT
    assert "the decode floor is exactly zero over 3 runs" in found.evidence


def test_a_stated_tolerance_is_a_policy_of_its_own_and_says_so(zero_floor) -> None:
    candidate = spoil(made(7, noise=0.0), "decode", 0.002, 1e-6)
    found = judge.compare(made(0, noise=0.0), candidate, zero_floor, tolerance=1e-5)
    assert found.verdict == judge.EQUIVALENT
    assert "stated tolerance" in found.evidence
    assert "not a measured floor" in found.evidence


def test_a_change_beyond_the_tolerance_is_judged_by_the_floor(zero_floor) -> None:
    candidate = spoil(made(7, noise=0.0), "decode", 0.002, 1e-4)
    found = judge.compare(made(0, noise=0.0), candidate, zero_floor, tolerance=1e-5)
    assert found.verdict == judge.DIFFERENT


def test_a_floor_too_coarse_to_see_the_stated_fault_is_inconclusive() -> None:
    runs = [made(run, noise=0.3) for run in range(6)]
    found = judge.compare(runs[0], made(9, noise=0.3), floors.build(runs))
    assert found.verdict == judge.INCONCLUSIVE
    assert "would be seen in only" in found.evidence


def test_too_few_positions_are_inconclusive() -> None:
    runs = [made(run, scored=24) for run in range(3)]
    found = judge.compare(runs[0], made(9, scored=24), floors.build(runs), fault=Fault(0.02, 0.01))
    assert found.verdict == judge.INCONCLUSIVE


def test_a_floor_of_two_populations_does_not_call_a_third_different() -> None:
    loud = [spoil(made(run), "prefill", 0.2, 0.05) for run in (4, 5)]
    runs = [made(0), made(1), made(2), made(3), *loud]
    found = judge.compare(runs[0], spoil(made(9), "prefill", 0.25, 0.05), floors.build(runs))
    assert found.heterogeneous
    assert found.verdict == judge.INCONCLUSIVE
    assert "not one population" in found.evidence


def test_near_ties_and_real_flips_are_told_apart(reference, floor) -> None:
    candidate = made(9)
    first, second = candidate.results[0].positions[:2]
    for position, own in ((first, reference.results[0].positions[0]), (second, reference.results[0].positions[1])):
        position.top = [(1, own.logprob), (position.token, own.logprob - 1e-6)]
    gap = judge.compare(reference, candidate, floor).legs["prefill"]
    # Both margins are 1 nat, wider than twice the floor's largest change.
    assert (len(gap.flips), gap.real_flips) == (2, 2)
    near = made(0)
    for result in near.results:
        for position in result.positions:
            position.top = [(position.token, position.logprob), (1, position.logprob - 1e-5)]
    assert judge.compare(near, candidate, floor).legs["prefill"].real_flips == 0


def other_first(recording: Recording, item: int, index: int) -> None:
    """Rank another token first at one position; the token that was generated stays."""
    position = recording.results[item].positions[index]
    position.top = [(1, position.logprob + 0.1), (position.token, position.logprob)]


def test_flips_are_counted_by_place_near_ties_apart(floor) -> None:
    near, candidate = made(0), made(9)
    prefill_a, prefill_b, *segments = range(len(near.results))
    assert [near.results[i].item.prompt for i in (prefill_a, prefill_b)] == ["a", "b"]
    for position in near.results[prefill_a].positions:
        position.top = [(position.token, position.logprob), (1, position.logprob - 1e-5)]
    for item, index in ((prefill_a, 5), (prefill_a, 9), (prefill_b, 7), (segments[0], 1), (segments[0], 15)):
        other_first(candidate, item, index)
    # The first token of a segment is not scored, but its flip is one.
    start = candidate.results[segments[1]].positions
    for position in start:
        position.token += 1
    start[0].top = [(start[0].token, -0.5), (start[0].token - 1, -1.75)]
    legs = judge.compare(near, candidate, floor).legs

    def flips(leg: str, kind: str) -> dict[str, tuple[int, int]]:
        bins = legs[leg].bins.items()
        return {name: (b.near_ties, b.real_flips) for name, b in bins if name.startswith(kind)}

    assert flips("prefill", "prompt") == {"prompt a": (2, 0), "prompt b": (0, 1)}
    assert sum(near + real for near, real in flips("prefill", "position").values()) == 3
    assert flips("decode", "decode step") == {"decode step     1 .. 3": (0, 1), "decode step     4 .. 15": (0, 1)}
    for kind in ("prompt", "position"):
        assert sum(real for _, real in flips("decode", kind).values()) == legs["decode"].real_flips == 3


def test_figures_are_those_of_the_planted_change(reference) -> None:
    candidate = made(0)
    for result in candidate.results:
        for position in result.positions:
            position.logprob -= 0.25
    leg = judge.compare(reference, candidate, None).legs["prefill"]
    assert leg.mean.value == pytest.approx(0.25)
    assert leg.maximum == pytest.approx(0.25)
    assert leg.bias.value == pytest.approx(-0.25)
    assert leg.rms.value == pytest.approx(0.25)
    assert leg.k3.value == pytest.approx(np.expm1(-0.25) + 0.25)
    assert leg.signs[:2] == (0, SCORED)
    assert leg.percentiles[50].value == pytest.approx(-0.25)
    assert leg.seed_holds is False
    counts = {name: place.positions for name, place in leg.bins.items()}
    assert counts == {"prompt a": 150, "prompt b": 300, "position   256 .. 1023": 374, "position  1024 .. 4095": 76}


def test_a_fault_that_grows_with_the_decode_step_shows_in_its_bins(reference) -> None:
    candidate = made(0)
    for result in candidate.results:
        if result.item.leg == "decode":
            for step, position in enumerate(result.positions):
                position.logprob -= 0.01 * step
    bins = judge.compare(reference, candidate, None).legs["decode"].bins
    means = [place.mean for name, place in bins.items() if name.startswith("decode step")]
    assert means == pytest.approx([0.02, 0.095], abs=2e-3)


def test_decode_against_prefill_is_measured_inside_each_side(reference) -> None:
    candidate = made(0)
    for result in candidate.results:
        for position in result.positions:
            position.again = position.logprob - 0.5
    found = judge.compare(reference, candidate, None)
    assert found.consistency["reference"].value == 0
    assert found.consistency["candidate"].value == pytest.approx(np.expm1(-0.5) + 0.5)


def diverged(offset: int, *, margin: float = 1.0, noise: float = 3.3e-4) -> Recording:
    """Return a run whose decode segments leave the reference's tokens at `offset`."""
    candidate = made(9, noise=noise)
    for result in candidate.results:
        if result.item.leg == "decode":
            for position in result.positions[offset:]:
                position.top = [(7, position.logprob), (position.token, position.logprob - margin)]
                position.token = 7
    return candidate


def test_decode_lost_at_the_first_token_everywhere_is_never_equivalent(reference, floor) -> None:
    for given in (floor, None):
        found = judge.compare(reference, diverged(0), given, tolerance=0.1)
        assert found.verdict == judge.DIFFERENT
        assert "every decode segment diverges at its first token (30 segments, 30 of them" in found.evidence


def test_decode_that_breaks_at_its_first_step_is_different(reference, floor) -> None:
    found = judge.compare(reference, diverged(1), floor)
    assert found.verdict == judge.DIFFERENT
    assert found.legs["decode"].lost == SCORED - 30
    assert "decode" in found.evidence


def test_a_tolerance_does_not_hide_that_most_of_decode_was_lost() -> None:
    near = made(0)
    for result in near.results:
        for position in result.positions:
            position.top = [(position.token, position.logprob), (7, position.logprob - 1e-5)]
    found = judge.compare(near, diverged(1, margin=1e-5), None, tolerance=1.0)
    assert found.legs["decode"].real_flips == 0
    assert found.verdict == judge.INCONCLUSIVE
