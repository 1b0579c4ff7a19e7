"""Lints of the series folder. They do not repeat what applying proves; they judge headers, metadata and added lines.

"One reason a patch" cannot be decided by a program. What is checked: the subject does not join two things with "and",
"&", "+" or ";", it is one conventional-commit line of at most 72 characters, and `Finding` occurs once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from q4kit.errors import Q4Error
from q4kit.series import git
from q4kit.series.chain import prefix_trees
from q4kit.series.manifest import MANIFEST, STATUS, PatchEntry, Series
from q4kit.series.patchfile import Patch

ALLOWED_FILES = frozenset({MANIFEST, ".gitattributes", "README.md"})
SUBJECT_LENGTH = 72
BODY_LENGTH = 75
"""As the Linux kernel's checkpatch asks of commit messages: `git log` indents by 4 and still fits 80 columns."""

_SUBJECT = re.compile(r"^(feat|fix|perf|refactor|test|docs|build|chore)\([a-z0-9_./-]+\): [a-z0-9-].*[^.]$")
_TWO_THINGS = re.compile(r"(?i)\band\b|&|;| \+ ")
_DEBUG = (
    (re.compile(r"^\s*print\("), "print("),
    (re.compile(r"\bbreakpoint\("), "breakpoint("),
    (re.compile(r"\b(?:i?pdb)\.set_trace"), "set_trace"),
    (re.compile(r"\b(?:TODO|FIXME|XXX)\b.*\b(?:q4|q4head)\b", re.IGNORECASE), "a note to ourselves"),
    (re.compile(r"/(?:root|home)/\w+"), "a path of somebody's machine"),
)
_TRAILERS = ("Finding", "Upstream-Status", "Signed-off-by")
_SECTIONS = ("Motivation", "Mechanism", "Verification")


def lint(series: Series) -> list[str]:
    """Return every finding as ``file: what``, empty when the folder is in order."""
    found = list(_folder(series))
    for entry in series.entries:
        try:
            found += [f"{entry.file}: {what}" for what in _patch(entry, series.patches[entry.number - 1])]
        except Q4Error as exc:  # series.patches names the damaged file itself
            return [*found, str(exc)]
    found += _recorded(series)
    found += _references(series)
    return found


def _folder(series: Series) -> Iterator[str]:
    listed = {e.file for e in series.entries} | ALLOWED_FILES
    for path in sorted(series.folder.iterdir()):
        if path.name not in listed:
            yield f"{path.name}: not listed in {MANIFEST}"


def _patch(entry: PatchEntry, patch: Patch) -> Iterator[str]:
    subject = patch.subject
    if subject != entry.subject:
        yield f"subject {subject!r}, but {MANIFEST} says {entry.subject!r}"
    if re.search(r"[\[\]]", subject):
        yield f"subject {subject!r} has brackets, which `git am` strips"
    elif not _SUBJECT.match(subject):
        yield f"subject {subject!r} is not `type(scope): what`, lower case, without a full stop"
    if len(subject) > SUBJECT_LENGTH:
        yield f"subject has {len(subject)} characters, expected at most {SUBJECT_LENGTH}"
    if m := _TWO_THINGS.search(subject):
        yield f"subject joins two things with {m[0].strip()!r}: one reason a patch"
    for key in _TRAILERS:
        values = patch.trailers.get(key, [])
        if len(values) != 1:
            yield f"{len(values)} trailers `{key}:` in the last paragraph, expected 1"
    for key, recorded in (("Finding", entry.finding), ("Upstream-Status", entry.status)):
        value = patch.trailer(key)
        if value is not None and value != recorded:
            yield f"trailer `{key}: {value}`, but {MANIFEST} says {recorded!r}"
    if not STATUS.match(entry.status):
        yield (
            f"status {entry.status!r}, expected `Submitted [url]`, `Pending [why]`, `Backport [version]`, "
            "`Denied [why]`, `Inactive-Upstream [since]` or `Inappropriate [why]`"
        )
    expected = f"{git.MAINTAINER} <{git.MAINTAINER_EMAIL}>"
    if patch.author != expected:
        yield f"author {patch.author}, expected {expected}"
    missing = [s for s in _SECTIONS if not re.search(rf"^{s}\b", patch.body, re.MULTILINE)]
    if missing:
        yield f"message lacks a paragraph starting with {', '.join(missing)}"
    for n, line in enumerate(patch.body.split("\n"), start=1):
        # a trailer, a link or a command line cannot be wrapped
        unbreakable = "://" in line or line.startswith("    ") or ": " in line[:20] or " " not in line.strip()
        if len(line) > BODY_LENGTH and not unbreakable:
            yield f"message line {n} has {len(line)} characters, expected at most {BODY_LENGTH}"
    yield from _added_lines(patch)


def _added_lines(patch: Patch) -> Iterator[str]:
    for diff in patch.files:
        for hunk in diff.hunks:
            at = hunk.new_start
            for line in hunk.lines:
                if line[0] == "+":
                    text = line[1:]
                    if text != text.rstrip():
                        yield f"{diff.path}:{at}: trailing white space"
                    for pattern, what in _DEBUG:
                        if pattern.search(text):
                            yield f"{diff.path}:{at}: debug leftover: {what}"
                at += line[0] in " +"


def _recorded(series: Series) -> Iterator[str]:
    """Compare the computed fields of series.toml with the patch files."""
    try:
        trees = prefix_trees(series.base.files, series.patches)
    except Q4Error as exc:
        yield str(exc)
        return
    touched = {d.path for p in series.patches for d in p.files}
    for path in sorted(set(series.base.files) - touched):
        yield f"{MANIFEST}: base.files lists {path}, which no patch touches"
    for entry, patch, tree in zip(series.entries, series.patches, trees[1:], strict=True):
        for name, recorded, computed in (
            ("files", list(entry.files), [d.path for d in patch.files]),
            ("insertions", entry.insertions, patch.insertions),
            ("deletions", entry.deletions, patch.deletions),
            ("tree_after", entry.tree_after, tree),
        ):
            if recorded != computed:
                yield f"{entry.file}: {name} is {recorded} in {MANIFEST}, expected {computed}"


def _references(series: Series) -> Iterator[str]:
    """Check what entries point at: earlier patches, tests that exist, arguments that the patch adds."""
    known: set[str] = set()
    for entry, patch in zip(series.entries, series.patches, strict=True):
        for other in entry.depends:
            if other not in known:
                yield f"{entry.file}: depends on {other!r}, which is no earlier patch"
        known.add(entry.file)
        added = "\n".join(t[1:] for d in patch.files for h in d.hunks for t in h.lines if t[0] == "+")
        for argument in entry.adds:
            if not argument.startswith("--"):
                yield f"{entry.file}: adds {argument!r}, expected a server argument `--name`"
            elif argument not in added and argument[2:].replace("-", "_") not in added:
                yield f"{entry.file}: adds {argument}, which does not occur in its added lines"
        if not entry.tests:
            yield f"{entry.file}: names no test"
        yield from _tests(series.root, entry.file, entry.tests)
    for regression in series.regressions:
        yield from _tests(series.root, f"regression {regression.finding}", regression.tests)


def _tests(root: Path, who: str, tests: tuple[str, ...]) -> Iterator[str]:
    for test in tests:
        if not (root / test).is_file():
            yield f"{who}: test {test} does not exist"
