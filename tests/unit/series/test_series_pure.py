"""Blob ids, trees, parser, chain and hunk search against git itself and against random data."""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from series_world import World

from q4kit.series import chain, export, git, hunks
from q4kit.series.blobs import ABSENT, Entry, blob_id, tree_id
from q4kit.series.patchfile import Patch, PatchSyntaxError, parse_patch

NAMES = st.sampled_from(["a", "a.py", "a-b", "ab", "b/c", "b.py", "b/d/e.py", "b-/x", "b0", "z/é.py"])
LINES = st.lists(st.sampled_from(["", "x = 1", "y = 2", "    return x", "}", "-- ", "diff --git a/x b/x"]), max_size=25)


@settings(max_examples=25, deadline=None)
@given(files=st.dictionaries(NAMES, st.binary(max_size=40), min_size=1), executable=st.sets(NAMES))
def test_ids_are_gits(files: dict[str, bytes], executable: set[str]) -> None:
    """Names that sort differently as files and as folders included."""
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        git.run(["init", "-q"], root)
        entries = {}
        for name, data in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if name in executable else 0o644)
            entries[name] = Entry("100755" if name in executable else "100644", blob_id(data))
        git.run(["add", "-A"], root)
        assert tree_id(entries) == git.out(["write-tree"], root)


def test_empty_tree_is_gits() -> None:
    assert tree_id({}) == "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.dictionaries(NAMES, LINES, min_size=1, max_size=4),
    after=st.dictionaries(NAMES, LINES, min_size=1, max_size=4),
    newline=st.booleans(),
)
def test_parser_reads_what_git_writes(before: dict[str, list[str]], after: dict[str, list[str]], newline: bool) -> None:
    """Any pair of trees: added, deleted and edited files, missing final line ends, lines that look like headers."""
    names = [n for n in before.keys() | after.keys() if n.isascii()]
    before = {n: t for n, t in before.items() if n in names}
    after = {n: t for n, t in after.items() if n in names}
    end = "\n" if newline else ""
    texts = [{n: "\n".join(t) + end for n, t in side.items()} for side in (before, after)]
    if texts[0] == texts[1]:
        return
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        git.run(["init", "-q"], root)
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
        for i, side in enumerate(texts):
            for name in texts[0]:
                (root / name).unlink(missing_ok=True)
            for name, text in side.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            git.run(["add", "-A"], root)
            git.run(["commit", "-q", "--allow-empty", "-m", f"fix(x): {i}\n\nA: b\n c\nA: d"], root, env=who)
        (name, data), *rest = export.format_patches(root, "HEAD~1").items()
        assert not rest
        patch = parse_patch(name, data)
        stat = git.out(["diff", "--numstat", "HEAD~1", "HEAD"], root).split("\n")
        assert patch.insertions == sum(int(row.split("\t")[0]) for row in stat)
        assert patch.deletions == sum(int(row.split("\t")[1]) for row in stat)
        assert patch.trailers == {"A": ["b c", "d"]}
        base: dict[str, Entry | None] = dict.fromkeys(f.path for f in patch.files)
        base |= {n: Entry("100644", blob_id(t.encode())) for n, t in texts[0].items() if n in base}
        _, result = chain.prefixes(base, [patch])
        assert result == {n: Entry("100644", blob_id(t.encode())) for n, t in texts[1].items() if n in base}
        for diff in patch.files:
            if diff.old_mode is not None and diff.hunks:
                lines = texts[0][diff.path].split("\n")
                for hunk in diff.hunks:
                    if hunk.before:
                        assert hunk.old_start - 1 in hunks.positions(lines, hunk.before)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_patch_is_never_read_as_a_whole_one(made: World, data: st.DataObject) -> None:
    """Cut anywhere: a syntax error that names the file, or (cut between two files) fewer files. Never a crash."""
    entry = data.draw(st.sampled_from(made.series.entries))
    whole = made.series.path(entry).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 2))
    result = _parse_or_error(entry.file, whole[:cut])
    if isinstance(result, PatchSyntaxError):
        assert entry.file in str(result)
    else:
        complete = parse_patch(entry.file, whole)
        assert result.files == complete.files[: len(result.files)]
        assert len(result.files) < len(complete.files) or whole[cut:].strip() == b""


def _parse_or_error(name: str, data: bytes) -> Patch | PatchSyntaxError:
    try:
        return parse_patch(name, data)
    except PatchSyntaxError as exc:
        return exc


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_wrong_link_breaks_the_chain(made: World, data: st.DataObject) -> None:
    patches = list(made.series.patches)
    i = data.draw(st.integers(0, len(patches) - 1))
    j = data.draw(st.integers(0, len(patches[i].files) - 1))
    digit = data.draw(st.integers(0, 39))
    wrong = list(patches[i].files)
    old = wrong[j].old_blob
    blob = old[:digit] + ("0" if old[digit] != "0" else "1") + old[digit + 1 :]
    wrong[j] = dataclasses.replace(wrong[j], old_blob=blob)
    patches[i] = dataclasses.replace(patches[i], files=tuple(wrong))
    with pytest.raises(chain.ChainError) as caught:
        chain.prefixes(made.series.base.files, patches)
    assert caught.value.path == wrong[j].path
    assert blob in str(caught.value)


