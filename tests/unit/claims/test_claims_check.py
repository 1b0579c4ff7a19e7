"""The checker finds every kind of broken quotation and stays silent about what is no measurement."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from q4kit.claims.check import (
    check_document,
    check_ledger,
    evaluate,
    exact_values,
    heading_anchors,
    patch_message,
    resolve_pointer,
    rounds_to,
)
from q4kit.claims.ledger import Ledger, parse
from q4kit.claims.numbers import find
from q4kit.errors import UsageError

RAW = json.dumps({"points": [{"mean": 57.1234, "name": "x"}]}).encode()


def ours(claim_id: str = "tg", **changes: Any) -> dict[str, Any]:
    return {
        "id": claim_id, "owner": "ours", "statement": "s", "value": 57.12, "unit": "tok/s", "base": "v0.5.23",
        "raw": "results/a.json", "sha256": hashlib.sha256(RAW).hexdigest(), "pointer": "/points/0/mean",
        "campaign": "2026-11-29-first", **changes,
    }  # fmt: skip


def theirs(claim_id: str, value: float, unit: str = "tok/s", **changes: Any) -> dict[str, Any]:
    return {
        "id": claim_id, "owner": "theirs", "statement": "s", "value": value, "unit": unit, "base": "elsewhere",
        "source": "a card", **changes,
    }  # fmt: skip


def ledger(*claims: dict[str, Any], exempt: tuple[str, ...] = ()) -> Ledger:
    return parse({"schema": 1, "claim": list(claims), "exempt": [{"text": t, "why": "w"} for t in exempt]})


def found(text: str, book: Ledger, **more: Any) -> list[str]:
    return [str(f) for f in check_document("D.md", text, book, base="v0.5.23", **more)]


# -- numbers in text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decode 57.1 tok/s", [(57.1, "tok/s")]),
        ("2,338 tok/s", [(2338.0, "tok/s")]),
        ("55.9-57.2 tok/s", [(55.9, "tok/s"), (57.2, "tok/s")]),
        ("15.4 -> 19.4 tok/s", [(19.4, "tok/s")]),
        ("99 % of 0.208 ms", [(99.0, "%"), (0.208, "ms")]),
        ("1.4x faster, 3× slower", [(1.4, "x"), (3.0, "x")]),
        ("120 µs and 120 us", [(120.0, "us"), (120.0, "us")]),
        ("9.5e-07 nats", [(9.5e-07, "nats")]),
    ],
)
def test_numbers_with_units_are_seen(text: str, expected: list[tuple[float, str]]) -> None:
    assert [(q.value, q.unit) for q in find(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "48 layers, 512 experts, line 12, #36567, 2026-09-02 14:12, v0.5.23",
        "`--mem-fraction-static 0.3 %` and `57 tok/s`",
        "```\n57 tok/s\n```",
        "48 x 512 experts",
        "[57 ms](https://example.org/57ms)".replace("[57 ms]", "[link]"),
        "SGLang 0.5.23 on Python 3.11",
    ],
)
def test_what_is_no_measurement_is_not_seen(text: str) -> None:
    assert list(find(text)) == []


def test_bare_numbers_under_a_heading_with_a_unit_are_seen() -> None:
    table = "| test | n | tok/s | TTFT (ms) |\n| --- | --- | --- | --- |\n| pp101 | 5 | 57.1 | 480 |\n"
    assert [(q.line, q.value, q.unit) for q in find(table)] == [(3, 57.1, "tok/s"), (3, 480.0, "ms")]


# -- documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "decode 57.12 tok/s <!-- c:tg -->",
        "decode 57.1 tok/s [c:tg]",
        "decode 57 tok/s [c:tg]",
        "# T\n<!-- claims: tg -->\n\ndecode 57.1 tok/s\n",
        "<!-- claims: tg -->\n# T\n## U\ndecode 57.1 tok/s\n",
        "decode 57.1 tok/s\n\nClaims: tg\nSigned-off-by: x\n",
    ],
)
def test_a_marked_number_holds_in_every_notation(text: str) -> None:
    assert found(text, ledger(ours())) == []


def test_an_unmarked_number_is_found_with_its_line() -> None:
    assert found("# T\n\ndecode 57.1 tok/s\n", ledger(ours())) == [
        "D.md:3: '57.1 tok/s' has no claim (mark it, list it, or exempt it)"
    ]


def test_a_list_covers_its_section_only() -> None:
    text = "# T\n<!-- claims: tg -->\n57.1 tok/s\n# U\n57.1 tok/s\n"
    assert [f.split(":")[1] for f in found(text, ledger(ours()))] == ["5"]


@pytest.mark.parametrize("quoted", ["57.2", "57.13", "58", "571"])
def test_wrong_rounding_is_found(quoted: str) -> None:
    findings = found(f"decode {quoted} tok/s [c:tg]", ledger(ours()))
    assert findings[0] == f"D.md:1: '{quoted} tok/s' rounds from none of its claims (tg is 57.12 tok/s)"


def test_wrong_unit_is_found() -> None:
    assert "rounds from none" in found("57.12 ms [c:tg]", ledger(ours()))[0]


def test_unknown_id_is_found() -> None:
    assert "D.md:1: claim 'nope' is not in the ledger" in found("57.12 tok/s [c:nope]", ledger(ours()))


def test_marker_without_its_number_is_found() -> None:
    assert found("faster than ever [c:tg]", ledger(ours())) == [
        "D.md:1: marker tg stands beside no number that rounds from 57.12 tok/s"
    ]


def test_both_ends_of_a_published_range_may_be_quoted_and_nothing_between() -> None:
    book = ledger(theirs("card", 57.1, high=58.2))
    assert found("57.1-58.2 tok/s [c:card]", book) == []
    assert "'57.7 tok/s' rounds from none" in found("57.7 tok/s [c:card]", book)[0]


def test_exempt_text_needs_no_claim() -> None:
    assert found("a 24 GB card", ledger(exempt=("24 GB",))) == []
    assert len(found("a 25 GB card", ledger(exempt=("24 GB",)))) == 1


def test_our_number_from_another_base_must_say_so() -> None:
    book = ledger(ours(base="v0.5.22 + prefix 3"))
    assert "was measured on v0.5.22 + prefix 3, not on v0.5.23" in found("57.1 tok/s [c:tg]", book)[0]
    assert found("57.1 tok/s [c:tg] on v0.5.22", book) == []
    assert found("57.1 tok/s [c:tg],\nnot re-measured on the new pin", book) == []


def test_other_documents_are_checked_only_where_marked() -> None:
    assert found("57.1 tok/s and 3 ms", ledger(ours()), complete=False) == []
    assert "rounds from none" in found("99 tok/s [c:tg]", ledger(ours()), complete=False)[0]


def test_syntax_shown_as_code_is_no_marker() -> None:
    assert found("write `57 tok/s [c:nope]`", ledger(ours())) == []
    assert found("# T\n| table | `<!-- claims: ID, ID -->` |\n", ledger(ours())) == []
    assert found("# T\n```\n<!-- claims: ID -->\n57 tok/s\n```\n", ledger(ours())) == []


def test_patch_message_is_what_is_checked_of_a_patch() -> None:
    patch = (
        "From 0 Mon Sep 17 00:00:00 2001\nFrom: a <b>\nSubject: [PATCH] fix: x\n\nSpeeds up by 12 %.\n"
        "\nSigned-off-by: a\n---\n file | 2 +-\n\ndiff --git a/f b/f\n+sleep 5 ms\n"
    )
    message = patch_message(patch)
    assert [q.text for q in find(message)] == ["12 %"]


# -- the ledger ---------------------------------------------------------------------------------------------------


def read(name: str) -> bytes | None:
    return RAW if name == "results/a.json" else None


def broken(claim: dict[str, Any], anchors: tuple[str, ...] = ("2026-11-29-first",)) -> list[str]:
    return [str(f) for f in check_ledger(ledger(claim), read, anchors)]


def test_a_sound_claim_holds() -> None:
    assert broken(ours()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw": "results/b.json"}, "raw file results/b.json is missing"),
        ({"sha256": "0" * 64}, "has sha256"),
        ({"value": 57.13}, "the ledger says 57.13, results/a.json says 57.1234"),
        ({"pointer": "/points/1/mean"}, "does not lead to a number"),
        ({"pointer": "/points/0/name"}, "leads to 'x', not to a number"),
        ({"campaign": "2026-11-30"}, "no heading with the anchor #2026-11-30"),
        ({"scale": 1000.0}, "says 57123.4"),
    ],
)
def test_every_broken_link_of_a_claim_is_named(changes: dict[str, Any], message: str) -> None:
    findings = broken(ours(**changes))
    assert len(findings) == 1
    assert message in findings[0]
    assert findings[0].startswith("claim tg: ")


def test_scale_turns_seconds_into_milliseconds() -> None:
    assert broken(ours(value=57123.4, unit="ms", scale=1000)) == []


def test_lines_of_a_jsonl_file_are_counted_from_0() -> None:
    lines = b'{"us": 1}\n\n{"us": 2.5}\n'
    claim = ours(raw="results/a.jsonl", sha256=hashlib.sha256(lines).hexdigest(), pointer="/1/us", value=2.5, unit="us")
    campaign = ["2026-11-29-first"]
    assert check_ledger(ledger(claim), lambda name: lines, campaign) == []
    assert exact_values(ledger(claim), lambda name: lines) == {"tg": 2.5}
    past = check_ledger(ledger({**claim, "pointer": "/2/us"}), lambda name: lines, campaign)
    assert "does not lead to a number" in str(past[0])


def test_derived_numbers_are_recomputed() -> None:
    sound = {"id": "t", "owner": "derived", "statement": "s", "value": 47.7, "unit": "GiB", "base": "b",
             "formula": "320001536 * 160 / 2**30"}  # fmt: skip
    assert broken(sound) == []
    assert "is 47.6839" in broken({**sound, "value": 47.6})[0]


@pytest.mark.parametrize("formula", ["__import__('os')", "a + 1", "1 if 1 else 2", "1 /", "1/0", "9**9**9**9"])
def test_formulas_are_arithmetic_only(formula: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(formula)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner": "nobody"}, "owner must be one of ours, theirs, derived, found 'nobody'"),
        ({"raw": ""}, "a number that is ours needs 'raw'"),
        ({"valeu": 1}, "unknown field 'valeu'"),
        ({"metric": "speed"}, "metric 'speed' is unknown"),
        ({"margin": 3}, "margin must lie between 0 and 1"),
        ({"gpu": "H200"}, "a GPU figure of ours needs 'tree'"),
        ({"value": 5, "high": 4}, "needs finite value <= high"),
        ({"id": "Upper Case"}, "lower-case"),
    ],
)
def test_bad_entries_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ledger(ours(**change))


def test_an_id_may_occur_once() -> None:
    with pytest.raises(UsageError, match="'tg' occurs twice"):
        ledger(ours(), ours())


def test_anchors_are_githubs() -> None:
    text = "# A b\n## 2026-11-29 17:30 (negative)\n## A b\n"
    assert heading_anchors(text) == ["a-b", "2026-11-29-1730-negative", "a-b-1"]


@pytest.mark.parametrize(
    ("exact", "written", "ok"),
    [
        (57.1234, 57.12, True),
        (57.126, 57.12, False),
        (57.4, 57.0, True),
        (1559.7, 1560, True),
        (1558.0, 1560, False),
    ],
)
def test_rounding(exact: float, written: float, ok: bool) -> None:
    assert rounds_to(exact, float(written)) is ok


def test_pointer_escapes() -> None:
    assert resolve_pointer({"a/b": {"~": [1, 2]}}, "/a~1b/~0/1") == 2
    with pytest.raises(LookupError, match="begins with"):
        resolve_pointer({}, "a")
