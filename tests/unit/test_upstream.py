"""The pull request texts: every patch has one, in the template, and docs/UPSTREAM.md is what is rendered now."""

from __future__ import annotations

from pathlib import Path

import pytest

from q4kit import series as series_package
from q4kit import upstream
from q4kit.errors import UsageError

BODY = """\
Motivation: a first line that is
wrapped at the end.

Mechanism
one paragraph.

- not touched

Verification:
  pytest tests/patches/test_x.py
Before: 1 failed. After: 1 passed.

Claims: some-id
Finding: 3
Signed-off-by: A <a@b.c>
"""


def test_the_page_is_current() -> None:
    series = series_package.load()
    written = (series.root / upstream.DOCUMENT).read_text(encoding="utf-8")
    assert written == upstream.document(series, upstream.load_notes(series.root)), (
        "docs/UPSTREAM.md is not current: run `python tools/upstream.py render`"
    )


def test_every_patch_has_a_text_with_every_heading() -> None:
    series = series_package.load()
    page = upstream.document(series, upstream.load_notes(series.root))
    for heading in (
        "### Motivation", "### Modifications", "### Accuracy Tests", "### Speed Tests and Profiling", "### Checklist",
    ):  # fmt: skip
        assert page.count(heading) == series.length
    for entry in series.entries:
        assert f"Title: `{entry.subject}`" in page


def test_no_trailer_gets_into_a_text() -> None:
    series = series_package.load()
    page = upstream.document(series, upstream.load_notes(series.root))
    for trailer in ("Signed-off-by:", "Claims:", "Finding:", "Upstream-Status:"):
        assert trailer not in page


def test_sections_of_both_spellings() -> None:
    found = upstream.sections(BODY)
    assert found["Motivation"] == "a first line that is\nwrapped at the end."
    assert found["Mechanism"] == "one paragraph.\n\n- not touched"
    assert found["Verification"].endswith("Before: 1 failed. After: 1 passed.")


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("Before: 4 failed.", "Before: 4 failed."),
        ("Before: 4 failed.\nAfter: 4 passed.", "Before: 4 failed.\nAfter: 4 passed."),
        ("Before: 4 failed.\n\nFinding: 3\nSigned-off-by: A <a@b.c>", "Before: 4 failed."),
        ("Before: 4 failed.\nReported-by: B <b@b.c>", "Before: 4 failed."),
        ("Before:\n  4 failed.\n\nClaims: one\n two\nCo-authored-by: B <b@b.c>", "Before:\n  4 failed."),
    ],
)
def test_only_trailers_are_left_out(end: str, last: str) -> None:
    body = f"Motivation: why\n\nMechanism: how\n\nVerification: seen\n\n{end}\n"
    assert upstream.sections(body)["Verification"] == f"seen\n\n{last}"


@pytest.mark.parametrize("section", upstream.SECTIONS)
def test_a_missing_section_is_named(section: str) -> None:
    with pytest.raises(UsageError, match=f"x.patch has no {section}"):
        upstream.sections(BODY.replace(section, "Other"), "x.patch")


def test_wrapped_lines_join_and_commands_stay_apart() -> None:
    text = upstream.unwrapped(upstream.sections(BODY)["Verification"])
    assert text == "```\npytest tests/patches/test_x.py\n```\n\nBefore: 1 failed. After: 1 passed."
    assert upstream.unwrapped("a first\nsecond.\n\nset_kv_buffer") == "A first second.\n\nset_kv_buffer"
    assert upstream.unwrapped("set_kv_buffer divides\nit") == "set_kv_buffer divides it"
    assert upstream.unwrapped("--flag is\nrefused") == "--flag is refused"


def test_notes_of_another_set_of_patches_are_refused(tmp_path: Path) -> None:
    series = series_package.load()
    notes = upstream.load_notes(series.root)
    first = series.entries[0].subject
    kept = {subject: each for subject, each in notes.patches.items() if subject != first}
    with pytest.raises(UsageError, match="no notes for"):
        upstream.document(series, upstream.Notes(notes.others, kept))
    with pytest.raises(UsageError, match="notes for no patch: 'fix: x'"):
        upstream.document(series, upstream.Notes(notes.others, {**notes.patches, "fix: x": notes.patches[first]}))


def test_an_overlap_with_an_unknown_pull_request_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "n.toml"
    file.write_text('upstream = []\n[[patch]]\nsubject = "s"\nspeed = "x"\noverlaps = [{ number = 1, text = "t" }]\n')
    with pytest.raises(UsageError, match="#1 has no"):
        upstream.read_notes(file)
    file.write_text('upstream = []\n[[patch]]\nsubject = "s"\n')
    with pytest.raises(UsageError, match="speed"):
        upstream.read_notes(file)
