"""The four states, and that "does not apply" is never read as "already applied"."""

from __future__ import annotations

from pathlib import Path

import pytest
from series_world import PACKAGE, World, commit, edit

from q4kit import exit_codes
from q4kit.series import git, state, worktree


def alpha(tree: Path) -> Path:
    return tree / "python" / PACKAGE / "alpha.py"


def test_exit_codes_are_distinct_and_clash_with_no_shared_one() -> None:
    shared = {v for k, v in vars(exit_codes).items() if k.isupper()}
    assert len(set(state.EXIT_CODES.values())) == 4
    assert not shared & set(state.EXIT_CODES.values())
    assert all(code < 126 for code in state.EXIT_CODES.values())


def test_absorbed_squashed_into_other_work_on_a_moved_base(world: World) -> None:
    """Upstream took patches 1 and 3 in one commit, with other changes above them: offset, squashed, edited file."""
    tree = world.tree("t")
    path = alpha(tree)
    path.write_text("# a new header\n# of two lines\n" + path.read_text())
    edit(path, "return x + 7\n", "return x + 700\n")
    edit(path, "return x + 25\n", "return 25 + x\n")
    deep = tree / "python" / PACKAGE / "sub" / "deep.py"
    edit(deep, "return x + 3\n", "return x - 3\n")
    edit(tree / "python" / PACKAGE / "run.sh", "echo pin\n", "echo patched\n")
    commit(tree, "upstream: many things (#123)", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "absorbed"
    assert found.prefix == -1
    assert [v.verdict for v in found.patches] == ["contained", "offset", "contained", "offset"]
    assert found.absorbed == [world.series.entries[0].file, world.series.entries[2].file]
    assert found.patches[1].offset == 2


def test_absorbed_although_a_later_patch_changed_its_lines(world: World) -> None:
    """The whole series, then other work: patch 4 rewrote the line of patch 1, both are contained."""
    tree = world.tree("t")
    worktree.apply(tree, series=world.series)
    edit(alpha(tree), "return x + 29\n", "return 29 + x\n")
    commit(tree, "other work", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "absorbed"
    assert [v.verdict for v in found.patches] == ["contained"] * 4


def test_conflict_is_drifted_with_hunk_and_nearest_lines(world: World) -> None:
    tree = world.tree("t")
    edit(alpha(tree), "def f8(x):\n    return x + 8\n", "def f8(x: int) -> int:\n    return 8 + x\n")
    commit(tree, "another base", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    bad = next(v for v in found.patches if v.verdict == "conflict")
    # the first patch has the changed line in its context
    assert bad.file == world.series.entries[0].file
    assert bad.misfit is not None
    assert (bad.misfit.path, bad.misfit.hunk) == (f"python/{PACKAGE}/alpha.py", 1)
    assert "- def f8(x):" in bad.misfit.nearest
    assert "+ def f8(x: int) -> int:" in bad.misfit.nearest
    text = alpha(tree).read_text().split("\n")
    assert text[bad.misfit.line - 1] in bad.misfit.nearest[0]
    assert bad.file in found.reason
    assert not found.absorbed


def test_half_absorbed_patch_is_drifted_not_absorbed(world: World) -> None:
    tree = world.tree("t")
    edit(tree / "python" / PACKAGE / "run.sh", "echo pin\n", "echo patched\n")  # one of the two files of patch 3
    commit(tree, "half of patch 3", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    bad = next(v for v in found.patches if v.verdict == "conflict")
    assert bad.file == world.series.entries[2].file
    assert bad.misfit is not None
    assert "already there" in bad.misfit.what


def test_rewritten_file_is_conflict_never_absorbed(world: World) -> None:
    """Nothing of the file is left: no patch fits and none can be taken back."""
    tree = world.tree("t")
    for name in ("alpha.py", "beta.py", "run.sh", "sub/deep.py"):
        (tree / "python" / PACKAGE / name).write_text("rewritten\n")
    commit(tree, "another base", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    assert {v.verdict for v in found.patches} == {"conflict"}


def test_removed_file_is_named(world: World) -> None:
    tree = world.tree("t")
    git.run(["rm", "-q", f"python/{PACKAGE}/sub/deep.py"], tree)
    commit(tree, "gone", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    assert "deep.py" in found.reason
    assert "does not exist" in found.reason


def test_edit_that_every_patch_fits_is_drifted_naming_the_blobs(world: World) -> None:
    tree = world.tree("t")
    edit(alpha(tree), "return x + 25\n", "return 25 + x\n")
    commit(tree, "harmless", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    assert git.out(["rev-parse", f"HEAD:python/{PACKAGE}/alpha.py"], tree) in found.reason


def test_ambiguous_patch_is_not_taken_for_absorbed(world: World) -> None:
    """In a file of repeated blocks a patch may fit forwards and backwards at other lines: no guess is made."""
    tree = world.tree("t")
    deep = tree / "python" / PACKAGE / "sub" / "deep.py"
    text = deep.read_text()
    deep.write_text("# new\n" + text.replace("return x + 3\n", "return x - 3\n") + "\n" + text)
    edit(tree / "python" / PACKAGE / "run.sh", "echo pin\n", "echo pin\necho patched\n")
    commit(tree, "another base", 30)
    found = state.status(tree, series=world.series)
    assert found.state == "drifted"
    assert world.series.entries[2].file not in found.absorbed


def test_uncommitted_application_is_named(world: World) -> None:
    tree = world.tree("t")
    for entry in world.series.entries:
        git.run(["apply", world.series.path(entry)], tree)
    found = state.status(tree, series=world.series)
    assert (found.state, found.prefix) == ("applied", 4)
    assert "not committed" in found.notes[0]


def test_json_is_plain(world: World) -> None:
    import json

    tree = world.tree("t")
    worktree.apply(tree, series=world.series, to=2)
    data = json.loads(json.dumps(state.status(tree, series=world.series).to_json()))
    assert data["state"] == "applied"
    assert data["prefix"] == 2
    assert data["exit_code"] == state.EXIT_CODES["applied"]


@pytest.mark.parametrize("path", ["/nonexistent-folder", "/"])
def test_no_work_tree_is_a_usage_error(world: World, path: str) -> None:
    from q4kit.errors import UsageError

    with pytest.raises(UsageError):
        state.status(path, series=world.series)