def test_swapped_patches_break_the_chain(made: World) -> None:
    one, two, three, four = made.series.patches
    with pytest.raises(chain.ChainError, match=r"0002.*alpha\.py"):
        chain.prefixes(made.series.base.files, [two, one, three, four])


def test_recorded_trees_are_gits(made: World) -> None:
    """The ids in series.toml, computed from the patch files alone, are those git gives the applied commits."""
    for k, entry in enumerate(made.series.entries, start=1):
        rev = "refs/q4head/base~0" if k == 0 else f"HEAD~{made.series.length - k}"
        env = {"GIT_INDEX_FILE": str(made.root / "index")}
        git.run(["read-tree", "--empty"], made.work, env=env)
        for path, (mode, blob) in git.entries(made.work, rev, made.series.touched).items():
            git.run(["update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}"], made.work, env=env)
        assert git.out(["write-tree"], made.work, env=env) == entry.tree_after


def test_nearest_finds_a_shifted_and_edited_block() -> None:
    block = [f"line {i}" for i in range(10)]
    edited = [*block[:4], "inserted", *block[4:6], "changed", *block[7:]]
    lines = [f"other {i}" for i in range(300)]
    lines[200:200] = edited
    assert abs(hunks.nearest(lines, block, 5) - 200) <= 1


@pytest.mark.parametrize(("lines", "block"), [([], ["a"]), (["a"], []), ([""], ["a", "b"]), (["a"] * 5, ["b"] * 9)])
def test_nearest_survives_odd_input(lines: list[str], block: list[str]) -> None:
    at = hunks.nearest(lines, block, 0)
    assert 0 <= at <= max(len(lines), 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\n", "expected `From"),
        ("From " + "1" * 40 + " Mon Sep 17 00:00:00 2001\n", "expected `From 000"),
        ("From " + "0" * 40 + " Mon\nFrom: a <a@b>\n\nbody\n", "Date is missing"),
        ("From " + "0" * 40 + " Mon\nFrom: a <a@b>\nDate: x\nSubject: [PATCH 1/2] y\n\nbody\n", "without n/m"),
        ("From " + "0" * 40 + " Mon\nFrom: a <a@b>\nDate: x\nSubject: [PATCH] y\n\nbody\n---\n", "empty or truncated"),
        (
            "From " + "0" * 40 + " Mon\nFrom: a <a@b>\nDate: x\nSubject: [PATCH] y\n\nb\n---\n\n"
            "diff --git a/x b/x\nindex 123..456 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
            "40 digits",
        ),
        (
            "From " + "0" * 40 + " Mon\nFrom: a <a@b>\nDate: x\nSubject: [PATCH] y\n\nb\n---\n\n"
            "diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n",
            "renamed",
        ),
        (
            "From " + "0" * 40 + " Mon\nFrom: a <a@b>\nDate: x\nSubject: [PATCH] y\n\nb\n---\n\n"
            f"diff --git a/x b/x\nindex {ABSENT}..{'1' * 40} 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
            "new/deleted",
        ),
    ],
)
def test_parser_names_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(PatchSyntaxError, match=said):
        parse_patch("0001-x.patch", text.encode())


def test_git_is_not_asked_for_the_chain(made: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offline proof uses neither git nor any other program."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    from q4kit.series import manifest, verify

    checks = verify.offline(manifest.load(made.series.folder))
    assert [c.name for c in checks] == ["blob chain", "lints"]
    assert all(c.ok for c in checks), checks


def test_a_patch_cut_behind_the_header_of_a_file_is_no_change_without_hunks(made: World) -> None:
    entry = made.series.entries[1]
    whole = made.series.path(entry).read_bytes()
    cut = whole.index(b"--- a/python")
    with pytest.raises(PatchSyntaxError, match="no hunk says how"):
        parse_patch(entry.file, whole[:cut])


def test_an_interpreter_can_be_run_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given relative to here, named as on PATH, or wrong; an environment's link to a Python is not followed."""
    interpreter = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "series.py"))["interpreter"]
    link = tmp_path / "env" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter("env/python") == str(link)
    monkeypatch.setenv("PATH", str(link.parent))
    assert interpreter("python") == str(link)
    with pytest.raises(argparse.ArgumentTypeError, match="'env/no-such-python' is not a program that can be run"):
        interpreter("env/no-such-python")
