"""Alignment and floors: what may be compared, and what is refused with its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from q4kit.errors import NotComparableError, UsageError
from q4kit.oracle import align
from q4kit.oracle import floor as floors
from q4kit.oracle.recording import Recording
from q4kit.oracle.simulate import small_recording, structural_faults


def stamped(time: str, **model: str) -> Recording:
    made = small_recording()
    made.provenance["time"] = time
    made.provenance["server_started"] = "s" + time
    made.provenance["model"].update(model)
    return made


def diverge(made: Recording, offset: int) -> Recording:
    """Change the tokens of the first decode segment from `offset` on."""
    segment = next(result for result in made.results if result.item.leg == "decode")
    for position in segment.positions[offset:]:
        position.token += 100
        position.top = [(position.token, -0.5), (position.token - 100, -1.75), (3, -4.0)]
        position.logprob = -0.5
    return made


def segment_pair(left: Recording, right: Recording) -> align.ItemPair:
    return next(pair for pair in align.pair(left, right) if pair.leg == "decode")


@pytest.mark.parametrize("name", list(structural_faults()))
def test_every_structural_fault_is_refused(name: str) -> None:
    assert structural_faults()[name]


def test_equal_recordings_pair_without_change() -> None:
    pairs = align.pair(small_recording(), small_recording())
    assert sum(len(pair.rows) for pair in pairs if pair.leg == "prefill") == 16
    assert sum(len(pair.rows) for pair in pairs if pair.leg == "decode") == 16
    assert all(row.logprob == row.ref.logprob for pair in pairs for row in pair.rows)


def test_the_token_of_the_extend_is_not_a_decode_position() -> None:
    found = segment_pair(small_recording(), small_recording())
    assert found.rows[0].ref.pos == small_recording().results[2].item.length + 1


def test_a_divergence_keeps_its_own_position_and_drops_the_rest() -> None:
    found = segment_pair(small_recording(), diverge(small_recording(), 2))
    assert found.divergence is not None
    assert found.divergence.offset == 2
    assert len(found.rows) == 2
    # The differing position is read at the reference's token, from the other side's alternatives.
    assert (found.rows[1].logprob, found.rows[1].bound) == (-1.75, False)
    assert found.lost == len(small_recording().results[2].positions) - 1 - 2


def test_a_token_beyond_the_alternatives_counts_as_a_bound() -> None:
    other = diverge(small_recording(), 2)
    for result in other.results:
        for position in result.positions:
            position.top = [(900, -0.5), (901, -4.0)] if position.token > 100 else position.top
    found = segment_pair(small_recording(), other)
    assert (found.rows[1].logprob, found.rows[1].bound) == (-4.0, True)


def test_a_divergence_at_the_first_token_loses_the_segment() -> None:
    found = segment_pair(small_recording(), diverge(small_recording(), 0))
    assert found.rows == []
    assert found.lost == len(small_recording().results[2].positions) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made.header.update(options={**made.header["options"], "top": 9}), "different options"),
        (lambda made: made.header.update(backend="openai"), "different backend"),
        (lambda made: setattr(made, "complete", False), "the candidate is a partial recording"),
        (lambda made: made.provenance["model"].update(weights="other"), r"model\.weights: 'w' vs 'other'"),
        (lambda made: made.provenance["device"].update(name="other"), r"device\.name: 'n' vs 'other'"),
        (lambda made: made.provenance["model"].update(weights="unknown: no file"), r"model\.weights"),
    ],
)
def test_unlike_recordings_are_refused_by_field(change: Callable[[Recording], None], message: str) -> None:
    other = small_recording()
    change(other)
    with pytest.raises(NotComparableError, match=message) as caught:
        align.check_plans(small_recording(), other)
    assert caught.value.exit_code == 3


def test_a_field_that_is_meant_to_vary_is_allowed_and_reported() -> None:
    other = stamped("1", weights="other")
    align.check_plans(stamped("0"), other, vary=["model"])
    other.provenance["server_args"] = {"chunked_prefill_size": 64}
    found = align.check_plans(stamped("0"), other, vary=["model.weights"])
    assert "server_args" in {difference.field for difference in found}


def test_a_floor_reads_back_equal(tmp_path: Path) -> None:
    built = floors.build([stamped("0"), stamped("1"), diverge(stamped("2"), 2)])
    for name in ("f.jsonl", "f.jsonl.gz"):
        floors.write(built, tmp_path / name)
        assert floors.read(tmp_path / name) == built


def test_a_floor_cuts_each_run_at_its_own_divergence() -> None:
    built = floors.build([stamped("0"), stamped("1"), diverge(stamped("2"), 2)])
    segment = next(item for item in built.items if item.item.leg == "decode")
    assert [len(run) for run in segment.logprobs] == [len(segment.tokens), len(segment.tokens), 3]


def test_a_floor_knows_restarts_and_kind() -> None:
    built = floors.build([stamped("0"), stamped("1")])
    assert (built.kind, built.restarts) == ("repeat", 2)
    varied = stamped("2")
    varied.provenance["server_args"] = {"chunked_prefill_size": 64}
    assert floors.build([stamped("0"), varied]).kind == "variation"


def test_a_floor_over_two_cards_of_a_host_is_no_variation() -> None:
    runs = [stamped("0"), stamped("1")]
    for card, run in enumerate(runs):
        run.provenance["server_env"] = {"CUDA_VISIBLE_DEVICES": str(card), "SGLANG_X": "0"}
    assert floors.build(runs).kind == "repeat"
    runs[1].provenance["server_env"]["SGLANG_X"] = "1"
    assert floors.build(runs).kind == "variation"


def test_one_recording_is_no_floor() -> None:
    with pytest.raises(UsageError, match="1 recording: a floor needs at least 2"):
        floors.build([stamped("0")])


def test_the_same_recording_twice_is_refused() -> None:
    with pytest.raises(NotComparableError, match="the same recording is given twice"):
        floors.build([stamped("0"), stamped("0")])


def test_runs_of_another_model_make_no_floor() -> None:
    with pytest.raises(NotComparableError, match=r"model\.config_sha256"):
        floors.build([stamped("0"), stamped("1", config_sha256="x")])


def test_a_floor_over_other_positions_does_not_apply() -> None:
    built = floors.build([stamped("0"), stamped("1")])
    other = stamped("3")
    other.prompts["a"][0] += 1
    with pytest.raises(NotComparableError, match="measured over other positions"):
        floors.check_applies(built, other)


def test_an_edited_floor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    floors.write(floors.build([stamped("0"), stamped("1")]), path)
    path.write_bytes(path.read_bytes().replace(b"-1.25", b"-1.26", 1))
    with pytest.raises(NotComparableError, match="does not match its hash"):
        floors.read(path)


@pytest.mark.parametrize("content", [b"", b"{}\n{}\n", b"text\n"])
def test_a_foreign_file_is_no_floor(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a floor file"):
        floors.read(path)
