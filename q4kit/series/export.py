"""Writing the series folder from the commits of a work tree, with frozen flags and a checked round trip."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit.items import Comment, Table, Whitespace

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import chain, git, manifest, wheel
from q4kit.series.base import BASE_REF, cached_base, wrong_base
from q4kit.series.blobs import Entry
from q4kit.series.manifest import MANIFEST, Series
from q4kit.series.patchfile import Patch, parse_patch
from q4kit.series.targets import work_tree
from q4kit.series.wheel import Progress, silent

FORMAT = ("-N", "--zero-commit", "--full-index", "--no-signature", "--no-stat")
"""With these a patch file is a function of content, author, date and message alone."""


_AM = ("-q", "--committer-date-is-author-date", "--no-3way", "--no-scissors", "--whitespace=nowarn")
_NO_RANGE_DIFF = "(the recorded patches do not apply to this base: name the old commits with --old BASE..TIP)"


@dataclass(frozen=True)
class Exported:
    """The outcome of an export."""

    before: list[str]
    after: list[str]
    written: list[str]
    removed: list[str]
    warnings: list[str]
    range_diff: str = ""


def format_patches(root: Path, base: str, head: str = "HEAD") -> dict[str, bytes]:
    """Return ``file name -> bytes`` of the commits ``base..head`` of a repository, in order."""
    with tempfile.TemporaryDirectory(prefix="q4head-export-") as tmp:
        git.run(["format-patch", *FORMAT, "-q", "-o", tmp, f"{base}..{head}"], root)
        return {p.name: p.read_bytes() for p in sorted(Path(tmp).iterdir())}


def find_base(series: Series, root: Path, rev: str | None, *, new_pin: bool = False) -> str:
    """Return the commit the series starts from; raises UsageError when it does not hold the recorded files.

    ``new_pin``: [base] was just changed, so the recorded files are those of the old pin.
    """
    candidates = [rev] if rev else [BASE_REF, series.base.tag, "base"]
    for name in candidates:
        done = git.run(["rev-parse", "-q", "--verify", f"{name}^{{commit}}"], root, check=False)
        if done.returncode != 0:
            continue
        commit = done.stdout.decode().strip()
        mismatch = "" if new_pin else wrong_base(series.base, git.entries(root, commit, series.touched))
        if mismatch:
            raise UsageError(f"{root}: base {name}: {mismatch}", remedy="name the commit of the pin with --base REV")
        if git.run(["merge-base", "--is-ancestor", commit, "HEAD"], root, check=False).returncode != 0:
            raise UsageError(f"{root}: base {name} is not an ancestor of HEAD", remedy="rebase the commits onto it")
        if git.out(["rev-list", "--min-parents=2", f"{commit}..HEAD"], root):
            raise UsageError(f"{root}: merge commits above the base", remedy="rebase: a series is linear")
        return commit
    raise UsageError(
        f"{root}: none of {', '.join(candidates)} is a commit here",
        remedy="name the commit of the pin with --base REV",
    )


def export(
    path: Path | str,
    *,
    series: Series | None = None,
    base: str | None = None,
    mode: str = "export",
    allow_fewer: bool = False,
    new_pin: bool = False,
    old: str | None = None,
    against: Path | None = None,
    progress: Progress = silent,
) -> Exported:
    """Write the patch files and series.toml from ``base..HEAD`` of a work tree.

    ``mode`` "new" only appends: the patches that exist must come out byte for byte as they are. "refresh" also
    returns the range-diff, and refuses to end with fewer patches unless ``allow_fewer``. ``against`` is a tree of the
    pin to check against (default: the cached fetch). ``new_pin``: [base] was changed and the commits rebased onto it;
    ``old``, a range, then gives the commits before that to the range-diff. Hand-edited fields are kept. Nothing
    is written on error.
    """
    series = series or manifest.load()
    root = work_tree(path, series.base.package).root
    if git.out(["status", "--porcelain", "--untracked-files=no"], root):
        raise UsageError(f"{root}: uncommitted changes", remedy="commit or stash them: only commits are exported")
    start = find_base(series, root, base, new_pin=new_pin)
    files = format_patches(root, start)
    if not files and not series.entries:
        raise UsageError(f"{root}: no commit above the base", remedy="commit the change first")
    before = [e.file for e in series.entries]
    if mode == "new":
        _only_appends(series, files)
    if mode == "refresh" and len(files) < len(before) and not allow_fewer:
        raise UsageError(
            f"the series would go from {len(before)} to {len(files)} patches",
            remedy="say --allow-fewer if patches are meant to go",
        )
    against = against or cached_base(series, wheel.cache_dir(), progress=progress)
    patches = [parse_patch(name, data) for name, data in files.items()]
    pins = _pre_images(patches, root, start, against)
    progress(f"round trip of {len(files)} patches")
    _round_trip(files, against)
    range_diff = ""
    if mode == "refresh":
        old = old or _old_commits(series, root, start)
        range_diff = git.out(["range-diff", "--no-color", old, f"{start}..HEAD"], root) if old else _NO_RANGE_DIFF
    document, warnings = _document(series, files, patches, pins)
    changed = [n for n, data in files.items() if _differs(series.folder / n, data)]
    removed = [n for n in before if n not in files]
    for name in changed:
        _put(series.folder / name, files[name])
    _put(series.folder / MANIFEST, document.encode())
    for name in removed:
        (series.folder / name).unlink(missing_ok=True)
    return Exported(before, list(files), changed, removed, warnings, range_diff)


def _only_appends(series: Series, files: Mapping[str, bytes]) -> None:
    for entry in series.entries:
        if entry.file not in files:
            raise UsageError(f"{entry.file} is not among the commits", remedy="use `refresh` to change the series")
        if files[entry.file] != series.path(entry).read_bytes():
            raise UsageError(f"{entry.file} would change", remedy="use `refresh` to change the series")
    if len(files) == series.length:
        raise UsageError("no commit above the recorded series", remedy="commit the new patch on top first")


def _pre_images(patches: list[Patch], root: Path, start: str, against: Path) -> dict[str, Entry | None]:
    """Return the pre-image of every touched file, as the pin itself has it."""
    touched = sorted({d.path for p in patches for d in p.files})
    here = git.entries(root, start, touched)
    pinned = git.entries(against, BASE_REF, touched)
    for path in touched:
        if here.get(path) != pinned.get(path):
            raise UsageError(
                f"{root}: {path} is {here.get(path)} at the base, expected {pinned.get(path)} of the pin",
                remedy="rebase the commits onto a tree made by `fetch`",
            )
    return {p: Entry(*pinned[p]) if p in pinned else None for p in touched}


def _round_trip(files: Mapping[str, bytes], against: Path) -> None:
    """Apply the patches to a private copy of the pin and export them again; raises unless the bytes are the same."""
    with tempfile.TemporaryDirectory(prefix="q4head-trip-") as tmp:
        box = Path(tmp) / "tree"
        git.run(["clone", "-q", "--shared", "--no-checkout", against, box], Path(tmp))
        git.run(["update-ref", BASE_REF, git.out(["rev-parse", BASE_REF], against)], box)
        git.run(["checkout", "-q", "--detach", BASE_REF], box)
        for name, data in files.items():
            (Path(tmp) / name).write_bytes(data)
            done = git.run(["am", *_AM, Path(tmp) / name], box, check=False)
            if done.returncode != 0:
                raise EnvironmentFault(f"{name} does not apply to the pin: {done.stderr.decode(errors='replace')}")
        again = format_patches(box, BASE_REF)
        for name, data in files.items():
            if again.get(name) != data:
                raise UsageError(
                    f"{name}: exporting it again gives other bytes",
                    remedy="look for brackets in the subject, odd white space or headers in the message",
                )


def _old_commits(series: Series, root: Path, start: str) -> str:
    """Return the range of the recorded series, recreated as commits in the work tree's object store.

    Empty when there is no recorded series or it does not apply to ``start``.
    """
    if not series.entries:
        return ""
    with tempfile.TemporaryDirectory(prefix="q4head-old-") as tmp:
        box = Path(tmp) / "old"
        git.run(["clone", "-q", "--shared", "--no-checkout", root, box], Path(tmp))
        git.run(["checkout", "-q", "--detach", start], box)
        files = [series.path(e).resolve() for e in series.entries]
        if git.run(["am", *_AM, *files], box, check=False).returncode != 0:
            return ""
        tip = git.out(["rev-parse", "HEAD"], box)
        git.run(["fetch", "-q", "--no-tags", box.resolve().as_uri(), tip], root)
    return f"{start}..{tip}"


def _differs(path: Path, data: bytes) -> bool:
    return not path.is_file() or path.read_bytes() != data


def _put(path: Path, data: bytes) -> None:
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_bytes(data)
    os.replace(tmp, path)


# --- series.toml -----------------------------------------------------------------------------------------------


def _document(
    series: Series, files: Mapping[str, bytes], patches: list[Patch], pins: Mapping[str, Entry | None]
) -> tuple[str, list[str]]:
    """Return the new text of series.toml, hand-edited fields and comments kept, and warnings."""
    doc = tomlkit.parse((series.folder / MANIFEST).read_text(encoding="utf-8"))
    old = {str(t["subject"]): t for t in doc.get("patch", [])}
    trees = chain.prefix_trees(pins, patches)
    warnings: list[str] = []
    tables: list[Table] = []
    for patch, tree in zip(patches, trees[1:], strict=True):
        table = old.pop(patch.subject, None)
        if table is None:
            table = _new_table(patch, series.root)
            warnings.append(f"{patch.name}: new in {MANIFEST}: fill in adds, depends and tests")
        computed: dict[str, Any] = {
            "file": patch.name,
            "sha256": hashlib.sha256(files[patch.name]).hexdigest(),
            "subject": patch.subject,
            "files": _list([d.path for d in patch.files]),
            "insertions": patch.insertions,
            "deletions": patch.deletions,
            "tree_after": tree,
        }
        table.update(computed)
        tables.append(table)
    warnings += [f"{subject!r} has left the series; its fields are gone" for subject in old]
    rows = tomlkit.aot()
    for table in tables:
        rows.append(_copy(table))
    if rows:
        doc["patch"] = rows
    else:
        doc.pop("patch", None)
    listing = tomlkit.table()
    for path, entry in pins.items():
        listing[path] = f"{entry.mode} {entry.blob}" if entry else "absent"
    doc["base"]["files"] = listing
    text = tomlkit.dumps(doc)
    return re.sub(r"\n{3,}", "\n\n", text), warnings


def _copy(table: Table) -> Table:
    """Return the table detached from its document, so that tables can be put into another order."""
    fresh = tomlkit.table()
    for key, value in table.value.body:
        if key is None:
            fresh.add(cast(Comment | Whitespace, value))
        else:
            fresh.append(key, value)
    return fresh


def _new_table(patch: Patch, root: Path) -> Table:
    tests = root / "tests" / "patches"
    found = sorted(p.relative_to(root).as_posix() for p in tests.glob(f"test_{patch.name[:4]}_*.py"))
    table = tomlkit.table()
    for key in ("file", "sha256", "subject"):
        table[key] = ""
    table["finding"] = patch.trailer("Finding") or ""
    table["status"] = patch.trailer("Upstream-Status") or ""
    table["adds"] = tomlkit.array()
    table["depends"] = tomlkit.array()
    table["tests"] = _list(found)
    return table


def _list(values: list[str]) -> Any:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(values) > 1)
