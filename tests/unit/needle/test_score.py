"""Every way an answer can be right, wrong or missing has one class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q4kit.needle.codes import Needle, make_needles, squeeze
from q4kit.needle.score import (
    BROKEN,
    RETRIEVAL,
    Answer,
    Outcome,
    chat_answer,
    edit_distance,
    forced_answer,
    score,
    split_thinking,
)

WANTED = Needle("Ralpen", "K7QM-3TXD-9WBE")
OTHER = Needle("Bomurn", "ZZ34-HJKP-2VW6")


def classify(answer: Answer) -> Outcome:
    return score(answer, WANTED, [OTHER]).outcome


@pytest.mark.parametrize(
    "text",
    [
        "K7QM-3TXD-9WBE",
        "The access code of depot Ralpen is K7QM-3TXD-9WBE.",
        "**K7QM-3TXD-9WBE**",
        "k7qm-3txd-9wbe",
        "K7QM 3TXD 9WBE",
        "K7QM\u20113TXD\u20119WBE",
        "K7QM3TXD9WBE",
        "K7QM-3TXD-9WBE, not ZZ34-HJKP-2VW6, which belongs to depot Bomurn",
    ],
)
def test_right_code_in_any_usual_dress(text: str) -> None:
    """EvalScope-style exact equality measured wording, not retrieval (ninfer 171)."""
    assert classify(chat_answer(text, "stop")) is Outcome.FOUND


def test_code_in_thinking_is_not_in_the_answer() -> None:
    """RULER's scorer takes a substring anywhere in the output."""
    answer = chat_answer("<think>It is K7QM-3TXD-9WBE.</think>I could not find it.", "stop")
    assert classify(answer) is Outcome.FOUND_IN_THINKING_ONLY


def test_thinking_that_the_template_opened_is_thinking() -> None:
    answer = chat_answer("so K7QM-3TXD-9WBE it is</think>NONE", "stop", starts_inside=True)
    assert classify(answer) is Outcome.FOUND_IN_THINKING_ONLY
    assert answer.final == "NONE"


def test_closing_tag_alone_still_separates() -> None:
    assert split_thinking("a</think>b") == ("b", "a", False)


def test_budget_spent_on_thinking_is_truncated_not_wrong() -> None:
    """omlx 3772: up to 52 % of items were empty because the thinking budget ate the answer."""
    answer = chat_answer("<think>Let me look. The text says K7QM-3T", "length")
    assert classify(answer) is Outcome.TRUNCATED


def test_thinking_broken_off_by_a_stop_is_an_early_stop() -> None:
    assert classify(chat_answer("<think>Let me", "stop")) is Outcome.EARLY_STOP


def test_answer_cut_before_the_code_is_truncated() -> None:
    """sieval 11: 124 tokens were left for a 150-token answer."""
    assert classify(chat_answer("The access code of the depot is", "length")) is Outcome.TRUNCATED


def test_listing_every_code_is_not_retrieval() -> None:
    both = "ZZ34-HJKP-2VW6 or K7QM-3TXD-9WBE"
    found = score(chat_answer(both, "stop"), WANTED, [OTHER])
    assert (found.outcome, found.owner) == (Outcome.WRONG_CODE, "Bomurn")


def test_wrong_code_says_whose_it_is() -> None:
    found = score(chat_answer("ZZ34-HJKP-2VW6", "stop"), WANTED, [OTHER])
    assert (found.outcome, found.owner, found.found) == (Outcome.WRONG_CODE, "Bomurn", "ZZ34HJKP2VW6")


def test_invented_code_belongs_to_nobody() -> None:
    found = score(chat_answer("AAAA-BBBB-CCCC", "stop"), WANTED, [OTHER])
    assert (found.outcome, found.owner) == (Outcome.WRONG_CODE, "")


@pytest.mark.parametrize("text", ["K7QM-3TXD-9WB", "K7QM-3TXD-9WBF", "K7QM-3T0D-9WBE", "K7QM-3TXD"])
def test_damaged_copy_is_partial_with_its_distance(text: str) -> None:
    found = score(chat_answer(text, "stop"), WANTED, [OTHER])
    assert found.outcome is Outcome.PARTIAL
    assert found.distance == edit_distance(squeeze(text), squeeze(WANTED.code))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [("", Outcome.EMPTY), (" \n", Outcome.EMPTY), ("<|im_end|>", Outcome.EMPTY), ("NONE", Outcome.SAID_NONE),
     ("I am sorry.", Outcome.NO_CODE), ("NONESUCH words", Outcome.NO_CODE)],
)  # fmt: skip
def test_silence_refusal_and_talk_are_three_things(text: str, outcome: Outcome) -> None:
    assert classify(chat_answer(text, "stop")) is outcome


def test_nan_and_http_error_are_no_answers() -> None:
    """A sampler that returns an empty sample on HTTP 400 turns a fault into a wrong answer."""
    assert classify(Answer("", finish="nan")) is Outcome.NAN
    assert classify(Answer("K7QM-3TXD-9WBE", finish="error", error="HTTP 400")) is Outcome.HTTP_ERROR
    assert Outcome.HTTP_ERROR in BROKEN
    assert RETRIEVAL.isdisjoint(BROKEN)
    assert set(Outcome) == RETRIEVAL | BROKEN


def test_forced_output_counts_to_the_end_of_its_first_line() -> None:
    babble = " ZZ34-HJKP-2VW6.\nThe access code of depot Ralpen is K7QM-3TXD-9WBE."
    assert classify(forced_answer(babble, "length")) is Outcome.WRONG_CODE
    good = "\n K7QM-3TXD-9WBE.\nThe access code of depot Bomurn is ZZ34-HJKP-2VW6."
    assert classify(forced_answer(good, "length")) is Outcome.FOUND


def test_forced_output_counts_to_the_end_of_turn_token() -> None:
    assert classify(forced_answer("<|im_end|>K7QM-3TXD-9WBE", "length")) is Outcome.EMPTY


def test_forced_output_that_breaks_off_inside_the_code_is_truncated() -> None:
    assert classify(forced_answer(" K7QM-3T", "length")) is Outcome.TRUNCATED
    assert classify(forced_answer(" words without end", "length")) is Outcome.NO_CODE


def test_none_is_an_answer_however_it_ended() -> None:
    assert classify(forced_answer(" NONE<|im_end|>", "stop")) is Outcome.SAID_NONE
    assert classify(chat_answer("NONE. The text speaks of other depots", "length")) is Outcome.SAID_NONE


def test_stop_despite_ignore_eos_is_an_early_stop() -> None:
    """A raw completion that draws an immediate end of text gave empty answers at 248k (needle log of the series)."""
    assert classify(forced_answer("", "stop")) is Outcome.EARLY_STOP


@given(st.text(max_size=80), st.sampled_from(["stop", "length", "nan", "error"]), st.booleans())
def test_every_output_has_exactly_one_class_and_noise_is_never_found(text: str, finish: str, inside: bool) -> None:
    answer = chat_answer(text, finish, starts_inside=inside)
    assert classify(answer) in Outcome
    assert classify(answer) is not Outcome.FOUND


@given(st.integers(0, 10_000))
def test_codes_are_far_apart(seed: int) -> None:
    """PARTIAL accepts four edits; two codes of one prompt must never be that close."""
    needles = make_needles(str(seed), 12)
    codes = [squeeze(n.code) for n in needles]
    assert min(edit_distance(a, b) for i, a in enumerate(codes) for b in codes[:i]) > 4
    assert len({n.key for n in needles}) == 12
    assert make_needles(str(seed), 12) == needles
