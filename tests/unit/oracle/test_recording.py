"""Recording files: exact, diffable, and refused by name when something is wrong with them."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q4kit.errors import NotComparableError, UsageError
from q4kit.oracle import numbers
from q4kit.oracle import recording as recordings
from q4kit.oracle.simulate import small_recording


@given(st.floats(max_value=0, allow_infinity=False, allow_nan=False, width=32))
def test_float32_values_read_back_exactly_from_their_shortest_text(value: float) -> None:
    assert numbers.kind([value]) == "float32"
    assert numbers.parse(json.loads(numbers.text(value, "float32")), "float32") == value


@given(st.floats(max_value=0, allow_infinity=False, allow_nan=False))
def test_float64_values_read_back_exactly(value: float) -> None:
    kind = numbers.kind([value]) if abs(value) < 3e38 else "float64"
    assert numbers.parse(json.loads(numbers.text(value, kind)), kind) == value


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_recording_reads_back_equal(tmp_path: Path, name: str) -> None:
    made = small_recording()
    made.results[0].positions[0].logprob = float(np.float32(-0.1))
    made.results[-1].positions[0].again = float(np.float32(-0.3))
    recordings.write(made, tmp_path / name)
    found = recordings.read(tmp_path / name)
    assert found == made
    assert found.content_hash() == made.content_hash()


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        recordings.write(small_recording(), tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_one_changed_value_changes_one_line() -> None:
    left, right = small_recording(), small_recording()
    right.results[1].positions[2].logprob = -9.5
    a, b = (recordings.encode(each).decode().splitlines() for each in (left, right))
    # The position, and the end line that carries the hash.
    assert sum(x != y for x, y in zip(a, b, strict=True)) == 2


def test_a_partial_recording_keeps_its_reason(tmp_path: Path) -> None:
    made = small_recording()
    made.complete, made.reason = False, "interrupted"
    recordings.write(made, tmp_path / "p.jsonl")
    found = recordings.read(tmp_path / "p.jsonl")
    assert (found.complete, found.reason) == (False, "interrupted")


def test_nan_is_never_written() -> None:
    made = small_recording()
    made.results[0].positions[0].logprob = math.nan
    with pytest.raises(ValueError, match="nan is not finite"):
        recordings.encode(made)


def lines() -> list[str]:
    return recordings.encode(small_recording()).decode().splitlines()


def joined(text: list[str]) -> bytes:
    return ("\n".join(text) + "\n").encode()


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_non_finite_value_is_refused_with_its_line(word: str) -> None:
    text = lines()
    at = next(index for index, line in enumerate(text) if '"pos"' in line)
    text[at] = text[at].replace('"lp":-1.25', f'"lp":{word}')
    with pytest.raises(NotComparableError, match=rf"x:{at + 1}: {word} is not a log-probability"):
        recordings.decode(joined(text), "x")


def test_a_file_without_its_end_line_is_truncated() -> None:
    with pytest.raises(NotComparableError, match=r"x: truncated \(no end line\)"):
        recordings.decode(joined(lines()[:-1]), "x")


def test_a_lost_position_is_counted() -> None:
    text = lines()
    del text[next(index for index, line in enumerate(text) if '"pos"' in line)]
    with pytest.raises(NotComparableError, match=r"x: \d+ positions, its end line says \d+"):
        recordings.decode(joined(text), "x")


def test_an_edited_value_does_not_match_the_hash() -> None:
    text = [line.replace("-1.25", "-1.26", 1) if '"pos"' in line else line for line in lines()]
    with pytest.raises(NotComparableError, match="values do not match their hash"):
        recordings.decode(joined(text), "x")


def test_content_after_the_end_is_refused() -> None:
    text = lines()
    with pytest.raises(NotComparableError, match="content after the end line"):
        recordings.decode(joined([*text, text[-2]]), "x")


def test_a_position_before_any_item_is_damage() -> None:
    text = lines()
    position = next(line for line in text if '"pos"' in line)
    with pytest.raises(NotComparableError, match=r"x:2: damaged"):
        recordings.decode(joined([text[0], position]), "x")


@pytest.mark.parametrize("content", [b"", b"not json\n", b"[]\n", b"{}\n"])
def test_a_foreign_file_is_a_usage_error(content: bytes) -> None:
    with pytest.raises(UsageError, match="not an oracle recording"):
        recordings.decode(content, "x")


def test_another_schema_is_named() -> None:
    text = lines()
    text[0] = text[0].replace("recording/1", "recording/9")
    with pytest.raises(UsageError, match=r"schema 'q4kit\.oracle\.recording/9', expected"):
        recordings.decode(joined(text), "x")


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        recordings.read(tmp_path / "none.jsonl")


def test_half_a_gzip_file_is_damage(tmp_path: Path) -> None:
    whole = gzip.compress(recordings.encode(small_recording()))
    (tmp_path / "h.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NotComparableError, match="damaged"):
        recordings.read(tmp_path / "h.jsonl.gz")


def test_the_plan_hash_names_ids_and_items() -> None:
    base, other = small_recording(), small_recording()
    assert recordings.plan_hash(base) == recordings.plan_hash(other)
    other.prompts["a"][3] += 1
    assert recordings.plan_hash(base) != recordings.plan_hash(other)
    other = small_recording()
    other.results[0].item = replace(other.results[0].item, first=other.results[0].item.first - 1)
    assert recordings.plan_hash(base) != recordings.plan_hash(other)
