"""Parser of one ``git format-patch --full-index`` file: header, trailers, per-file blob ids and hunks. Pure."""

from __future__ import annotations

import email.header
import re
from dataclasses import dataclass, field

from q4kit.errors import UsageError
from q4kit.series.blobs import ABSENT, EMPTY

_INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?$")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_TRAILER = re.compile(r"^([A-Za-z][A-Za-z0-9-]*): (.*)$")
_UNSUPPORTED = ("rename from", "rename to", "copy from", "copy to", "GIT binary patch", "Binary files")


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk; ``lines`` keep their leading ``' '``, ``'+'`` or ``'-'`` and have no line end."""

    old_start: int
    new_start: int
    lines: tuple[str, ...]

    @property
    def before(self) -> list[str]:
        """The lines the hunk expects to find."""
        return [line[1:] for line in self.lines if line[0] in " -"]

    @property
    def after(self) -> list[str]:
        """The lines the hunk leaves behind."""
        return [line[1:] for line in self.lines if line[0] in " +"]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The change of one file. Blob ids are 40 hex digits; ``ABSENT`` for a side that does not exist."""

    path: str
    old_blob: str
    new_blob: str
    old_mode: str | None
    new_mode: str | None
    hunks: tuple[Hunk, ...]

    @property
    def insertions(self) -> int:
        return sum(line[0] == "+" for h in self.hunks for line in h.lines)

    @property
    def deletions(self) -> int:
        return sum(line[0] == "-" for h in self.hunks for line in h.lines)


@dataclass(frozen=True, slots=True)
class Patch:
    """A parsed patch file."""

    name: str
    subject: str
    author: str
    date: str
    body: str
    trailers: dict[str, list[str]]
    files: tuple[FileDiff, ...]

    @property
    def insertions(self) -> int:
        return sum(f.insertions for f in self.files)

    @property
    def deletions(self) -> int:
        return sum(f.deletions for f in self.files)

    def trailer(self, key: str) -> str | None:
        """Return the last value of a trailer, or None."""
        values = self.trailers.get(key)
        return values[-1] if values else None


class PatchSyntaxError(UsageError):
    """A patch file that is damaged or not made by the frozen export command."""

    def __init__(self, name: str, line: int, what: str) -> None:
        super().__init__(
            f"{name}:{line}: {what}",
            remedy="restore the file with `git checkout -- <file>`, or write it again with `tools/series.py export`",
        )


