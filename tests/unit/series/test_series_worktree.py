"""Applying to git work trees."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from series_world import PACKAGE, World, commit, edit

from q4kit.errors import EnvironmentFault, Q4Error, UsageError
from q4kit.series import base, git, git_locks, journal, manifest, mend, render, state, worktree
from q4kit.series.blobs import Entry
from q4kit.series.targets import Target, read_entries, read_entry, work_tree


def head(tree: Path) -> str:
    return git.out(["rev-parse", "HEAD"], tree)


def follow(error: Q4Error) -> None:
    """Do what a remedy says: the command in backquotes, and no commit, for that is refused next."""
    assert "commit or" not in error.remedy
    command = re.search("`(git .*?)`", error.remedy)
    assert command is not None, error.remedy
    identity = {"GIT_AUTHOR_NAME": "me", "GIT_AUTHOR_EMAIL": "me@example.org"}
    identity |= {"GIT_COMMITTER_NAME": "me", "GIT_COMMITTER_EMAIL": "me@example.org"}
    subprocess.run(shlex.split(command[1]), check=True, capture_output=True, env=os.environ | identity)


def test_every_prefix_is_named_and_commit_ids_are_everybodys(world: World) -> None:
    ids = []
    for name in ("one", "two"):
        tree = world.tree(name)
        seen = [head(tree)]
        assert state.status(tree, series=world.series).state == "clean"
        for k in range(1, world.series.length + 1):
            change = worktree.apply(tree, series=world.series, to=k)
            assert (change.before, change.after) == (k - 1, k)
            found = state.status(tree, series=world.series)
            assert (found.state, found.prefix, found.tree) == ("applied", k, world.series.entries[k - 1].tree_after)
            seen.append(head(tree))
        ids.append(seen)
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == world.series.length + 1


def test_applying_twice_is_a_no_op_that_says_so(world: World) -> None:
    tree = world.tree("t")
    assert worktree.apply(tree, series=world.series).changed
    before = head(tree)
    again = worktree.apply(tree, series=world.series)
    assert not again.changed
    assert head(tree) == before


def test_going_down_and_revert_give_the_pin_back(world: World) -> None:
    tree = world.tree("t")
    pin = head(tree)
    (tree / "notes.txt").write_text("mine\n")
    worktree.apply(tree, series=world.series)
    worktree.apply(tree, series=world.series, to=2)
    assert state.status(tree, series=world.series).prefix == 2
    worktree.revert(tree, series=world.series)
    assert head(tree) == pin
    assert state.status(tree, series=world.series).state == "clean"
    assert not (tree / "python" / PACKAGE / "extra").exists()
    assert (tree / "notes.txt").read_text() == "mine\n"


def test_revert_refuses_to_lose_a_commit_on_top(world: World) -> None:
    tree = world.tree("t")
    worktree.apply(tree, series=world.series)
    (tree / "mine.py").write_text("x = 1\n")
    commit(tree, "my own work", 30)
    before = head(tree)
    with pytest.raises(UsageError, match="my own work"):
        worktree.revert(tree, series=world.series)
    assert head(tree) == before


def test_wrong_base_names_file_and_both_blobs(world: World) -> None:
    tree = world.tree("t")
    path = f"python/{PACKAGE}/beta.py"
    edit(tree / path, "return x + 20\n", "return 20 + x\n")
    commit(tree, "another base", 30)
    found_blob = git.out(["rev-parse", f"HEAD:{path}"], tree)
    expected = world.series.base.files[path]
    assert expected is not None
    before = head(tree)
    with pytest.raises(UsageError) as caught:
        worktree.apply(tree, series=world.series)
    for part in (path, found_blob, expected.blob):
        assert part in str(caught.value)
    assert head(tree) == before
    assert not (tree / ".git" / "rebase-apply").exists()


@pytest.mark.parametrize("staged", [False, True])
def test_dirty_touched_file_is_refused_and_kept(world: World, staged: bool) -> None:
    tree = world.tree("t")
    path = tree / "python" / PACKAGE / "alpha.py"
    edit(path, "return x + 1\n", "return x + 111\n")
    if staged:
        git.run(["add", path], tree)
    with pytest.raises(UsageError, match=r"local changes.*alpha\.py") as caught:
        worktree.apply(tree, series=world.series)
    assert "111" in path.read_text()
    follow(caught.value)
    assert worktree.apply(tree, series=world.series).after == world.series.length
    git.run(["stash", "pop", "-q"], tree)
    assert "111" in path.read_text()


def test_remedy_for_local_changes_works_on_an_applied_tree(world: World) -> None:
    tree = world.tree("a folder with a blank")
    worktree.apply(tree, series=world.series, to=2)
    for name in ("alpha", "beta"):
        with (tree / "python" / PACKAGE / f"{name}.py").open("a") as file:
            file.write("MINE = 1\n")
    with pytest.raises(UsageError, match="local changes") as caught:
        worktree.revert(tree, series=world.series)
    follow(caught.value)
    assert worktree.revert(tree, series=world.series).after == 0


def test_staged_change_elsewhere_is_refused(world: World) -> None:
    tree = world.tree("t")
    (tree / "other.txt").write_text("x\n")
    git.run(["add", "other.txt"], tree)
    with pytest.raises(UsageError, match="staged"):
        worktree.apply(tree, series=world.series)


def test_untracked_file_in_the_way_of_an_added_one_is_refused_and_kept(world: World) -> None:
    tree = world.tree("t")
    path = tree / "python" / PACKAGE / "late.py"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match=r"late\.py") as caught:
        worktree.apply(tree, series=world.series)
    assert path.read_text() == "mine\n"
    follow(caught.value)
    assert worktree.apply(tree, series=world.series).after == world.series.length
    assert git.out(["show", f"stash@{{0}}^3:python/{PACKAGE}/late.py"], tree) == "mine"


def test_failing_am_restores_everything(world: World) -> None:
    """A smudge filter makes git write other bytes than recorded: found after the fact, undone."""
    tree = world.tree("t")
    pin = head(tree)
    (tree / ".git" / "info").mkdir(exist_ok=True)
    (tree / ".git" / "info" / "attributes").write_text("*.py text eol=crlf\n")
    with pytest.raises(EnvironmentFault, match="the tree is as it was"):
        worktree.apply(tree, series=world.series)
    assert head(tree) == pin
    assert not (tree / ".git" / "rebase-apply").exists()
    (tree / ".git" / "info" / "attributes").unlink()
    git.run(["checkout", "-q", "HEAD", "--", "python"], tree)
    assert state.status(tree, series=world.series).state == "clean"


def test_interrupted_am_is_named_and_mended_by_apply_and_by_revert(world: World) -> None:
    for move in ("apply", "revert"):
        tree = world.tree(move)
        pin = head(tree)
        target = work_tree(tree)
        # what kill -9 between two patches and inside git leaves behind
        worktree.apply(tree, series=world.series, to=2)
        note = {"op": "apply", "head": pin, "files": world.series.touched}
        journal.write_json(journal.marker_path(target), note)
        (tree / ".git" / "rebase-apply").mkdir()
        for name in ("index", "HEAD", "ORIG_HEAD"):
            (tree / ".git" / f"{name}.lock").write_text("")
        (tree / "python" / PACKAGE / "late.py").write_text("half\n")
        found = state.status(tree, series=world.series)
        assert found.state == "drifted"
        assert "interrupted apply" in found.reason
        if move == "apply":
            result = worktree.apply(tree, series=world.series)
            assert state.status(tree, series=world.series).prefix == world.series.length
        else:
            result = worktree.revert(tree, series=world.series)
            assert head(tree) == pin
            assert state.status(tree, series=world.series).state == "clean"
        assert result.mended
        assert not (tree / ".git" / "rebase-apply").exists()
        assert git.out(["status", "--porcelain"], tree) == ""


def interrupt(world: World, tree: Path) -> str:
    """Leave ``tree`` as an apply killed after its second patch does; return the commit before it."""
    pin = head(tree)
    worktree.apply(tree, series=world.series, to=2)
    note = {"op": "apply", "head": pin, "files": world.series.touched}
    journal.write_json(journal.marker_path(work_tree(tree)), note)
    return pin


LOCKS = ("index", "HEAD", "ORIG_HEAD", "REBASE_HEAD", "CHERRY_PICK_HEAD", "refs/heads/base", "packed-refs")


@pytest.mark.parametrize("move", ["apply", "revert"])
@pytest.mark.parametrize("name", LOCKS)
def test_every_lock_of_a_killed_git_is_removed(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, move: str
) -> None:
    monkeypatch.setattr(git_locks, "SETTLE_S", 0.1)
    tree = world.tree("t")
    pin = interrupt(world, tree)
    assert git.out(["symbolic-ref", "HEAD"], tree) == "refs/heads/base"
    (tree / ".git" / f"{name}.lock").write_text("")
    result = getattr(worktree, move)(tree, series=world.series)
    assert result.mended
    assert not list((tree / ".git").rglob("*.lock"))
    found = state.status(tree, series=world.series)
    assert (found.state, found.prefix) == (("applied", world.series.length) if move == "apply" else ("clean", 0))
    assert (head(tree) == pin) == (move == "revert")


def test_locks_of_a_linked_work_tree_are_removed_and_those_of_the_other_left(world: World) -> None:
    linked = world.root / "linked"
    git.run(["worktree", "add", "-q", "-b", "side/way", linked, "HEAD"], world.base)
    interrupt(world, linked)
    common, own = world.base / ".git", journal.git_dir(work_tree(linked))
    gone = [own / "index.lock", own / "REBASE_HEAD.lock", common / "refs/heads/side/way.lock"]
    kept = [common / "index.lock", common / "REBASE_HEAD.lock", common / "refs/heads/other.lock"]
    for path in [*gone, *kept]:
        path.write_text("")
    assert worktree.revert(linked, series=world.series).mended
    assert [path for path in [*gone, *kept] if path.exists()] == kept


def test_leftover_folders_and_compiled_files_are_removed(world: World) -> None:
    tree = world.tree("t")
    interrupt(world, tree)
    compiled = tree / "python" / PACKAGE / "__pycache__" / "alpha.cpython-311.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_text("")
    inner = tree / "python" / PACKAGE / "extra" / "__pycache__"
    inner.mkdir(parents=True)
    added = next(p for p in world.series.touched if "/extra/" in p)
    (inner / f"{Path(added).stem}.cpython-311.pyc").write_text("")
    assert worktree.revert(tree, series=world.series).mended
    assert not compiled.exists()
    assert not (tree / "python" / PACKAGE / "extra").exists()


@pytest.mark.parametrize("how", ["replaced", "growing"])
def test_a_packed_refs_lock_with_a_living_owner_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Another git in another work tree: it takes the lock anew, or it is still writing, while we watch."""
    monkeypatch.setattr(git_locks, "SETTLE_S", 1.0)
    tree = world.tree("t")
    pin = interrupt(world, tree)
    lock, written = (tree / ".git" / f"packed-refs.{end}" for end in ("lock", "new"))
    lock.write_text("")
    written.write_text("")

    def live() -> None:
        if how == "growing":
            written.write_text("# pack-refs")
        else:
            another = lock.with_name("another")  # made before the old one goes: never of the same inode
            another.write_text("")
            another.rename(lock)

    owner = threading.Timer(0.5, live)
    owner.start()
    assert worktree.revert(tree, series=world.series).mended
    owner.join()
    assert head(tree) == pin
    assert lock.exists()


