"""Fetch, trees, verify, prefix tests and radar on the small series, with real pytest and real wheels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from series_world import PACKAGE, SERIES, VERSION, World, commit, edit, make_wheel, message, source_files

from q4kit import exit_codes
from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import base, export, git, manifest, prefix_tests, radar, render, state, verify, wheel
from q4kit.series.prefix_tests import Outcome
from q4kit.series.targets import InstalledTarget


def outcomes(report: verify.Report) -> dict[tuple[int, str], Outcome]:
    return {(p.prefix, t.nodeid.split("::")[-1]): t for p in report.prefixes for t in p.tests}


def problems(report: verify.Report) -> list[str]:
    checks = [*report.series, *(c for p in report.prefixes for c in p.checks)]
    return [p for c in checks for p in c.problems] + [
        f"{k}: {t.problem}" for k, t in outcomes(report).items() if t.problem
    ]


def test_verify_holds_and_ran_what_it_says(world: World) -> None:
    report = verify.verify(world.series, cache=world.cache)
    assert problems(report) == []
    assert report.ok
    seen = outcomes(report)
    # every red test failed at the prefix before its patch and passed at its own
    for patch, name in ((1, "test_seven"), (2, "test_eight"), (3, "test_sub"), (4, "test_more")):
        assert (seen[patch - 1, name].outcome, seen[patch - 1, name].expected) == ("failed", "red")
        assert (seen[patch, name].outcome, seen[patch, name].expected) == ("passed", "pass")
    assert seen[0, "test_nine"].outcome == seen[4, "test_nine"].outcome == "passed"
    assert "AssertionError" in seen[0, "test_seven"].detail
    assert not list(world.cache.glob("**/rebase-apply"))
    assert (
        git.out(["worktree", "list", "--porcelain"], world.cache / f"base-{VERSION}-{wheel.python_tag()}").count(
            "worktree "
        )
        == 1
    )


def test_full_runs_every_test_and_the_default_those_whose_outcome_changes(made: World) -> None:
    numbers = {f"tests/patches/test_{n}.py": int(n[:4]) for n in ("0001_seven", "0002_extra", "0003_sub", "0004_more")}
    everything = numbers | {"tests/patches/test_regression_nine.py": 0}
    for k in range(5):
        assert prefix_tests.plan(made.series, k, full=True).files == everything
        some = everything if k in (0, 4) else {f: n for f, n in numbers.items() if n in (k, k + 1)}
        assert prefix_tests.plan(made.series, k, full=False).files == some


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(): pass\n",
            "passes without its patch",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(): assert 0\n",
            "expected to pass",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(): undefined\n",
            "red by NameError",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(nothing): assert 0\n",
            "setup phase: red for another reason",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock(setup=True)\ndef test_x(nothing): assert 0\n",
            "setup phase: red for another reason",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(): pytest.skip('no')\n",
            "skipped, expected to fail",
        ),
        (
            "test_0001_seven.py",
            "import pytest\n@pytest.mark.red_on_stock\n@pytest.mark.xfail\ndef test_x(): assert 0\n",
            "xfailed, expected to fail",
        ),
        ("test_0001_seven.py", "import nowhere\n", "cannot be collected"),
        ("test_0001_seven.py", "def test_x(:\n", "cannot be collected"),
        ("test_0001_seven.py", "x = 1\n", "holds no test"),
        ("test_0001_seven.py", "def test_x(): pass\n", "marked red_on_stock: nothing shows"),
        ("test_regression_nine.py", "def test_x(): assert 0\n", "expected to pass"),
        (
            "test_regression_nine.py",
            "import pytest\n@pytest.mark.red_on_stock\ndef test_x(): assert 0\n",
            "must not be marked red_on_stock",
        ),
    ],
)
def test_a_test_that_proves_nothing_is_found(made: World, world: World, file: str, text: str, said: str) -> None:
    (world.root / "repo" / "tests" / "patches" / file).write_text(text)
    found = []
    for k in (0, 1):
        tree = base.tree_at(k, made.cache, series=made.series)
        what = prefix_tests.Plan(k, {f"tests/patches/{file}": 0 if "regression" in file else 1})
        found += [o.problem for o in prefix_tests.run(world.series, what, tree, python=sys.executable)]
        if any(said in p for p in found):
            return
    pytest.fail(f"{said!r} not in {found}")


def test_the_tree_under_test_is_proven(world: World, tmp_path: Path) -> None:
    """A conftest that puts another copy in front would test the wrong code: refused, not reported green."""
    other = tmp_path / "other"
    make = source_files()
    for name, text in make.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(text)
    conftest = world.root / "repo" / "tests" / "patches" / "conftest.py"
    conftest.write_text(f"import sys\nsys.path.insert(0, {str(other)!r})\n")
    tree = base.tree_at(0, world.cache, series=world.series)
    what = prefix_tests.plan(world.series, 0, full=True, patch=1)
    with pytest.raises(EnvironmentFault, match="imported q4demo from"):
        prefix_tests.run(world.series, what, tree, python=sys.executable)


def test_patch_that_breaks_an_import_or_does_not_compile(world: World) -> None:
    (world.work / "python" / PACKAGE / "gamma.py").write_text("import nowhere\n")
    commit(world.work, message("fix(gamma): a broken import"), 30)
    (world.work / "python" / PACKAGE / "delta.py").write_text("def x(:\n")
    commit(world.work, message("fix(delta): a syntax error"), 31)
    export.export(world.work, series=world.series, against=world.base)
    series = manifest.load(world.series.folder)
    report = verify.verify(series, cache=world.cache, run_tests=False)
    found = "\n".join(problems(report))
    assert "q4demo.gamma: ModuleNotFoundError" in found
    assert f"python/{PACKAGE}/delta.py: does not compile" in found
    assert [p.prefix for p in report.prefixes if not p.ok] == [5, 6]


def test_broken_chain_stops_before_anything_is_applied(world: World) -> None:
    path = world.series.folder / manifest.MANIFEST
    text = path.read_text()
    pin = world.series.base.files[f"python/{PACKAGE}/beta.py"]
    assert pin is not None
    path.write_text(text.replace(pin.blob, "1" * 40))
    report = verify.verify(manifest.load(world.series.folder), cache=world.cache)
    assert not report.ok
    assert report.prefixes == ()
    assert any("beta.py: pre-image blob" in p for p in problems(report))


def test_tests_of_one_patch_at_one_prefix(world: World) -> None:
    what = prefix_tests.plan(world.series, 2, full=True, patch=3)
    assert dict(what.files) == {"tests/patches/test_0003_sub.py": 3}
    tree = base.tree_at(2, world.cache, series=world.series)
    (only,) = prefix_tests.run(world.series, what, tree, python=sys.executable)
    assert (only.outcome, only.problem) == ("failed", "")


@pytest.mark.parametrize("command", [["verify"], ["test", "--prefix", "0"]])
def test_a_python_without_pytest_is_refused_before_anything_is_built(
    world: World, env: InstalledTarget, command: list[str]
) -> None:
    out = tool(world, *command, "--python", env.python, code=4)
    assert f"{env.python} has no pytest" in out
    assert "remedy: run scripts/setup.sh --test" in out
    assert [p.name for p in world.cache.iterdir()] == ["wheels"]


def test_a_python_without_pytest_proves_what_needs_none(world: World, env: InstalledTarget) -> None:
    assert "prefixes green" in tool(world, "verify", "--no-tests", "--python", env.python, code=0)
    tool(world, "verify", "--offline", "--python", env.python, code=0)


# --- fetch and trees ---------------------------------------------------------------------------------------------


def test_fetched_commit_does_not_depend_on_the_extensions(world: World, tmp_path: Path) -> None:
    files = source_files() | {f"{PACKAGE}/sub/fast.cpython-311-x86_64-linux-gnu.so": "elf"}
    made = make_wheel(tmp_path, files)
    tag = wheel.python_tag()
    folder = world.cache / "wheels" / VERSION / tag
    for old in folder.iterdir():
        old.unlink()
    made.rename(folder / made.name)
    text = (world.series.folder / manifest.MANIFEST).read_text()
    old_sha = world.series.base.wheels[tag]
    text = text.replace(old_sha, wheel.sha256(folder / made.name))
    (world.series.folder / manifest.MANIFEST).write_text(text)
    series = manifest.load(world.series.folder)
    tree = base.fetch(series, tmp_path / "tree", cache=world.cache)
    assert git.out(["rev-parse", "HEAD"], tree) == series.base.commit
    assert (tree / "python" / PACKAGE / "sub" / "fast.cpython-311-x86_64-linux-gnu.so").read_text() == "elf"
    assert git.out(["status", "--porcelain"], tree) == ""
    later = base.tree_at(3, world.cache, series=series)
    assert (later / "python" / PACKAGE / "sub" / "fast.cpython-311-x86_64-linux-gnu.so").read_text() == "elf"


def test_fetch_twice_and_into_a_full_folder(world: World, tmp_path: Path) -> None:
    tree = base.fetch(world.series, tmp_path / "tree", cache=world.cache)
    assert base.fetch(world.series, tree, cache=world.cache) == tree
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        base.fetch(world.series, tmp_path / "full", cache=world.cache)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]


def test_fetch_from_a_shallow_clone_at_the_tag(world: World, tmp_path: Path) -> None:
    (world.base / "README.md").write_text("upstream has more than the wheel\n")
    commit(world.base, "tagged", 50)
    git.run(["tag", "v1.2.3"], world.base)
    clone = tmp_path / "clone"
    git.run(["clone", "-q", "--depth=1", world.base.as_uri(), clone], tmp_path)
    tree = base.fetch(world.series, tmp_path / "tree", source=clone)
    assert (tree / "README.md").exists()
    from q4kit.series import worktree

    worktree.apply(tree, series=world.series)
    assert state.status(tree, series=world.series).prefix == 4
    assert state.status(clone, series=world.series).state == "clean"


def test_fetch_from_a_clone_elsewhere_is_refused(world: World, tmp_path: Path) -> None:
    edit(world.base / "python" / PACKAGE / "alpha.py", "return x + 1\n", "return x + 11\n")
    commit(world.base, "moved on", 50)
    with pytest.raises(UsageError, match=r"alpha\.py: blob .* expected blob"):
        base.fetch(world.series, tmp_path / "tree", source=world.base)
    assert not (tmp_path / "tree").exists()


def test_fetch_from_an_installed_package_is_the_same_commit(world: World, tmp_path: Path) -> None:
    package = world.environment("venv").site / PACKAGE
    (package / "sub" / "fast.cpython-311-x86_64-linux-gnu.so").write_text("elf")
    tree = base.fetch(world.series, tmp_path / "tree", source=package)
    assert git.out(["rev-parse", "HEAD"], tree) == world.series.base.commit
    assert (tree / "python" / PACKAGE / "sub" / "fast.cpython-311-x86_64-linux-gnu.so").read_text() == "elf"
    assert not list(tree.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("file", "message"), [("alpha.py", r"alpha\.py: blob .* expected blob"), ("mine.py", "commit")]
)
def test_fetch_from_a_changed_package_is_refused(world: World, tmp_path: Path, file: str, message: str) -> None:
    package = world.environment("venv").site / PACKAGE
    (package / file).write_text("x = 1\n")
    with pytest.raises(UsageError, match=message) as caught:
        base.fetch(world.series, tmp_path / "tree", source=package)
    assert "unpatched" in caught.value.remedy
    assert not (tmp_path / "tree").exists()


def test_wheel_with_another_hash_is_not_used(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = world.cache / "wheels" / VERSION / wheel.python_tag()
    (kept,) = folder.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(good[:-100])

    def download(package: str, version: str, tag: str, into: Path, progress: object) -> Path:
        path = into / kept.name
        path.write_bytes(b"another file")
        return path

    monkeypatch.setattr(wheel, "download", download)
    with pytest.raises(EnvironmentFault, match=r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        base.fetch(world.series, tmp_path / "tree", cache=world.cache)
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "tree").exists()


def test_interpreter_without_a_recorded_wheel(world: World, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho cp399\n")
    fake.chmod(0o755)
    with pytest.raises(UsageError, match="no recorded wheel for cp399"):
        base.fetch(world.series, tmp_path / "tree", cache=world.cache, python=fake)


def test_trees_are_kept_and_made_again_when_changed(world: World) -> None:
    first = base.tree_at(2, world.cache, series=world.series)
    made = first.stat().st_ino
    assert base.tree_at(2, world.cache, series=world.series).stat().st_ino == made
    edit(first / "python" / PACKAGE / "gamma.py", "return x + 1\n", "return x + 11\n")
    again = base.tree_at(2, world.cache, series=world.series)
    assert again == first
    assert "return x + 11\n    " not in (again / "python" / PACKAGE / "gamma.py").read_text()
    assert git.out(["status", "--porcelain"], again) == ""


def test_a_moved_cache_is_not_trusted(world: World) -> None:
    """Work trees name their repository by absolute path: after a move they would speak of the old place."""
    base.tree_at(1, world.cache, series=world.series)
    moved = world.root / "moved"
    world.cache.rename(moved)
    tree = base.tree_at(1, moved, series=world.series)
    assert tree.is_relative_to(moved)
    assert state.status(tree, series=world.series).prefix == 1
    assert Path(git.out(["rev-parse", "--path-format=absolute", "--git-common-dir"], tree)).is_relative_to(moved)


# --- radar -------------------------------------------------------------------------------------------------------


def test_radar_says_one_line_a_patch(world: World, tmp_path: Path) -> None:
    files = source_files()
    files[f"{PACKAGE}/alpha.py"] = "# one more line\n" + files[f"{PACKAGE}/alpha.py"]
    files[f"{PACKAGE}/sub/deep.py"] = files[f"{PACKAGE}/sub/deep.py"].replace("return x + 3\n", "return x - 3\n")
    files[f"{PACKAGE}/run.sh"] = "#!/bin/sh\necho patched\n"
    files[f"{PACKAGE}/beta.py"] = files[f"{PACKAGE}/beta.py"].replace("return x + 20\n", "return 20 + x\n")
    result = radar.on_wheel(world.series, "1.3.0", make_wheel(tmp_path, files, "1.3.0"))
    lines = [v.line() for v in result.patches]
    assert lines[0].endswith(": offset 1")
    assert "conflict python/q4demo/beta.py: hunk 1 of 1" in lines[1]
    assert lines[2].endswith(": absorbed")
    assert result.patches[3].verdict in ("offset", "conflict")
    assert not result.ok
    assert (result.same_files, result.files) == (3, 7)
    document = render.radar_document([result], world.series, "today", "radar")
    rows = [line for line in document.split("\n") if line.startswith("| `000")]
    assert len(rows) == world.series.length
    assert rows[1].endswith("| conflict `python/q4demo/beta.py` hunk 1 of 1 |")
    assert rows[2].endswith("| absorbed |")


def test_radar_on_the_pin_is_clean(world: World, tmp_path: Path) -> None:
    result = radar.on_wheel(world.series, VERSION, make_wheel(tmp_path, source_files()))
    assert {v.verdict for v in result.patches} == {"fits"}
    assert result.ok
    assert result.same_files == result.files


# --- the command line --------------------------------------------------------------------------------------------

TOOL = manifest.REPO_ROOT / "tools" / "series.py"


def environment(world: World) -> dict[str, str]:
    return os.environ | {"Q4_SERIES": str(world.root / SERIES), "Q4_CACHE": str(world.cache)}


def tool(world: World, *args: object, code: int) -> str:
    command = [sys.executable, TOOL, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(world), check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_a_whole_day_on_the_command_line(world: World, tmp_path: Path) -> None:
    import json

    tree = tmp_path / "tree"
    assert "PYTHONPATH" in tool(world, "fetch", tree, code=0)
    assert "clean" in tool(world, "status", tree, code=10)
    assert "prefix 0 -> 2" in tool(world, "apply", "--to", 2, tree, code=0)
    assert json.loads(tool(world, "status", "--json", tree, code=11))["prefix"] == 2
    tool(world, "apply", tree, code=0)
    assert "nothing to do" in tool(world, "apply", tree, code=0)
    assert "0 findings in 4 patches" in tool(world, "lint", code=0)
    assert "no patch file changed" in tool(world, "export", tree, code=0)
    assert "5 of 5 prefixes green" in tool(world, "verify", "--no-tests", code=0)
    assert json.loads(tool(world, "verify", "--offline", "--json", code=0))["ok"] is True
    assert "6 of 6 tests as declared" in tool(world, "test", "--prefix", "stock", code=0)
    assert "1 of 1 tests as declared" in tool(world, "test", "--prefix", 4, "--patch", 2, code=0)
    assert "prefix 4 -> 0" in tool(world, "revert", tree, code=0)
    edit(tree / "python" / PACKAGE / "alpha.py", "return x + 7\n", "return x + 70\n")
    out = tool(world, "status", tree, code=13)
    assert "- " in out
    assert "+     return x + 70" in out
    assert "local changes" in tool(world, "apply", tree, code=2)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status"], "name a work tree or --installed"),
        (["status", "--installed", "/tmp"], "name a work tree or --installed"),
        (["apply", "/nonexistent"], "no such folder"),
        (["test", "--prefix", "last"], "a number of patches"),
        (["test", "--prefix", "9"], "prefix 9 does not exist"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_bad_command_lines(world: World, args: list[str], said: str) -> None:
    assert said in tool(world, *args, code=2)


def test_a_closed_pipe_ends_the_tool_quietly_and_cleans_up(world: World) -> None:
    """`verify | head -1`: 141 as a shell's own tools, no traceback, no work tree left behind."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, TOOL, "verify", "--no-tests", "--no-imports"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment(world), check=False)
    os.close(write)
    assert done.returncode == exit_codes.PIPE_CLOSED, done.stderr
    assert "Error" not in done.stderr
    base_tree = world.cache / f"base-{VERSION}-{wheel.python_tag()}"
    assert git.out(["worktree", "list", "--porcelain"], base_tree).count("worktree ") == 1


def test_damaged_series_is_a_clear_error(world: World) -> None:
    path = world.series.path(world.series.entries[1])
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    out = tool(world, "verify", "--offline", code=1)
    assert "CRLF" in out
    assert "0002" in out
