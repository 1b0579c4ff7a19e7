"""Writing the series folder from commits."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from series_world import PACKAGE, World, commit, edit, message, source_files, write_files

from q4kit.errors import UsageError
from q4kit.series import base, export, git, lint, manifest, state, worktree
from q4kit.series.manifest import MANIFEST, Series


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def again(world: World, **options: object) -> export.Exported:
    return export.export(
        world.work,
        series=manifest.load(world.series.folder),
        against=world.base,
        **options,  # type: ignore[arg-type]
    )


def test_a_second_export_changes_nothing(world: World) -> None:
    before = contents(world.series.folder)
    result = again(world)
    assert (result.written, result.removed, result.warnings) == ([], [], [])
    assert contents(world.series.folder) == before


def test_round_trip_through_apply_is_byte_identical(world: World) -> None:
    tree = world.tree("t")
    worktree.apply(tree, series=world.series)
    assert export.format_patches(tree, "refs/q4head/base") == {
        e.file: world.series.path(e).read_bytes() for e in world.series.entries
    }


def test_users_settings_do_not_change_the_bytes(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(world.series.folder)
    for key, value in {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.algorithm": "patience",
        "diff.renames": "copies",
        "format.signOff": "true",
        "format.subjectPrefix": "RFC",
        "format.useAutoBase": "true",
        "format.thread": "deep",
        "core.abbrev": "7",
        "core.quotePath": "false",
    }.items():
        git.run(["config", key, value], world.work)
    (tmp_path / "gitconfig").write_text("[diff]\n\tmnemonicPrefix = true\n[user]\n\tname = Somebody\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
    assert again(world).written == []
    assert contents(world.series.folder) == before


def test_hand_edited_fields_and_comments_survive(world: World) -> None:
    path = world.series.folder / MANIFEST
    text = path.read_text()
    text = text.replace("adds = []", 'adds = ["--seven"]  # why it is needed', 1)
    text = text.replace('status = "Pending [a test]"', 'status = "Submitted [https://example.org/1]"', 1)
    path.write_text(text)
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 100\n")
    commit(world.work, message("fix(gamma): one hundred"), 30)
    again(world)
    after = path.read_text()
    assert "# a comment that stays" in after
    assert 'adds = ["--seven"]  # why it is needed' in after
    loaded = manifest.load(world.series.folder)
    assert loaded.entries[0].status == "Submitted [https://example.org/1]"
    assert loaded.entries[4].status == "Pending [a test]"
    assert loaded.regressions == world.series.regressions
    assert f"python/{PACKAGE}/gamma.py" in loaded.base.files
    tree = world.tree("t")
    worktree.apply(tree, series=loaded)
    assert state.status(tree, series=loaded).prefix == 5


def test_fields_follow_a_patch_to_another_place(world: World) -> None:
    """Reordered by a rebase: what was written about a patch stays with it, not with its number."""
    path = world.series.folder / MANIFEST
    path.write_text(
        path.read_text()
        .replace('finding = "1"', 'finding = "of three"', 3)
        .replace('finding = "of three"', 'finding = "1"', 2)
    )
    assert manifest.load(world.series.folder).entries[2].finding == "of three"
    git.run(["reset", "-q", "--hard", "refs/q4head/base"], world.work)
    options = ["am", "-q", "--committer-date-is-author-date"]
    for n in (3, 1, 2, 4):
        git.run([*options, world.series.path(world.series.entries[n - 1])], world.work)
    result = again(world)
    loaded = manifest.load(world.series.folder)
    assert [e.subject for e in loaded.entries][:2] == ["fix(sub): minus three", "fix(alpha): seven is seven hundred"]
    assert loaded.entries[0].finding == "of three"
    assert len(result.removed) == 3
    assert [f for f in lint.lint(loaded) if "not listed" in f] == []


def test_a_failing_export_writes_nothing(world: World) -> None:
    before = contents(world.series.folder)
    commit(world.work, message("[Fix] brackets are lost by git am"), 30)
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 100\n")
    commit(world.work, message("fix(gamma): one hundred"), 31)
    with pytest.raises(UsageError):
        again(world)
    assert contents(world.series.folder) == before


def test_brackets_in_the_subject_are_refused(world: World) -> None:
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 100\n")
    commit(world.work, message("[Fix] brackets are lost by git am"), 30)
    with pytest.raises(UsageError, match="other bytes") as caught:
        again(world)
    assert "brackets" in caught.value.remedy


def test_uncommitted_changes_are_refused(world: World) -> None:
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 100\n")
    with pytest.raises(UsageError, match="uncommitted"):
        again(world)


def test_merge_is_refused(world: World) -> None:
    git.run(["checkout", "-q", "-b", "side", "HEAD~1"], world.work)
    (world.work / "side.txt").write_text("x\n")
    commit(world.work, message("feat(side): x"), 30)
    git.run(
        ["merge", "-q", "--no-ff", "-m", "merge", "base"],
        world.work,
        env={"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"},
    )
    with pytest.raises(UsageError, match="merge commits"):
        again(world)


def test_base_that_is_not_the_pin_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match=r"alpha\.py: blob .* expected blob"):
        again(world, base="HEAD~2")


def test_newly_touched_file_must_start_from_the_pin(world: World) -> None:
    """A commit smuggled below --base: series.toml does not know the file yet, the pin itself does."""
    git.run(["checkout", "-q", "--detach", "refs/q4head/base"], world.work)
    edit(world.work / "python" / PACKAGE / "delta.py", "return x + 1\n", "return x + 2 - 1\n")
    commit(world.work, "not in the pin", 30)
    start = git.out(["rev-parse", "HEAD"], world.work)
    git.run(["am", "-q", *[world.series.path(e) for e in world.series.entries]], world.work)
    edit(world.work / "python" / PACKAGE / "delta.py", "return x + 5\n", "return x + 50\n")
    commit(world.work, message("fix(delta): fifty"), 31)
    with pytest.raises(UsageError, match=r"delta\.py .* expected .* of the pin"):
        again(world, base=start)


def test_new_appends_and_nothing_else(world: World) -> None:
    with pytest.raises(UsageError, match="no commit above"):
        again(world, mode="new")
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 100\n")
    commit(world.work, message("fix(gamma): one hundred"), 30)
    result = again(world, mode="new")
    assert result.written == ["0005-fix-gamma-one-hundred.patch"]
    git.run(["commit", "-q", "--amend", "-m", message("fix(gamma): 100")], world.work)
    with pytest.raises(UsageError, match="0005-fix-gamma-one-hundred") as caught:
        again(world, mode="new")
    assert "refresh" in caught.value.remedy


def test_refresh_shows_the_range_diff_and_the_counts(world: World) -> None:
    edit(world.work / "python" / PACKAGE / "alpha.py", "return x + 701\n", "return x + 702\n")
    git.run(["commit", "-q", "-a", "--amend", "--no-edit"], world.work)
    result = again(world, mode="refresh")
    assert (len(result.before), len(result.after)) == (4, 4)
    assert "x + 702" in result.range_diff
    assert "fix(sub): minus three" in result.range_diff


def test_moving_to_a_new_pin(world: World) -> None:
    """The steps of docs/SERIES.md, "A new pin": another release, the commits rebased onto it, one refresh."""
    files = source_files()
    files[f"{PACKAGE}/alpha.py"] = "# released again\n" + files[f"{PACKAGE}/alpha.py"]
    pin = world.root / "pin2"
    write_files(pin / "python", files)
    commit_id = base.commit_base(pin, PACKAGE, "1.3.0")
    path = world.series.folder / MANIFEST
    text = path.read_text().replace('version = "1.2.3"', 'version = "1.3.0"')
    path.write_text(text.replace(world.series.base.commit, commit_id))
    old = git.out(["rev-parse", "HEAD"], world.work)
    git.run(["fetch", "-q", pin, "base"], world.work)
    git.run(["rebase", "-q", "--onto", "FETCH_HEAD", base.BASE_REF], world.work)
    git.run(["update-ref", "refs/q4head/old", base.BASE_REF], world.work)
    git.run(["update-ref", base.BASE_REF, commit_id], world.work)
    series = manifest.load(world.series.folder)
    with pytest.raises(UsageError, match=r"alpha\.py: blob"):
        export.export(world.work, series=series, against=pin, mode="refresh")
    result = export.export(
        world.work, series=series, against=pin, mode="refresh", new_pin=True, old=f"refs/q4head/old..{old}"
    )
    assert "fix(alpha): seven is seven hundred" in result.range_diff
    moved = manifest.load(world.series.folder)
    assert moved.entries[0].tree_after != world.series.entries[0].tree_after
    assert moved.entries[0].finding == "1"
    worktree.apply(pin, series=moved)
    assert state.status(pin, series=moved).prefix == 4


def test_refresh_never_loses_a_patch_silently(world: World) -> None:
    git.run(["reset", "-q", "--hard", "HEAD~1"], world.work)
    before = contents(world.series.folder)
    with pytest.raises(UsageError, match="from 4 to 3"):
        again(world, mode="refresh")
    assert contents(world.series.folder) == before
    result = again(world, mode="refresh", allow_fewer=True)
    assert result.removed == ["0004-fix-alpha-one-more.patch"]
    assert any("has left the series" in w for w in result.warnings)


def test_export_from_a_clone_whose_base_has_another_commit_id(world: World) -> None:
    """A user's clone at the tag holds more files; only the pinned blobs count."""
    clone = world.root / "clone"
    git.run(["clone", "-q", "--no-local", world.base, clone], world.root)
    (clone / "docs.md").write_text("upstream's own\n")
    commit(clone, "upstream at the tag", 20)
    git.run(["tag", "v1.2.3"], clone)
    git.run(["am", "-q", *[world.series.path(e) for e in world.series.entries]], clone)
    result = export.export(clone, series=world.series, against=world.base)
    assert result.written == []