def git_process(folder: Path, where: Path) -> subprocess.Popen[bytes]:
    """Start a process that looks like a git at work in ``where``."""
    binary = folder / "git"
    if not binary.exists():
        shutil.copy2(shutil.which("sleep") or "sleep", binary)
    return subprocess.Popen([binary, "60"], cwd=where)


def test_a_packed_refs_lock_is_left_while_a_git_works_in_another_work_tree(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading many loose refs, it moves neither the lock nor what it writes."""
    monkeypatch.setattr(git_locks, "SETTLE_S", 0.1)
    linked = world.root / "linked"
    git.run(["worktree", "add", "-q", "-b", "side", linked, "HEAD"], world.base)
    pin = interrupt(world, linked)
    lock = world.base / ".git" / "packed-refs.lock"
    lock.write_text("")
    process = git_process(tmp_path, world.base / "python")
    try:
        assert worktree.revert(linked, series=world.series).mended
        assert head(linked) == pin
        assert lock.exists()
    finally:
        process.kill()
        process.wait()


def test_a_lock_is_left_while_a_git_works_in_this_work_tree(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(git_locks, "WAIT_S", 0.2)
    tree = world.tree("t")
    pin = interrupt(world, tree)
    lock = tree / ".git" / "index.lock"
    lock.write_text("")
    process = git_process(tmp_path, tree / "python")
    try:
        with pytest.raises(EnvironmentFault, match=rf"process {process.pid}\) and may hold .*index\.lock"):
            worktree.revert(tree, series=world.series)
        assert lock.exists()
    finally:
        process.kill()
        process.wait()
    assert worktree.revert(tree, series=world.series).mended
    assert head(tree) == pin


def test_a_daemon_of_git_and_a_git_elsewhere_are_not_at_work_here(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "python").mkdir(parents=True)
    processes = {
        "1": ("git", b"git\0commit\0", tree / "python"),
        "2": ("git", b"git\0fsmonitor--daemon\0run\0", tree),
        "3": ("git-remote-http", b"git-remote-http\0", tree),
        "4": ("git", b"git\0commit\0", tmp_path),
        "5": ("bash", b"bash\0", tree),
    }
    for name, (comm, cmdline, cwd) in processes.items():
        folder = tmp_path / "proc" / name
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cmdline").write_bytes(cmdline)
        (folder / "cwd").symlink_to(cwd)
    (tmp_path / "proc" / "6").mkdir()  # it ended
    (tmp_path / "proc" / "7").mkdir()
    (tmp_path / "proc" / "7" / "comm").write_bytes("日本語日本語".encode()[:14] + b"\n")
    (tmp_path / "proc" / "self").mkdir()
    assert git_locks.at_work([tree], tmp_path / "proc") == [1, 3]


def test_a_locked_index_is_refused_before_anything_changes(world: World) -> None:
    """`git commit` holds it while its message is written."""
    tree = world.tree("t")
    pin = head(tree)
    lock = tree / ".git" / "index.lock"
    lock.write_text("")
    with pytest.raises(EnvironmentFault, match=r"index is locked .*index\.lock"):
        worktree.apply(tree, series=world.series)
    assert lock.exists()
    assert head(tree) == pin
    assert not journal.marker_path(work_tree(tree)).exists()


@pytest.mark.parametrize("how", ["touched", "copied"])
def test_a_tree_that_was_touched_or_copied_goes_down_too(world: World, how: str) -> None:
    """Its index holds times and inodes that are not the files' any more."""
    tree = world.tree("t")
    pin = head(tree)
    worktree.apply(tree, series=world.series)
    if how == "touched":
        os.utime(tree / "python" / PACKAGE / "alpha.py", (1, 1))
    else:
        tree = Path(shutil.copytree(tree, world.root / "copy", copy_function=shutil.copy))
    assert worktree.apply(tree, series=world.series, to=1).after == 1
    assert worktree.revert(tree, series=world.series).after == 0
    assert head(tree) == pin


@pytest.mark.parametrize("move", ["apply", "revert"])
def test_edits_after_an_interruption_are_kept(world: World, move: str) -> None:
    tree = world.tree("t")
    interrupt(world, tree)
    alpha, beta = (tree / "python" / PACKAGE / f"{name}.py" for name in ("alpha", "beta"))
    mine = alpha.read_text() + "MINE = 1\n"
    alpha.write_text(mine)
    staged = beta.read_text() + "STAGED = 1\n"
    beta.write_text(staged)
    git.run(["add", beta], tree)
    beta.write_text(staged + "MINE = 1\n")
    said: list[str] = []
    result = getattr(worktree, move)(tree, series=world.series, progress=said.append)
    kept = {Path(place).name: Path(place).read_text() for place in result.saved}
    assert kept == {"alpha.py": mine, "beta.py": staged + "MINE = 1\n", "beta.py.staged0": staged}
    assert all(any(place in line for line in said) for place in result.saved)
    assert all(place in render.change(result, move) for place in result.saved)
    found = state.status(tree, series=world.series)
    assert found.prefix == (world.series.length if move == "apply" else 0)


def test_a_mended_tree_of_nobodys_edits_keeps_no_copies(world: World) -> None:
    tree = world.tree("t")
    (tree / ".git" / "info").mkdir(exist_ok=True)
    interrupt(world, tree)
    (tree / ".git" / "info" / "attributes").write_text("*.py text eol=crlf\n")
    alpha = tree / "python" / PACKAGE / "alpha.py"
    alpha.write_bytes(alpha.read_bytes().replace(b"\n", b"\r\n"))
    target = work_tree(tree)
    marker = journal.read_marker(target)
    assert marker is not None
    with journal.lock(target) as fd:
        assert mend.restore(target, world.series, marker, fd, print) == ()


def test_a_commit_after_an_interruption_is_refused_and_the_remedy_keeps_it(world: World) -> None:
    tree = world.tree("t")
    pin = interrupt(world, tree)
    with (tree / "python" / PACKAGE / "alpha.py").open("a") as file:
        file.write("MINE = 1\n")
    commit(tree, "my own work", 30)
    mine = head(tree)
    (tree / ".git" / "rebase-apply").mkdir()
    for move in (worktree.apply, worktree.revert):
        with pytest.raises(UsageError, match=r"my own work.*would be lost") as caught:
            move(tree, series=world.series)
        assert head(tree) == mine
        assert (tree / ".git" / "rebase-apply").exists()  # refused before anything is removed
    (tree / ".git" / "rebase-apply").rmdir()
    commands = re.search("`(git .*?)`", caught.value.remedy)
    assert commands is not None
    subprocess.run(commands[1], shell=True, check=True, capture_output=True)
    assert worktree.revert(tree, series=world.series).mended
    assert head(tree) == pin
    assert git.out(["rev-parse", "my-work"], tree) == mine


def test_an_am_of_the_users_own_after_an_interruption_is_left_alone(world: World) -> None:
    tree = world.tree("t")
    interrupt(world, tree)
    mail = tree.parent / "mine.patch"
    mail.write_text(
        "From 1 Mon Sep 17 00:00:00 2001\nFrom: me <me@example.org>\nSubject: [PATCH] mine\n\n---\n"
        "diff --git a/nowhere b/nowhere\n--- a/nowhere\n+++ b/nowhere\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert git.run(["am", "-q", mail], tree, check=False).returncode != 0
    lock = tree / ".git" / "ORIG_HEAD.lock"
    lock.write_text("")
    with pytest.raises(UsageError, match="in the middle of something else") as caught:
        worktree.revert(tree, series=world.series)
    assert (tree / ".git" / "rebase-apply" / "0001").exists()
    assert lock.exists()
    lock.unlink()
    follow(caught.value)
    assert worktree.revert(tree, series=world.series).mended


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_commit_on_top_with_a_name_that_is_not_utf8_is_refused(world: World, interrupted: bool) -> None:
    tree = world.tree("t")
    if interrupted:
        interrupt(world, tree)
    else:
        worktree.apply(tree, series=world.series)
    Path(os.fsdecode(bytes(tree) + b"/\xff.txt")).write_text("mine\n")
    commit(tree, "my own work", 30)
    before = head(tree)
    with pytest.raises(UsageError, match=r"my own work.*would be lost"):
        worktree.revert(tree, series=world.series)
    assert head(tree) == before


def test_another_branch_below_is_not_moved(world: World) -> None:
    tree = world.tree("t")
    git.run(["branch", "older"], tree)
    (tree / "unrelated.txt").write_text("mine\n")
    commit(tree, "my own work", 30)
    pin = interrupt(world, tree)
    git.run(["checkout", "-q", "older"], tree)
    older = head(tree)
    for move in (worktree.apply, worktree.revert):
        with pytest.raises(UsageError, match="HEAD moved"):
            move(tree, series=world.series)
    assert git.out(["rev-parse", "older"], tree) == older
    assert git.out(["status", "--porcelain"], tree) == ""
    git.run(["checkout", "-q", "base"], tree)  # what the remedy says
    assert worktree.revert(tree, series=world.series).mended
    assert head(tree) == pin
    assert (tree / "unrelated.txt").read_text() == "mine\n"


def test_a_merge_of_the_users_own_after_an_interruption_is_left_alone(world: World) -> None:
    tree = world.tree("t")
    git.run(["checkout", "-q", "-b", "side"], tree)
    (tree / "side.txt").write_text("side\n")
    commit(tree, "side", 30)
    git.run(["checkout", "-q", "base"], tree)
    pin = interrupt(world, tree)
    before = head(tree)
    git.run(["merge", "--no-commit", "--no-ff", "side"], tree)
    with pytest.raises(UsageError, match=r"in the middle of something else \(MERGE_HEAD"):
        worktree.revert(tree, series=world.series)
    assert head(tree) == before
    git.run(["merge", "--abort"], tree)
    assert worktree.revert(tree, series=world.series).mended
    assert head(tree) == pin


@pytest.mark.parametrize("place", ["alpha.py", "extra", "sub"])
def test_a_folder_for_a_file_or_the_reverse_is_refused_and_kept(world: World, place: str) -> None:
    """Mending removed a file in a folder's place without a word, and broke off at the others with a traceback."""
    tree = world.tree("t")
    pin = interrupt(world, tree)
    path = tree / "python" / PACKAGE / place
    if path.is_dir():
        shutil.rmtree(path)
        mine = path
    else:
        path.unlink()
        path.mkdir()
        mine = path / "mine.txt"
    mine.write_text("mine\n")
    before = head(tree)
    for move in (worktree.apply, worktree.revert):
        with pytest.raises(UsageError, match=rf"{place}: the series has a (file|folder) there"):
            move(tree, series=world.series)
    assert mine.read_text() == "mine\n"
    assert head(tree) == before
    path.rename(tree / "moved")
    assert worktree.revert(tree, series=world.series).mended
    assert head(tree) == pin


def test_what_cannot_be_copied_aside_is_not_overwritten(world: World) -> None:
    tree = world.tree("t")
    interrupt(world, tree)
    before = head(tree)
    alpha = tree / "python" / PACKAGE / "alpha.py"
    alpha.write_text("mine\n")
    saved = tree / ".git" / mend.SAVED
    saved.symlink_to("/dev/full")
    with pytest.raises(EnvironmentFault, match=r"alpha\.py cannot be kept .*nothing was changed"):
        worktree.revert(tree, series=world.series)
    assert alpha.read_text() == "mine\n"
    assert head(tree) == before
    saved.unlink()
    assert worktree.revert(tree, series=world.series).saved


def test_edits_before_and_while_patches_go_in_are_both_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one second, in one process: the second copy must not replace the first."""
    now = time.gmtime()
    monkeypatch.setattr(mend.time, "gmtime", lambda: now)
    tree = world.tree("t")
    interrupt(world, tree)
    alpha = tree / "python" / PACKAGE / "alpha.py"
    alpha.write_text("first\n")

    def progress(line: str) -> None:
        if "0002-" in line:
            alpha.write_text("second\n")

    with pytest.raises(EnvironmentFault, match="what was edited meanwhile is kept"):
        worktree.apply(tree, series=world.series, progress=progress)
    kept = sorted(path.read_text() for path in (tree / ".git" / mend.SAVED).rglob("alpha.py"))
    assert kept == ["first\n", "second\n"]


@pytest.mark.parametrize("new", [False, True])
def test_what_is_edited_while_patches_go_in_is_kept(world: World, new: bool) -> None:
    tree = world.tree("t")
    pin = head(tree)
    name = next(p for p in world.series.touched if p.endswith("late.py" if new else "alpha.py"))
    path = tree / name
    text = "mine\n" if new else path.read_text().replace("return x", "return 55 + x")

    def progress(line: str) -> None:
        if "0002-" in line:
            path.write_text(text)

    with pytest.raises(EnvironmentFault, match="what was edited meanwhile is kept: ") as caught:
        worktree.apply(tree, series=world.series, progress=progress)
    assert Path(str(caught.value).rpartition("kept: ")[2]).read_text() == text
    assert head(tree) == pin
    assert state.status(tree, series=world.series).state == "clean"


def test_a_packed_refs_lock_released_during_the_wait_is_no_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_locks, "SETTLE_S", 1.0)
    tree = world.tree("t")
    interrupt(world, tree)
    lock = tree / ".git" / "packed-refs.lock"
    lock.write_text("")
    owner = threading.Timer(0.5, lock.unlink)
    owner.start()
    assert worktree.apply(tree, series=world.series).mended
    owner.join()
    assert state.status(tree, series=world.series).prefix == world.series.length


def test_a_packed_refs_lock_from_before_the_interrupted_apply_is_left_alone(world: World) -> None:
    tree = world.tree("t")
    interrupt(world, tree)
    lock = tree / ".git" / "packed-refs.lock"
    lock.write_text("")
    began = journal.marker_path(work_tree(tree)).stat().st_mtime
    os.utime(lock, (began - 1, began - 1))
    assert worktree.revert(tree, series=world.series).mended
    assert lock.exists()


def test_looking_takes_no_lock(world: World) -> None:
    """A status killed at any moment leaves nothing: it has no marker that would make anybody mend."""
    tree = world.tree("t")
    path = tree / "python" / PACKAGE / "alpha.py"
    os.utime(path, (1, 1))  # a git that may would refresh the index now
    index = (tree / ".git" / "index").read_bytes()
    assert state.status(tree, series=world.series).state == "clean"
    assert state.dirty_files(work_tree(tree), [f"python/{PACKAGE}/alpha.py"]) == []
    assert (tree / ".git" / "index").read_bytes() == index


APPLY = """
import sys
from pathlib import Path
from q4kit.series import manifest, worktree
print("ready", flush=True)
worktree.apply(sys.argv[1], series=manifest.load(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("children_too", [True, False])
def test_killed_at_random_moments(world: World, children_too: bool) -> None:
    """kill -9 of this tool, with git or leaving git running behind it: status names it, apply or revert mends it."""
    rng = random.Random(7)
    pin = head(world.base)
    states = []
    for trial in range(6):
        tree = world.tree(f"t{trial}")
        command = [sys.executable, "-c", APPLY, str(tree), str(world.series.folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 30
        marker = journal.marker_path(work_tree(tree))
        while not marker.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.08))
        (os.killpg if children_too else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        found = state.status(tree, series=world.series)
        states.append(found.state)
        if found.state == "drifted":
            assert "interrupted apply" in found.reason or "is running now" in found.reason
        else:
            assert (found.state, found.prefix) == ("applied", world.series.length)
        if trial % 2:
            worktree.apply(tree, series=world.series)
            assert state.status(tree, series=world.series).prefix == world.series.length
        worktree.revert(tree, series=world.series)
        assert head(tree) == pin
        assert git.out(["status", "--porcelain"], tree) == ""
        assert not (tree / ".git" / "rebase-apply").exists()
        assert not list((tree / ".git").rglob("*.lock"))
    assert "drifted" in states


def test_a_file_that_git_is_replacing_is_absent(tmp_path: Path) -> None:
    """`status` while git puts a patch in: the file goes between looking at it and reading it."""

    class Going(type(tmp_path)):  # type: ignore[misc]
        def lstat(self) -> os.stat_result:
            info = super().lstat()
            self.unlink()
            return info

    file = Going(tmp_path / "alpha.py")
    file.write_text("x = 1\n")
    assert read_entry(file) is None


def test_an_apply_that_ends_while_status_reads_is_no_drift(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = world.tree("t")
    interrupt(world, tree)

    def read(target: Target, paths: list[str]) -> dict[str, Entry]:
        found = read_entries(target, paths)
        found.pop(f"python/{PACKAGE}/alpha.py")  # git is replacing it
        journal.marker_path(work_tree(tree)).unlink()
        return found

    monkeypatch.setattr(state, "read_entries", read)
    assert "interrupted apply" in state.status(tree, series=world.series).reason


def test_a_rebase_of_the_users_own_is_left_alone(world: World) -> None:
    tree = world.tree("t")
    (tree / ".git" / "rebase-apply").mkdir()
    with pytest.raises(UsageError, match="middle of something else"):
        worktree.apply(tree, series=world.series)
    assert (tree / ".git" / "rebase-apply").is_dir()


def test_shallow_clone_with_hooks_and_odd_settings(world: World) -> None:
    """Neither depth 1, nor hooks, nor settings that change diffs or identities alter the outcome."""
    plain, odd = world.tree("plain"), world.root / "odd"
    git.run(["clone", "-q", "--depth=1", world.base.as_uri(), odd], world.root)
    for key, value in {
        "am.threeWay": "true",
        "commit.gpgSign": "true",
        "core.autocrlf": "true",
        "user.name": "Somebody",
        "user.email": "somebody@example.org",
        "diff.noprefix": "true",
    }.items():
        git.run(["config", key, value], odd)
    hook = odd / ".git" / "hooks" / "pre-applypatch"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    worktree.apply(plain, series=world.series)
    worktree.apply(odd, series=world.series)
    assert head(plain) == head(odd)


def test_a_folder_inside_a_work_tree_is_no_target(world: World) -> None:
    with pytest.raises(UsageError, match="lies inside the work tree") as caught:
        state.status(world.base / "python", series=world.series)
    assert caught.value.remedy == f"name {world.base}, or use --installed"


def test_a_plain_folder_inside_another_repository_is_not_told_to_name_that_one(world: World, tmp_path: Path) -> None:
    """Such as a folder in a clone of this project, which is no tree of the pin and would be refused next."""
    clone = tmp_path / "clone"
    git.run(["init", "-q", clone], tmp_path)
    (clone / "plain").mkdir()
    with pytest.raises(UsageError, match="lies inside the work tree") as caught:
        worktree.apply(clone / "plain", series=world.series)
    assert f"name {clone}" not in caught.value.remedy
    assert "tools/series.py fetch" in caught.value.remedy


def test_remedy_for_a_folder_that_is_missing_makes_one_that_is_accepted(world: World, tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    with pytest.raises(UsageError, match="no such folder") as caught:
        worktree.apply(missing, series=world.series)
    assert f"`tools/series.py fetch {missing}` makes a tree" in caught.value.remedy
    base.fetch(world.series, missing, cache=world.cache)
    assert worktree.apply(missing, series=world.series).after == world.series.length


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.replace(b"\n", b"\r\n"), "CRLF"),
        (lambda d: d[: len(d) * 3 // 4], "truncated"),
        (lambda d: d.replace(b"+    return x + 700", b"+    return x + 770"), "changed by hand"),
        (lambda d: b"", "truncated"),
        (lambda d: d[:-40] + b"\xff\xfe" + d[-38:], "UTF-8"),
    ],
)
def test_damaged_patch_file_is_refused_before_any_change(world: World, damage: object, said: str) -> None:
    tree = world.tree("t")
    pin = head(tree)
    path = world.series.path(world.series.entries[0])
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(Q4Error, match=said) as caught:
        worktree.apply(tree, series=manifest.load(world.series.folder))
    assert path.name in str(caught.value)
    assert head(tree) == pin


def test_missing_patch_file_is_named(world: World) -> None:
    path = world.series.path(world.series.entries[1])
    path.unlink()
    tree = world.tree("t")
    with pytest.raises(UsageError, match="missing"):
        worktree.apply(tree, series=manifest.load(world.series.folder))


def test_unknown_prefix_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="prefix 9 does not exist"):
        worktree.apply(world.tree("t"), series=world.series, to=9)


def test_linked_work_tree_is_a_target_too(world: World) -> None:
    linked = world.root / "linked"
    git.run(["worktree", "add", "-q", "--detach", linked, "HEAD"], world.base)
    worktree.apply(linked, series=world.series)
    assert state.status(linked, series=world.series).prefix == world.series.length
    assert state.status(world.base, series=world.series).state == "clean"
    shutil.rmtree(linked)
