"""A planted fault is on the tree only while its prefix is served, and one that does not fit is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from q4kit import series as series_package
from q4kit.errors import UsageError
from q4kit.gate import trees
from q4kit.gate.plan import Plant
from q4kit.gate.store import Store
from q4kit.series import git

FILE = "python/sglang/a.py"
PLANT = f"""\
diff --git a/{FILE} b/{FILE}
--- a/{FILE}
+++ b/{FILE}
@@ -1,2 +1,2 @@
 def f(x):
-    return x * 2
+    return x
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git work tree with one file; moving it between prefixes is the series' own business."""
    root = tmp_path / "tree"
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_text("def f(x):\n    return x * 2\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(trees.worktree, "apply", lambda *_, **__: None)
    return root


def plant(tmp_path: Path, text: str = PLANT, at: int = 2) -> Plant:
    file = tmp_path / "fault.patch"
    file.write_text(text)
    return Plant(file, at, hashlib.sha256(text.encode()).hexdigest())


def test_the_fault_is_there_while_its_prefix_is_served(tree: Path, tmp_path: Path) -> None:
    compiled = tree / "python" / "sglang" / "__pycache__" / "a.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"stale")
    with trees.at_prefix(tree, series_package.load(), 2, plant(tmp_path)) as path:
        assert path == tree / "python"
        assert "return x\n" in (tree / FILE).read_text()
        assert not compiled.exists()
        compiled.write_bytes(b"of the fault")
    assert "return x * 2\n" in (tree / FILE).read_text()
    assert not compiled.exists()


def test_it_is_taken_back_when_serving_fails(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), trees.at_prefix(tree, series_package.load(), 3, plant(tmp_path)):
        raise RuntimeError
    assert "return x * 2\n" in (tree / FILE).read_text()


def test_a_prefix_below_it_stays_clean(tree: Path, tmp_path: Path) -> None:
    with trees.at_prefix(tree, series_package.load(), 1, plant(tmp_path)):
        assert "return x * 2\n" in (tree / FILE).read_text()


def test_a_fault_that_does_not_fit_is_refused(tree: Path, tmp_path: Path) -> None:
    fault = plant(tmp_path, PLANT.replace("x * 2", "x * 3"))
    with pytest.raises(UsageError, match=r"fault\.patch does not apply on prefix 2"):  # noqa: SIM117
        with trees.at_prefix(tree, series_package.load(), 2, fault):
            pass


def test_a_file_that_is_no_patch_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fault\.patch is not a patch"):  # noqa: SIM117
        with trees.at_prefix(tree, series_package.load(), 2, plant(tmp_path, "hello\n")):
            pass


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for the cached work tree of the pin: a repository with one commit under the base's name."""
    repo = tmp_path / "base"
    subprocess.run(["git", "init", "-q", str(repo)], check=True)
    commit = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m", "pin"]
    subprocess.run(["git", "-C", str(repo), *commit], check=True)
    subprocess.run(["git", "-C", str(repo), "update-ref", trees.BASE_REF, "HEAD"], check=True)
    monkeypatch.setattr(trees, "cached_base", lambda *_, **__: repo)
    monkeypatch.setattr(trees.base, "add_extensions", lambda *_: None)
    monkeypatch.setattr(trees, "_WARM_IMPORT", "pass")
    return repo


@pytest.fixture
def at_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave moving a tree between prefixes out: it is the series' own business."""
    monkeypatch.setattr(trees.worktree, "apply", lambda *_, **__: None)
    monkeypatch.setattr(trees, "series_status", lambda *_, **__: SimpleNamespace(state="clean"))


def opened(folder: Path, like: Path | None = None) -> Path:
    return trees.open_tree(folder, series_package.load(), sys.executable, {}, lambda _: None, like=like)


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, cached: Path) -> None:
    folder = tmp_path / "out" / "tree"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("x")
    with pytest.raises(UsageError, match=r"tree: it is there, and was not made by this tool"):
        opened(folder)
    trees.remove_tree(folder, series_package.load(), sys.executable)
    assert (folder / "mine").read_text() == "x"


def test_a_work_tree_that_somebody_else_made_of_the_same_base_is_left_alone(tmp_path: Path, cached: Path) -> None:
    folder = tmp_path / "out" / "tree"
    subprocess.run(["git", "-C", str(cached), "worktree", "add", "-q", "--detach", str(folder)], check=True)
    (folder / "work").write_text("x")
    with pytest.raises(UsageError, match="not made by this tool"):
        opened(folder)
    assert (folder / "work").exists()


def test_a_tree_made_here_is_made_again_and_removed(tmp_path: Path, cached: Path) -> None:
    folder = opened(tmp_path / "out" / "tree")
    (folder / "half").write_text("x")
    assert opened(folder) == folder  # changed since it was made
    assert not (folder / "half").exists()
    trees.remove_tree(folder, series_package.load(), sys.executable)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_second_tree_shares_the_files_of_the_first_and_moves_by_itself(
    tmp_path: Path, cached: Path, at_base: None
) -> None:
    (cached / FILE).parent.mkdir(parents=True)
    (cached / FILE).write_text("def f(x):\n    return x * 2\n")
    moved = series_package.load().touched[0]
    (cached / moved).parent.mkdir(parents=True, exist_ok=True)
    (cached / moved).write_text("y = 1\n")
    for command in (["add", "-A"], ["commit", "-q", "-m", "pin"], ["update-ref", trees.BASE_REF, "HEAD"]):
        subprocess.run(["git", "-C", str(cached), "-c", "user.name=a", "-c", "user.email=a@b.c", *command], check=True)
    first = opened(tmp_path / "out" / "tree")
    compiled = Path("python/sglang/__pycache__/a.cpython-311.pyc")
    (first / compiled).parent.mkdir()
    (first / compiled).write_bytes(b"compiled")
    (cached / ".git" / "info").mkdir(exist_ok=True)
    (cached / ".git" / "info" / "exclude").write_text("__pycache__/\n")

    second = opened(tmp_path / "out" / "tree-2", like=first)
    for name in (FILE, compiled):
        assert (second / name).samefile(first / name)
    time.sleep(1.1)  # git looks at whole seconds of ctime
    (first / moved).unlink()  # as git does when it moves that tree
    assert git.out(["diff-files", "--name-only"], second) == ""  # what `git am` holds against the index
    (first / moved).write_text("y = 1\n")
    with trees.at_prefix(second, series_package.load(), 2, plant(tmp_path)) as path:
        assert path == second / "python"
        assert "return x\n" in (second / FILE).read_text()
        assert not (second / compiled).exists()
        assert "return x * 2\n" in (first / FILE).read_text()
        assert (first / compiled).read_bytes() == b"compiled"
    assert opened(second, like=first) == second  # not made again: git finds it unchanged

    store = Store(tmp_path / "out")
    assert [store.tree(0), store.tree(1)] == store.trees() == [first, second]
    for tree in store.trees():
        trees.remove_tree(tree, series_package.load(), sys.executable)
    assert list((tmp_path / "out").iterdir()) == []
