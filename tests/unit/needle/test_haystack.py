"""Prompts: exact length, needles where they should be, once each, and provably absent where removed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q4kit.bench.texts import TextKind
from q4kit.errors import UsageError
from q4kit.needle.codes import Needle, assert_unique, make_needles, question
from q4kit.needle.haystack import Frame, TokenTexts, ask, build, chat_frame, chat_mark
from q4kit.needle.plan import Config, Control, Mode, PromptPlan, even_depths, make_plan
from tests.fakes.adversary import Adversary

CLIENT = Adversary().client()
DEPTHS = even_depths(5)


def plan_for(length: int, *, depths: tuple[float, ...] = DEPTHS, **more: int) -> PromptPlan:
    return next(p for p in make_plan(Config((length,), depths, **more)) if p.control is Control.NONE)


@pytest.mark.parametrize("kind", list(TextKind))
@pytest.mark.parametrize("mode", list(Mode))
def test_every_question_has_exactly_the_asked_length(kind: TextKind, mode: Mode) -> None:
    frame = Frame()
    if mode is Mode.CHAT:
        frame = chat_frame(CLIENT, CLIENT.tokenize_chat([{"role": "user", "content": chat_mark()}]))
    plan = plan_for(8192)
    hay = build(CLIENT, plan, kind, mode, frame, TokenTexts(CLIENT), reserve=24)
    for hidden in hay.hidden:
        for answering in (False, True):
            ids = ask(CLIENT, hay, mode, hidden.needle.key, answering=answering)
            assert len(ids) == (8192 - 24 if answering else 8192)
            text = CLIENT.detokenize(ids)
            assert text.count(hidden.needle.sentence) == 1
            assert question(hidden.needle.key) in text


def test_chat_frame_is_the_template_around_the_text() -> None:
    frame = chat_frame(CLIENT, CLIENT.tokenize_chat([{"role": "user", "content": chat_mark()}]))
    assert CLIENT.detokenize(list(frame.before)) == "<|im_start|>user\n"
    assert CLIENT.detokenize(list(frame.after)) == "<|im_end|>\n<|im_start|>assistant\n"
    assert not frame.opens_thinking


def test_template_that_opens_thinking_is_noticed() -> None:
    rendered = CLIENT.tokenize(f"<|user|>{chat_mark()}<|assistant|><think>\n")
    assert chat_frame(CLIENT, rendered).opens_thinking
    closed = CLIENT.tokenize(f"<|user|>{chat_mark()}<|assistant|><think>\n\n</think>\n")
    assert not chat_frame(CLIENT, closed).opens_thinking


def test_template_that_drops_the_text_is_refused() -> None:
    with pytest.raises(UsageError, match="exactly once"):
        chat_frame(CLIENT, CLIENT.tokenize("<|user|><|assistant|>"))


def test_needles_lie_at_their_depth_and_between_sentences() -> None:
    plan = plan_for(16384, jitter=0)
    hay = build(CLIENT, plan, TextKind.PROSE, Mode.IGNORE_EOS, Frame(), TokenTexts(CLIENT))
    for hidden in (h for h in hay.hidden if h.wanted):
        assert hidden.depth == pytest.approx(hidden.cell_depth, abs=0.04)
        before = CLIENT.detokenize(list(hay.ids[: hidden.index])).rstrip()
        assert before == "" or before.endswith(".")
        assert CLIENT.detokenize(list(hay.ids[hidden.index :])).lstrip().startswith(hidden.needle.sentence)


def test_removed_needles_leave_length_and_position_of_everything_else() -> None:
    plan = plan_for(8192)
    texts = TokenTexts(CLIENT)
    full = build(CLIENT, plan, TextKind.PROSE, Mode.IGNORE_EOS, Frame(), texts)
    bare = build(CLIENT, plan, TextKind.PROSE, Mode.IGNORE_EOS, Frame(), texts, remove_wanted=True)
    assert len(full.ids) == len(bare.ids)
    assert [h.index for h in full.hidden] == [h.index for h in bare.hidden]
    text = CLIENT.detokenize(list(bare.ids))
    for hidden in full.hidden:
        assert (hidden.needle.code in text) is not hidden.wanted


def test_jitter_moves_needles_off_the_grid_but_stays_inside() -> None:
    plan = plan_for(8192, depths=(0.0, 0.5, 1.0))
    moved = [p.depth - p.cell_depth for p in plan.wanted]
    assert any(abs(m) > 1e-4 for m in moved)
    assert all(abs(m) <= 0.02 for m in moved)
    assert all(0 <= p.depth <= 1 for p in plan.wanted)


def test_shifted_control_keeps_keys_and_changes_place_and_code() -> None:
    plans = make_plan(Config((8192,), DEPTHS))
    plain = next(p for p in plans if p.control is Control.NONE)
    shifted = next(p for p in plans if p.control is Control.SHIFTED)
    assert [p.needle.key for p in plain.wanted] == [p.needle.key for p in shifted.wanted]
    assert {p.needle.code for p in plain.wanted}.isdisjoint(p.needle.code for p in shifted.wanted)
    assert all(abs(a.depth - b.depth) > 0.3 for a, b in zip(plain.wanted, shifted.wanted, strict=True))


def test_every_cell_gets_its_samples() -> None:
    plans = make_plan(Config((4096, 8192), even_depths(11), samples=3, per_prompt=4))
    real = [p for p in plans if p.control is Control.NONE]
    for length in (4096, 8192):
        cells = [w.cell_depth for p in real if p.length == length for w in p.wanted]
        assert sorted(cells) == sorted(list(even_depths(11)) * 3)
    assert max(len(p.wanted) for p in real) <= 4


def test_duplicate_code_is_an_error() -> None:
    """RULER2 does not de-duplicate: among 10,000 seven-digit values a collision is 99.6 % likely."""
    a, b = Needle("Ralpen", "K7QM-3TXD-9WBE"), Needle("Bomurn", "ZZ34-HJKP-2VW6")
    text = f"{a.sentence} {b.sentence} also k7qm 3txd 9wbe"
    with pytest.raises(UsageError, match="K7QM-3TXD-9WBE occurs 2 times in the prompt, expected once"):
        assert_unique(text, [a, b])


def test_missing_code_is_an_error() -> None:
    with pytest.raises(UsageError, match="occurs 0 times"):
        assert_unique("nothing here", make_needles("s", 1))


def test_code_that_should_be_absent_is_an_error() -> None:
    needle = make_needles("s", 1)[0]
    with pytest.raises(UsageError, match="must be absent"):
        assert_unique(needle.sentence, [], absent=[needle])


def test_removed_needle_whose_code_is_still_there_is_an_error() -> None:
    """Otherwise the absent control would ask for a code that a distractor gives away."""
    plan = plan_for(8192)
    twin = replace(plan.distractors[0], needle=Needle(plan.distractors[0].needle.key, plan.wanted[0].needle.code))
    plan = replace(plan, distractors=(twin, *plan.distractors[1:]))
    with pytest.raises(UsageError, match=f"{plan.wanted[0].needle.code} must be absent"):
        build(CLIENT, plan, TextKind.PROSE, Mode.IGNORE_EOS, Frame(), TokenTexts(CLIENT), remove_wanted=True)
    with pytest.raises(UsageError, match="occurs 2 times"):
        build(CLIENT, plan, TextKind.PROSE, Mode.IGNORE_EOS, Frame(), TokenTexts(CLIENT))


def test_too_many_needles_for_the_length_is_an_error() -> None:
    with pytest.raises(UsageError, match="do not fit a prompt of 512 tokens"):
        build(CLIENT, plan_for(512), TextKind.PROSE, Mode.IGNORE_EOS, Frame(), TokenTexts(CLIENT))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lengths": (100,)}, r"256\.\.262144 tokens, found 100"),
        ({"lengths": (300_000,)}, "found 300000"),
        ({"depths": (1.5,)}, r"0\.\.1, found 1\.5"),
        ({"samples": 0}, "samples must be at least 1, found 0"),
        ({"jitter": 0.7}, "jitter must lie"),
        ({"depths": ()}, "at least one length and one depth"),
    ],
)
def test_bad_configuration_names_value_and_expectation(bad: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Config(**{"lengths": (8192,), "depths": (0.5,), **bad})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(6000, 9000), st.integers(1, 5), st.integers(0, 6))
def test_any_plan_builds_to_its_exact_length(seed: int, length: int, count: int, distractors: int) -> None:
    plan = plan_for(length, depths=even_depths(count), seed=seed, distractors=distractors)
    hay = build(CLIENT, plan, TextKind.WORDS, Mode.IGNORE_EOS, Frame(), TokenTexts(CLIENT))
    assert len(hay.hidden) == count + distractors
    assert all(len(ask(CLIENT, hay, Mode.IGNORE_EOS, h.needle.key)) == length for h in hay.hidden if h.wanted)
