"""How each patch relates to files that are not a recorded prefix: contained, fits, fits elsewhere, or conflicts.

"Does not apply" is never taken for "already applied": a patch counts as contained only if it can be taken back.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from q4kit.series import git, hunks
from q4kit.series.hunks import Misfit
from q4kit.series.manifest import Series
from q4kit.series.patchfile import Patch

Verdict = Literal["contained", "fits", "offset", "conflict", "ambiguous"]

_SUCCEEDED = re.compile(rb"^Hunk #\d+ succeeded at \d+ \(offset (-?\d+) lines?\)", re.MULTILINE)
_FAILED = re.compile(rb"^error: patch failed: (.+):(\d+)$", re.MULTILINE)
_FILE_ERROR = re.compile(
    rb"^error: (.+): (?:No such file or directory|already exists in working directory)$", re.MULTILINE
)


@dataclass(frozen=True)
class PatchVerdict:
    """How one patch relates to the files: ``offset`` is the largest distance in lines from the recorded place."""

    file: str
    verdict: Verdict
    offset: int = 0
    misfit: Misfit | None = None

    def line(self) -> str:
        """Return the one-line form used by `status` and `radar`."""
        text = {
            "contained": "absorbed",
            "fits": "clean",
            "offset": f"offset {self.offset}",
            "ambiguous": "ambiguous: both the patch and its reverse fit",
            "conflict": f"conflict {self.misfit}",
        }[self.verdict]
        return f"{self.file}: {text}"


class Sandbox:
    """A private repository that holds only the touched files; nothing around it is ever read or written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        git.run(["init", "-q", "--template=", "."], root, ceiling=root.parent)

    def write(self, contents: Mapping[str, bytes], modes: Mapping[str, str] | None = None) -> None:
        """Write files below the root."""
        for path, data in contents.items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if (modes or {}).get(path) == "100755" else 0o644)

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, None when it does not exist."""
        target = self.root / path
        return target.read_bytes() if target.is_file() else None

    def apply(self, patch: Path, *, reverse: bool = False, check: bool = False) -> tuple[bool, int, bytes]:
        """Run ``git apply``; returns success, the largest line offset, and what git said. All or nothing."""
        options = [
            "--verbose",
            "--whitespace=nowarn",
            *(["-R"] if reverse else []),
            *(["--check"] if check else []),
        ]
        done = git.run(["apply", *options, patch.resolve()], self.root, check=False, ceiling=self.root.parent)
        said = done.stderr + done.stdout
        offsets = [abs(int(n)) for n in _SUCCEEDED.findall(said)]
        return done.returncode == 0, max(offsets, default=0), said


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Yield a private repository in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="q4head-") as tmp:
        root = Path(tmp).resolve() / "tree"
        root.mkdir()
        yield Sandbox(root)


def analyse(series: Series, contents: Mapping[str, bytes]) -> list[PatchVerdict]:
    """Return one verdict a patch for these touched files (path -> bytes; a missing key is a missing file).

    Contained patches are taken back from the last to the first, so that one is recognised although a later one
    changed its lines, and although all were squashed into something else. The rest is then tried in order on top.
    """
    with sandbox() as box:
        box.write(contents)
        contained: set[int] = set()
        ambiguous: set[int] = set()
        for i in reversed(range(series.length)):
            path = series.path(series.entries[i])
            backward, back_offset, _ = box.apply(path, reverse=True, check=True)
            if not backward:
                continue
            forward, fore_offset, _ = box.apply(path, check=True)
            if forward and bool(back_offset) == bool(fore_offset):
                ambiguous.add(i)
            elif not forward or fore_offset:
                contained.add(i)
                box.apply(path, reverse=True)
        return [_forward(box, series, i, contained, ambiguous) for i in range(series.length)]


def _forward(box: Sandbox, series: Series, i: int, contained: set[int], ambiguous: set[int]) -> PatchVerdict:
    entry, patch = series.entries[i], series.patches[i]
    if i in ambiguous:
        return PatchVerdict(entry.file, "ambiguous")
    done, offset, said = box.apply(series.path(entry))
    if i in contained:  # proven by taking it back, whatever a patch before it does to its surroundings
        return PatchVerdict(entry.file, "contained", offset)
    if not done:
        return PatchVerdict(entry.file, "conflict", misfit=_misfit(box, patch, said))
    return PatchVerdict(entry.file, "offset" if offset else "fits", offset)


def _misfit(box: Sandbox, patch: Patch, said: bytes) -> Misfit:
    """Return the first misfit, located by what git said and described by looking at the lines."""
    if m := _FAILED.search(said):
        diff = next(d for d in patch.files if d.path == m[1].decode())
        text = _text(box, diff.path)
        at = [n for n, h in enumerate(diff.hunks, start=1) if h.old_start == int(m[2])]
        return hunks.misfit(diff, text, at[0] if at else hunks.first_unfit(diff, text))
    if m := _FILE_ERROR.search(said):
        diff = next(d for d in patch.files if d.path == m[1].decode())
        return hunks.misfit(diff, _text(box, diff.path), 1)
    return Misfit(patch.files[0].path, 1, 1, 0, said.decode(errors="replace").strip())


def _text(box: Sandbox, path: str) -> str | None:
    data = box.read(path)
    return None if data is None else data.decode(errors="replace")


def contained_files(verdicts: Sequence[PatchVerdict]) -> list[str]:
    """Return the patches that are contained."""
    return [v.file for v in verdicts if v.verdict == "contained"]


def first_bad(verdicts: Sequence[PatchVerdict]) -> PatchVerdict | None:
    """Return the first patch that is neither contained nor fits."""
    return next((v for v in verdicts if v.verdict in ("conflict", "ambiguous")), None)
