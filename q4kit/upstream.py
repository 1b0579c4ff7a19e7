"""Pull request texts in SGLang's own template, from the patch messages and hand-written notes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from q4kit.errors import UsageError
from q4kit.series.manifest import PatchEntry, Series
from q4kit.series.patchfile import Patch

SECTIONS = ("Motivation", "Mechanism", "Verification")
NOTES = Path("upstream") / "pull_requests.toml"
DOCUMENT = Path("docs") / "UPSTREAM.md"

_HEADING = re.compile(rf"^({'|'.join(SECTIONS)})(?::[ ]?|$)(.*)$")
_TRAILER = re.compile(r"^(?:Claims|Finding|Upstream-Status|[A-Z][a-z]+(?:-[a-z]+)*-by): ")
"""The trailers of a patch message. Any other word with a colon is prose: "Before: 4 failed."."""
_COMMAND = re.compile(r"^(?:python -m )?pytest ")


@dataclass(frozen=True)
class Overlap:
    """What another pull request has to do with a patch."""

    number: int
    text: str


@dataclass(frozen=True)
class PatchNotes:
    """The hand-written part of one patch."""

    speed: str
    overlaps: tuple[Overlap, ...]
    note: str = ""


@dataclass(frozen=True)
class OtherWork:
    """One pull request of others."""

    number: int
    state: str
    title: str
    what: str


@dataclass(frozen=True)
class Notes:
    """The hand-written file: other pull requests, and notes by patch subject."""

    others: tuple[OtherWork, ...]
    patches: Mapping[str, PatchNotes]


def read_notes(path: Path) -> Notes:
    """Return the notes of a file; raises UsageError naming the field that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        others = tuple(OtherWork(**each) for each in data["upstream"])
        patches = {
            each["subject"]: PatchNotes(
                each["speed"], tuple(Overlap(**o) for o in each["overlaps"]), each.get("note", "")
            )
            for each in data["patch"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: {error!r}", remedy="every [[patch]] needs subject, speed and overlaps") from error
    known = {other.number for other in others}
    for subject, notes in patches.items():
        for overlap in notes.overlaps:
            if overlap.number not in known:
                raise UsageError(f"{path}: {subject}: #{overlap.number} has no [[upstream]]", remedy="add one")
    return Notes(others, patches)


def sections(body: str, name: str = "the message") -> dict[str, str]:
    """Return the sections of a commit message, lines as written, trailers left out.

    A heading stands alone on its line or starts its paragraph ("Motivation: ..."). A missing one raises UsageError.
    """
    found: dict[str, list[str]] = {}
    current = ""
    for line in _without_trailers(body):
        match = _HEADING.match(line)
        if match and match[1] not in found:
            current = match[1]
            found[current] = [match[2]] if match[2] else []
        elif current:
            found[current].append(line)
    missing = [section for section in SECTIONS if not "".join(found.get(section, [])).strip()]
    if missing:
        raise UsageError(f"{name} has no {', '.join(missing)}", remedy="see CONTRIBUTING.md on patch messages")
    return {section: "\n".join(found[section]).strip("\n") for section in SECTIONS}


def _without_trailers(body: str) -> list[str]:
    """Return the lines before the trailers that end a message; a trailer's continuation lines start with a space."""
    lines = body.rstrip().split("\n")
    end = len(lines)
    for place in range(len(lines) - 1, -1, -1):
        if _TRAILER.match(lines[place]):
            end = place
        elif not lines[place].startswith(" "):
            break
    return lines[:end]


def unwrapped(text: str) -> str:
    """Return markdown of a section wrapped at 72: GitHub shows every line break of a pull request's text.

    Paragraphs become one line; indented lines, and lines that are a test command, become code blocks.
    """
    out: list[str] = []
    paragraph: list[str] = []
    code: list[str] = []

    def close() -> None:
        if paragraph:
            out.append(" ".join(paragraph))
            paragraph.clear()
        if code:
            out.append("\n".join(["```", *code, "```"]))
            code.clear()

    for line in text.split("\n"):
        is_code = line.startswith("  ") or bool(_COMMAND.match(line))
        if not line.strip():
            close()
        elif is_code:
            if paragraph:
                close()
            code.append(line.strip())
        else:
            if code:
                close()
            paragraph.append(line.strip())
    close()
    return _capitalised("\n\n".join(out))


def _capitalised(text: str) -> str:
    """Return text with a capital first letter when it starts with a word, and not with a name or a flag."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]+\s", text) else text


def pull_request(entry: PatchEntry, patch: Patch, notes: PatchNotes, length: int, others: Sequence[str] = ()) -> str:
    """Return the section of one patch: what to know first, then the text to post under its title."""
    parts = sections(patch.body, patch.name)
    before = [f"Patch {entry.number} of {length}, finding {entry.finding}; {entry.insertions} lines added, "
              f"{entry.deletions} removed in {_count(len(entry.files), 'file')}. Status: {entry.status}."]  # fmt: skip
    if entry.depends:
        before.append("Send after: " + ", ".join(str(int(name[:4])) for name in entry.depends) + ".")
    before += [notes.note] if notes.note else []
    overlaps = [f"- #{o.number}: {o.text}" for o in notes.overlaps] or ["- None of the four pull requests above."]
    files = [f"- `{file}`" for file in entry.files]
    arguments = [f"Adds the server argument `{added}`." for added in entry.adds]
    tests = " ".join(f"`{test}`" for test in entry.tests)
    checklist = [
        "- [ ] Formatted: run pre-commit after the rebase.",
        f"- [ ] Unit tests: written, in {tests} of the companion repository; to move under `test/registered/unit/`.",
        "- [ ] Documentation: " + ("the new argument needs a line." if entry.adds else "nothing to change."),
        "- [ ] Accuracy and speed: see above; no standard benchmark was run.",
        "- [x] Code style: the smallest change in the style of the file.",
    ]
    text = "\n\n".join(
        [
            "### Motivation",
            unwrapped(parts["Motivation"]),
            "### Modifications",
            unwrapped(parts["Mechanism"]),
            *arguments,
            "\n".join(files),
            "### Accuracy Tests",
            unwrapped(parts["Verification"]),
            "### Speed Tests and Profiling",
            notes.speed,
            "### Checklist",
            "\n".join(checklist),
        ]
    )
    return "\n\n".join(
        [
            f"## {entry.number:04d} {entry.subject}",
            " ".join(before),
            "\n".join(["Overlap:", "", *overlaps]),
            f"Title: `{entry.subject}`",
            f"````markdown\n{text}\n````",
        ]
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def document(series: Series, notes: Notes) -> str:
    """Return docs/UPSTREAM.md; raises UsageError when notes and series name different patches."""
    subjects = {entry.subject for entry in series.entries}
    lost, stray = sorted(subjects - notes.patches.keys()), sorted(notes.patches.keys() - subjects)
    if lost or stray:
        what = [f"no notes for {subject!r}" for subject in lost] + [
            f"notes for no patch: {subject!r}" for subject in stray
        ]
        raise UsageError(f"{NOTES}: {'; '.join(what)}", remedy="make the subjects those of the patch files")
    rows = ["| Pull request | State when read | What it is |", "| --- | --- | --- |"]
    rows += [f"| #{o.number} {o.title} | {o.state} | {o.what} |" for o in notes.others]
    overlap = ["| Patch | " + " | ".join(f"#{o.number}" for o in notes.others) + " |"]
    overlap.append("| --- " * (len(notes.others) + 1) + "|")
    for entry in series.entries:
        numbers = {o.number for o in notes.patches[entry.subject].overlaps}
        cells = " | ".join("yes" if o.number in numbers else "" for o in notes.others)
        overlap.append(f"| {entry.number:04d} {entry.subject} | {cells} |")
    sent = [
        pull_request(entry, patch, notes.patches[entry.subject], series.length)
        for entry, patch in zip(series.entries, series.patches, strict=True)
    ]
    return (
        "\n\n".join(
            [
                "# Pull requests, ready to post",
                "One text a patch in the template of SGLang's pull requests, for a branch on main. "
                f"`python tools/upstream.py render` writes this page from the patch messages and `{NOTES}`; "
                f"a test holds it to them. Nothing was sent yet. The patches are for {series.base.tag}: rebase, run "
                "the tests again, send.",
                "Paths below `tests/`, `docs/` and `results/` are of this repository. SGLang's wheel has no tests, so "
                "where a test belongs upstream (`test/registered/unit/`) is taken from public pull requests, not from "
                "the pin.",
                "## Other work on the same",
                "\n".join(rows),
                "What is said about them comes from their texts, for #40235 also from some of its files. Their diffs, "
                "the review threads, and main after the pin were not seen: look again before sending.",
                "\n".join(overlap),
                *sent,
            ]
        )
        + "\n"
    )


def load_notes(root: Path) -> Notes:
    """Return the notes of a repository."""
    return read_notes(root / NOTES)
