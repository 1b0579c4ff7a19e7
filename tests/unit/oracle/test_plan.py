"""The plan scores what it says, for any prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q4kit.errors import UsageError
from q4kit.oracle.plan import MIN_CONTEXT, Options, clip, make_plan

lengths = st.lists(st.integers(700, 5000), min_size=1, max_size=7)


@given(lengths, st.integers(1, 600), st.integers(6, 40))
def test_each_leg_scores_exactly_what_was_asked(sizes: list[int], scored: int, decode_tokens: int) -> None:
    prompts = {f"p{index}": list(range(size)) for index, size in enumerate(sizes)}
    plan = make_plan(prompts, Options(scored=scored, decode_tokens=decode_tokens))
    for leg in ("prefill", "decode"):
        assert sum(item.scored for item in plan if item.leg == leg) == scored
    assert len({item.name for item in plan}) == len(plan)


@given(lengths, st.integers(1, 600))
def test_every_position_exists_and_has_context(sizes: list[int], scored: int) -> None:
    prompts = {f"p{index}": list(range(size)) for index, size in enumerate(sizes)}
    for item in make_plan(prompts, Options(scored=scored)):
        assert MIN_CONTEXT // 2 <= item.first <= item.length <= len(prompts[item.prompt])
        assert item.generate >= 2 or item.leg == "prefill"


def test_the_default_is_450_positions_a_leg_with_twice_the_share_for_the_long_prompt() -> None:
    prompts = {"a": list(range(1000)), "b": list(range(1000)), "long": list(range(5000))}
    plan = make_plan(prompts, Options())
    shares = {item.name: item.scored for item in plan if item.leg == "prefill"}
    assert shares == {"prefill/a": 112, "prefill/b": 113, "prefill/long": 225} or shares == {
        "prefill/a": 113,
        "prefill/b": 112,
        "prefill/long": 225,
    }


def test_decode_cuts_differ_in_their_place_within_a_page() -> None:
    plan = make_plan({"a": list(range(4096)), "b": list(range(4096))}, Options())
    cuts = [item.length % 64 for item in plan if item.leg == "decode"]
    assert len(set(cuts)) > len(cuts) // 2


def test_clip_keeps_the_end() -> None:
    assert clip(list(range(200)), Options(max_prompt_tokens=64)) == list(range(136, 200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(scored=0), "--scored 0: must be at least 1"),
        (Options(top=1), "--top 1: must be at least 2"),
        (Options(decode_tokens=1), "--decode-tokens 1: must be at least 2"),
        (Options(max_prompt_tokens=10), "--max-prompt-tokens 10: must be 0 or at least 64"),
    ],
)
def test_options_that_cannot_be_recorded_are_refused(options: Options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan({"a": list(range(500))}, options)


def test_a_prompt_too_short_for_its_share_is_named() -> None:
    with pytest.raises(UsageError, match="prompt 'a' has 90 tokens, 132 are needed for 100 scored"):
        make_plan({"a": list(range(90))}, Options(scored=100))


def test_more_decode_segments_than_a_prompt_has_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match="prompt 'a' has 640 tokens, too few for 500 decode segments"):
        make_plan({"a": list(range(640))}, Options(scored=500, decode_tokens=2))


def test_no_decode_leaves_the_leg_out() -> None:
    assert {item.leg for item in make_plan({"a": list(range(900))}, Options(decode=False))} == {"prefill"}
