"""Which SGLang a folder holds: told of a plain copy, without git, and of the code that a process imports."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from series_world import PACKAGE, World, edit

from q4kit import provenance
from q4kit.series import git, state, worktree
from q4kit.series.identity import folder_tree, identify
from q4kit.series.journal import series_id


def plain_copy(world: World, prefix: int, name: str) -> Path:
    """Return the package at a prefix as somebody copies it to another machine: no git, no installation."""
    tree = world.tree(f"{name}-tree")
    worktree.apply(tree, series=world.series, to=prefix)
    return Path(shutil.copytree(tree / "python" / PACKAGE, world.root / name))


@pytest.mark.parametrize("prefix", range(5))
def test_a_plain_copy_tells_how_many_patches_it_has(world: World, prefix: int) -> None:
    package = plain_copy(world, prefix, "copy")
    found = identify(package, world.series)
    assert (found["patches"], found["length"], found["reason"]) == (prefix, 4, "")
    assert found["state"] == ("applied" if prefix else "clean")
    assert found["id"] == series_id(world.series)
    assert found["tree"] == state.status(world.root / "copy-tree", series=world.series).tree


def test_files_behind_links_count_as_what_they_are(world: World) -> None:
    package = plain_copy(world, 3, "copy")
    expected = identify(package, world.series)
    overlay = world.root / "overlay"
    (overlay / "sub").mkdir(parents=True)
    for entry in package.iterdir():
        if entry.is_file():
            (overlay / entry.name).symlink_to(entry)
    (overlay / "extra").symlink_to(package / "extra")
    (overlay / "sub" / "deep.py").symlink_to(package / "sub" / "deep.py")
    assert identify(overlay, world.series) == expected


def test_a_touched_file_of_no_prefix_is_named_with_the_nearest_one(world: World) -> None:
    package = plain_copy(world, 2, "copy")
    edit(package / "beta.py", "return x + 1\n", "return 1 + x\n")
    found = identify(package, world.series)
    assert (found["state"], found["patches"]) == ("other", None)
    assert found["reason"] == f"nearest is prefix 2, but for {PACKAGE}/beta.py"


def test_a_removed_file_of_a_patch_is_no_prefix_either(world: World) -> None:
    package = plain_copy(world, 4, "copy")
    (package / "extra" / "inner" / "__init__.py").unlink()
    found = identify(package, world.series)
    assert found["patches"] is None
    assert "nearest is prefix 4, but for q4demo/extra/inner/__init__.py" in found["reason"]


def test_another_version_with_the_same_touched_files_is_no_prefix(world: World) -> None:
    package = plain_copy(world, 0, "copy")
    (package / "_version.py").write_text('__version__ = "9.9"\n')
    found = identify(package, world.series)
    assert (found["patches"], found["reason"]) == (None, "version 9.9, expected 1.2.3")


def test_a_file_that_no_patch_touches_shows_in_the_hash_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("Q4_SERIES", str(world.series.folder))
    package = plain_copy(world, 4, "copy")
    before = provenance.series_of(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "junk.py").write_text("x")
    assert provenance.series_of(package) == before
    assert before["python_files"] == len([*package.rglob("*.py")]) - 1
    edit(package / "gamma.py", "return x + 9\n", "return 9 + x\n")
    after = provenance.series_of(package)
    assert (before["patches"], after["patches"]) == (4, 4)
    assert before["python_sha256"] != after["python_sha256"]


def test_a_series_that_cannot_be_read_leaves_the_hash(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = plain_copy(world, 1, "copy")
    monkeypatch.setenv("Q4_SERIES", str(world.series.folder))
    known = provenance.series_of(package)
    monkeypatch.setenv("Q4_SERIES", str(tmp_path / "nowhere"))
    found = provenance.series_of(package)
    assert found["patches"] is None
    assert found["state"].startswith("unknown: ")
    assert "series.toml does not exist" in found["state"]
    assert found["python_sha256"] == known["python_sha256"]


def test_a_folder_without_a_package_is_unknown(tmp_path: Path) -> None:
    found = provenance.series_of(tmp_path / "none")
    assert found["patches"] is None
    assert found["python_sha256"] == found["reason"] == "unknown: no Python package in none"


def test_the_tree_of_a_source_folder_is_the_one_of_its_commit(world: World) -> None:
    tree = world.tree("t")
    expected = git.out(["rev-parse", f"HEAD:python/{PACKAGE}"], tree)
    copy = Path(shutil.copytree(tree / "python" / PACKAGE, world.root / "copy"))
    assert folder_tree(copy, (".py", ".sh")) == expected
    edit(copy / "gamma.py", "return x + 9\n", "return 9 + x\n")
    assert folder_tree(copy, (".py", ".sh")) != expected


# -- what a process imports ---------------------------------------------------------------------

LISTEN = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen(); time.sleep(600)"


@contextmanager
def served_from(folder: Path) -> Iterator[str]:
    """Yield the address of a process that listens with `folder` on its PYTHONPATH."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", LISTEN.format(port=port)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(folder)})
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def path_entry(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for PYTHONPATH whose `sglang` is the demo package with two patches."""
    monkeypatch.setenv("Q4_SERIES", str(world.series.folder))
    plain_copy(world, 2, "copy").rename(world.root / "sglang")
    entry = world.root / "entry"
    entry.mkdir()
    (world.root / "sglang").rename(entry / "sglang")
    old = time.time() - 3600
    for path in entry.rglob("*"):
        os.utime(path, (old, old))
    return entry


def test_a_server_out_of_a_plain_tree_says_what_it_runs(path_entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(path_entry.parent))  # the tool's own path is not the server's
    with served_from(path_entry) as url:
        process = provenance._server_process(url)
        assert isinstance(process, psutil.Process)
        found = provenance._series(process)
    assert isinstance(found, dict)
    assert (found["state"], found["patches"], found["prefix"], found["length"]) == ("applied", 2, 2, 4)
    assert found["of"] == "the server's code"
    assert found["python_sha256"] == provenance.series_of(path_entry / "sglang")["python_sha256"]


def test_files_written_after_the_start_are_not_what_runs(path_entry: Path) -> None:
    with served_from(path_entry) as url:
        late = time.time() + 60
        os.utime(path_entry / "sglang" / "alpha.py", (late, late))
        process = provenance._server_process(url)
        assert isinstance(process, psutil.Process)
        found = provenance._series(process)
    assert isinstance(found, dict)
    assert (found["patches"], found["prefix"]) == (None, -1)
    assert found["state"] == f"unknown: {PACKAGE}/alpha.py was written after the server had started"


def test_the_code_of_a_server_that_cannot_be_seen_is_unknown() -> None:
    assert provenance._series("unknown: the server runs on another machine") == (
        "unknown: the server runs on another machine"
    )