def parse_patch(name: str, data: bytes) -> Patch:
    """Return the parsed patch; raises PatchSyntaxError naming the file, the line and what is wrong there."""
    if b"\r\n" in data:
        at = data[: data.index(b"\r\n")].count(b"\n") + 1
        raise PatchSyntaxError(name, at, "line ends in CRLF, expected LF (a checkout with core.autocrlf does this)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise PatchSyntaxError(name, data[: exc.start].count(b"\n") + 1, "not UTF-8") from None
    if not text.endswith("\n"):
        raise PatchSyntaxError(name, text.count("\n") + 1, "file ends inside a line: it is truncated")
    return _Parser(name, text.split("\n")[:-1]).run()


@dataclass(slots=True)
class _Parser:
    name: str
    lines: list[str]
    pos: int = 0
    files: list[FileDiff] = field(default_factory=list)

    def fail(self, what: str) -> PatchSyntaxError:
        return PatchSyntaxError(self.name, self.pos + 1, what)

    @property
    def line(self) -> str | None:
        return self.lines[self.pos] if self.pos < len(self.lines) else None

    def run(self) -> Patch:
        headers = self._headers()
        body = self._body()
        while self.line is not None:
            if self.line == "":  # format-patch ends the file with an empty line
                self.pos += 1
            elif self.line.startswith("diff --git "):
                self.files.append(self._file())
            else:
                raise self.fail(f"expected `diff --git`, found {self.line[:60]!r}")
        if not self.files:
            raise self.fail("no file is changed: the patch is empty or truncated before its first diff")
        paths = [f.path for f in self.files]
        if len(set(paths)) != len(paths):
            raise self.fail("one file is changed twice in the same patch")
        return Patch(
            self.name,
            headers["Subject"],
            headers["From"],
            headers["Date"],
            body,
            _trailers(body),
            tuple(self.files),
        )

    def _headers(self) -> dict[str, str]:
        if self.line is None or not re.match(r"^From 0{40} ", self.line):
            raise self.fail("expected `From 000...000` (git format-patch --zero-commit)")
        self.pos += 1
        found: dict[str, str] = {}
        key = ""
        while self.line:
            if self.line[0] == " " and key:
                found[key] += self.line
            else:
                key, colon, value = self.line.partition(": ")
                if not colon:
                    raise self.fail(f"expected a mail header, found {self.line[:60]!r}")
                found[key] = value
            self.pos += 1
        for wanted in ("From", "Date", "Subject"):
            if wanted not in found:
                raise self.fail(f"mail header {wanted} is missing")
            found[wanted] = str(email.header.make_header(email.header.decode_header(found[wanted])))
        prefix, bracket, found["Subject"] = found["Subject"].partition("[PATCH] ")
        if prefix or not bracket:
            raise self.fail("expected `Subject: [PATCH] ...` without n/m (git format-patch -N)")
        self.pos += 1
        return found

    def _body(self) -> str:
        start = self.pos
        # with --no-stat the message is followed by `---`, an empty line and the first diff
        while self.line is not None and not self.line.startswith("diff --git "):
            self.pos += 1
        lines = self.lines[start : self.pos]
        while lines and lines[-1] == "":
            lines.pop()
        if lines and lines[-1] == "---":
            lines.pop()
        return "\n".join(lines).strip("\n")

    def _file(self) -> FileDiff:
        header = self.line or ""
        match = re.match(r"^diff --git a/(.+) b/\1$", header)
        if match is None:
            raise self.fail(f"path is renamed, quoted or has no a/ b/ prefix: {header!r}")
        path = match.group(1)
        self.pos += 1
        old_mode: str | None = None
        new_mode: str | None = None
        added = deleted = False
        blobs: tuple[str, str] | None = None
        while self.line is not None and not self.line.startswith(("--- ", "diff --git ", "@@ ")) and self.line != "":
            line = self.line
            if line.startswith(_UNSUPPORTED):
                raise self.fail(f"renames, copies and binary files are not supported: {line!r}")
            if line.startswith("new file mode "):
                added, new_mode = True, line.split()[-1]
            elif line.startswith("deleted file mode "):
                deleted, old_mode = True, line.split()[-1]
            elif line.startswith("old mode "):
                old_mode = line.split()[-1]
            elif line.startswith("new mode "):
                new_mode = line.split()[-1]
            elif m := _INDEX.match(line):
                if len(m[1]) != 40 or len(m[2]) != 40:
                    raise self.fail("abbreviated blob id, expected 40 digits (git format-patch --full-index)")
                blobs = (m[1], m[2])
                if m[3]:
                    old_mode = new_mode = m[3]
            else:
                raise self.fail(f"unknown diff header {line!r}")
            self.pos += 1
        if blobs is None:
            raise self.fail(f"{path}: no `index` line (a change of mode alone is not supported)")
        if added != (blobs[0] == ABSENT) or deleted != (blobs[1] == ABSENT):
            raise self.fail(f"{path}: blob ids do not agree with new/deleted file")
        hunks = self._hunks(path, added, deleted)
        if not hunks and {*blobs} != {ABSENT, EMPTY}:
            raise self.fail(f"{path}: its contents change and no hunk says how, the patch is truncated")
        return FileDiff(path, *blobs, None if added else old_mode, None if deleted else new_mode, hunks)

    def _hunks(self, path: str, added: bool, deleted: bool) -> tuple[Hunk, ...]:
        if self.line is None or not self.line.startswith("--- "):
            return ()  # an added or deleted empty file
        for mark, prefix, absent in (("---", "a", added), ("+++", "b", deleted)):
            expected = f"{mark} /dev/null" if absent else f"{mark} {prefix}/{path}"
            if (self.line or "").rstrip("\t") != expected:
                raise self.fail(f"expected {expected!r}, found {self.line!r}")
            self.pos += 1
        hunks: list[Hunk] = []
        while self.line is not None and (m := _HUNK.match(self.line)):
            self.pos += 1
            old_left = int(m[2]) if m[2] is not None else 1
            new_left = int(m[4]) if m[4] is not None else 1
            lines: list[str] = []
            while old_left > 0 or new_left > 0:
                line = self.line
                if line is None or not line or line[0] not in " +-\\":
                    raise self.fail(f"{path}: hunk {len(hunks) + 1} ends early, the patch is truncated or edited")
                if line[0] != "\\":
                    old_left -= line[0] in " -"
                    new_left -= line[0] in " +"
                    lines.append(line)
                self.pos += 1
            if old_left or new_left:
                raise self.fail(f"{path}: hunk {len(hunks) + 1} has other line counts than its header")
            if self.line is not None and self.line.startswith("\\"):
                self.pos += 1
            hunks.append(Hunk(int(m[1]), int(m[3]), tuple(lines)))
        if not hunks:
            raise self.fail(f"{path}: no hunk, the patch is truncated")
        return tuple(hunks)


def _trailers(body: str) -> dict[str, list[str]]:
    """Return the trailers of the last paragraph; continuation lines start with a space, as in git."""
    found: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in body.split("\n\n")[-1].split("\n"):
        if m := _TRAILER.match(line):
            last = found.setdefault(m[1], [])
            last.append(m[2].strip())
        elif line.startswith(" ") and last:
            last[-1] += " " + line.strip()
        else:
            last = None
    return found