def _broken(world: World, old: str, new: str) -> Series:
    path = world.series.folder / MANIFEST
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return manifest.load(world.series.folder)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "schema is 2, expected 1"),
        ('version = "1.2.3"', "version = 123", "base.version is 123"),
        ("[base.files]", "[base.files", "not valid TOML"),
        ('stock = "pass"', 'stock = "fail"', "regression.stock"),
        ('file = "0002-', 'file = "0003-', "patch\\[2\\].file"),
        ("insertions = 1", 'insertions = "1"', "insertions"),
    ],
)
def test_bad_manifest_names_field_and_value(world: World, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _broken(world, old, new)


def test_manifest_is_valid_toml_for_everybody(world: World) -> None:
    doc = tomllib.loads((world.series.folder / MANIFEST).read_text())
    assert len(doc["patch"]) == 4
    assert doc["base"]["files"][f"python/{PACKAGE}/late.py"] == "absent"
    assert doc["base"]["files"][f"python/{PACKAGE}/run.sh"].startswith("100755 ")


# --- lints -------------------------------------------------------------------------------------------------------


def test_the_series_passes_its_lints(world: World) -> None:
    assert lint.lint(world.series) == []


def relint(world: World, subject: str, text: str = "return x + 100\n", body: str | None = None) -> str:
    edit(world.work / "python" / PACKAGE / "gamma.py", "return x + 1\n", text)
    commit(world.work, body or message(subject), 30)
    again(world)
    return "\n".join(lint.lint(manifest.load(world.series.folder)))


@pytest.mark.parametrize(
    ("subject", "text", "said"),
    [
        ("fix(gamma): this and that", "return x + 100\n", "joins two things with 'and'"),
        ("Fix gamma", "return x + 100\n", "not `type(scope): what`"),
        (f"fix(gamma): {'long ' * 14}".strip(), "return x + 100\n", "expected at most 72"),
        ("fix(gamma): white space", "return x + 100   \n", "trailing white space"),
        ("fix(gamma): left over", "print(x)\n    return x\n", "debug leftover: print("),
        ("fix(gamma): left over", "breakpoint()\n    return x\n", "debug leftover: breakpoint("),
    ],
)
def test_lints_of_one_patch(world: World, subject: str, text: str, said: str) -> None:
    found = relint(world, subject, text)
    assert said in found
    assert "0005" in found


def test_missing_trailers_and_sections(world: World) -> None:
    found = relint(world, "", body="fix(gamma): bare\n\nNo reason given.\n")
    for key in ("Finding", "Upstream-Status", "Signed-off-by"):
        assert f"0 trailers `{key}:`" in found
    assert "Motivation, Mechanism, Verification" in found


def test_unlisted_file(world: World) -> None:
    (world.series.folder / "0009-forgotten.patch").write_text("x\n")
    assert any("0009-forgotten.patch: not listed" in f for f in lint.lint(world.series))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('status = "Pending [a test]"', 'status = "Pending"', "status 'Pending', expected"),
        ('status = "Pending [a test]"', 'status = "Waiting [a test]"', "status 'Waiting"),
        ('finding = "1"', 'finding = "2"', "trailer `Finding: 1`"),
        ("insertions = 1", "insertions = 9", "insertions is 9"),
        ("depends = []", 'depends = ["0004-fix-alpha-one-more.patch"]', "no earlier patch"),
        ("adds = []", 'adds = ["--nothing"]', "does not occur in its added lines"),
        ("adds = []", 'adds = ["nothing"]', "expected a server argument"),
        ("test_0001_seven.py", "test_0001_gone.py", "does not exist"),
        ('tree_after = "', 'tree_after = "0000000000000000000000000000000000000000" #', "tree_after"),
    ],
)
def test_lints_of_the_manifest(world: World, old: str, new: str, said: str) -> None:
    found = lint.lint(_broken(world, old, new))
    assert any(said in f for f in found), found


def test_the_folder_protects_its_line_ends() -> None:
    """In a checkout with core.autocrlf the patch files keep their bytes."""
    attributes = (manifest.series_dir() / ".gitattributes").read_text()
    assert "*.patch -text" in attributes
    assert os.path.exists(manifest.series_dir() / MANIFEST)
