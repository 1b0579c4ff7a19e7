"""Applying to installed packages: exact bytes, killed at any moment, hostile surroundings."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from series_world import (
    PACKAGE,
    VERSION,
    World,
    commit,
    edit,
    install,
    make_wheel,
    message,
    snapshot,
    source_files,
    write_files,
)

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import base, export, git, installed, journal, manifest, state
from q4kit.series.manifest import Series
from q4kit.series.targets import STATE_DIR, InstalledTarget, installed_target


def check(env: InstalledTarget, series: Series) -> state.SeriesStatus:
    return state.status(env, series=series)


def imported(env: InstalledTarget, expression: str) -> str:
    """Return what a real interpreter sees, compiled files and all."""
    code = f"import {PACKAGE}.alpha as a, {PACKAGE}.sub.deep; print({expression})"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}  # compiled files must be written
    done = subprocess.run([env.python, "-c", code], capture_output=True, text=True, cwd="/", env=clean, check=True)
    return done.stdout.strip()


def test_the_package_is_found_without_importing_it(env: InstalledTarget) -> None:
    (env.site / PACKAGE / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert installed_target(env.python, PACKAGE) == env


def test_apply_status_revert_round_trip(world: World, env: InstalledTarget) -> None:
    before = snapshot(env.site)
    times = {p: p.stat().st_mtime_ns for p in env.site.rglob("*.py")}
    assert check(env, world.series).state == "clean"
    assert imported(env, "a.f7(0)") == "7"
    for k in range(1, world.series.length + 1):
        installed.apply(env, series=world.series, to=k)
        found = check(env, world.series)
        assert (found.state, found.prefix, found.tree) == ("applied", k, world.series.entries[k - 1].tree_after)
    assert imported(env, "a.f7(0)") == "701"
    assert os.access(env.site / PACKAGE / "run.sh", os.X_OK)
    result = installed.revert(env, series=world.series)
    assert (result.before, result.after) == (world.series.length, 0)
    assert snapshot(env.site) == before
    assert {p: p.stat().st_mtime_ns for p in env.site.rglob("*.py")} == times
    assert not env.state_dir.exists()
    assert imported(env, "a.f7(0)") == "7"


def test_files_of_added_modules_leave_no_compiled_trace(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    assert imported(env, f"__import__('{PACKAGE}.extra.inner').extra.inner.VALUE") == "1"
    assert list(env.site.glob(f"{PACKAGE}/extra/inner/__pycache__/*.pyc"))
    installed.revert(env, series=world.series)
    assert not (env.site / PACKAGE / "extra").exists()
    assert not list(env.site.rglob("late.*.pyc"))


def test_users_file_in_an_added_folder_survives_revert(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    mine = env.site / PACKAGE / "extra" / "mine.txt"
    mine.write_text("mine\n")
    installed.revert(env, series=world.series)
    assert mine.read_text() == "mine\n"
    assert check(env, world.series).state == "clean"


def test_applying_twice_is_a_no_op(world: World, env: InstalledTarget) -> None:
    assert installed.apply(env, series=world.series).changed
    before = {p: p.stat().st_mtime_ns for p in env.site.rglob("*") if p.is_file()}
    assert not installed.apply(env, series=world.series).changed
    assert {p: p.stat().st_mtime_ns for p in env.site.rglob("*") if p.is_file()} == before


def test_prefix_goes_down_too(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    installed.apply(env, series=world.series, to=1)
    assert check(env, world.series).prefix == 1
    assert not (env.site / PACKAGE / "late.py").exists()
    installed.apply(env, series=world.series, to=0)
    assert check(env, world.series).state == "clean"
    assert not env.state_dir.exists()


def test_revert_of_a_clean_package_says_so(world: World, env: InstalledTarget) -> None:
    assert not installed.revert(env, series=world.series).changed


@pytest.mark.parametrize("ignored", [False, True])
def test_environment_inside_another_git_checkout(
    world: World, env: InstalledTarget, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    """The enclosing repository, its environment variables and its settings neither help nor hurt."""
    outer = Path(env.python).parents[2]
    git.run(["init", "-q", "."], outer)
    (outer / ".gitignore").write_text("env/\n" if ignored else "")
    git.run(["config", "core.autocrlf", "true"], outer)
    git.run(["config", "apply.whitespace", "error"], outer)
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer / ".git" / "elsewhere"))
    monkeypatch.chdir(env.site)
    before = snapshot(env.site)
    installed.apply(env, series=world.series)
    assert check(env, world.series).prefix == world.series.length
    installed.revert(env, series=world.series)
    assert snapshot(env.site) == before
    assert not (outer / ".git" / "elsewhere").exists()


def test_edited_file_is_drifted_refused_and_kept(world: World, env: InstalledTarget) -> None:
    path = env.site / PACKAGE / "alpha.py"
    edit(path, "return x + 7\n", "return x + 77\n")
    found = check(env, world.series)
    assert found.state == "drifted"
    assert found.prefix == -1
    assert "alpha.py" in found.reason
    before = snapshot(env.site)
    with pytest.raises(UsageError, match=r"alpha\.py"):
        installed.apply(env, series=world.series)
    assert snapshot(env.site) == before


def test_edit_after_apply_is_named_and_not_lost(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    path = env.site / PACKAGE / "beta.py"
    path.write_text(path.read_text() + "# mine\n")
    found = check(env, world.series)
    assert found.state == "drifted"
    assert "changed since the series was applied" in found.reason
    assert "beta.py" in found.reason
    for run in (installed.revert, installed.apply):
        with pytest.raises(UsageError, match=r"beta\.py"):
            run(env, series=world.series)
    assert path.read_text().endswith("# mine\n")


def test_unrelated_edit_in_an_untouched_file_does_not_matter(world: World, env: InstalledTarget) -> None:
    path = env.site / PACKAGE / "gamma.py"
    path.write_text(path.read_text() + "# mine\n")
    installed.apply(env, series=world.series)
    installed.revert(env, series=world.series)
    assert path.read_text().endswith("# mine\n")


def test_another_version_is_refused_with_both_numbers(world: World, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "dist", source_files(), "1.3.0")
    install(tmp_path / "other", wheel)
    env = installed_target(tmp_path / "other" / "bin" / "python", PACKAGE)
    with pytest.raises(UsageError, match=rf"1\.3\.0, expected {VERSION}"):
        installed.apply(env, series=world.series)
    found = check(env, world.series)
    assert found.state == "drifted"
    assert "1.3.0" in found.reason


def test_missing_package_is_refused(env: InstalledTarget) -> None:
    shutil.rmtree(env.site)
    env.site.mkdir()
    with pytest.raises(EnvironmentFault, match="not installed"):
        installed_target(env.python, PACKAGE)


def test_not_an_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a usable Python"):
        installed_target(tmp_path / "python", PACKAGE)


def test_package_shadowed_by_pythonpath_is_refused(
    env: InstalledTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "shadow", source_files())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    with pytest.raises(EnvironmentFault, match="shadow") as caught:
        installed_target(env.python, PACKAGE)
    assert "PYTHONPATH" in str(caught.value) + caught.value.remedy


def test_a_package_in_the_current_folder_is_not_mistaken_for_it(
    env: InstalledTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "cwd", source_files())
    monkeypatch.chdir(tmp_path / "cwd")
    assert installed_target(env.python, PACKAGE).site == env.site


def test_editable_install_is_refused(env: InstalledTarget, tmp_path: Path) -> None:
    info = env.site / f"{PACKAGE}-{VERSION}.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    with pytest.raises(EnvironmentFault, match="editable"):
        installed_target(env.python, PACKAGE)


def test_package_of_another_environment_is_refused(env: InstalledTarget, tmp_path: Path) -> None:
    """A .pth file, or --system-site-packages, makes it importable, but patching it would change that environment."""
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", other], check=True)
    site = next(other.glob("lib/python3*/site-packages"))
    (site / "parent.pth").write_text(f"{env.site}\n")
    with pytest.raises(EnvironmentFault, match="outside that environment"):
        installed_target(other / "bin" / "python", PACKAGE)


def test_symlinked_file_is_refused(world: World, env: InstalledTarget, tmp_path: Path) -> None:
    path = env.site / PACKAGE / "alpha.py"
    kept = tmp_path / "cache.py"
    path.rename(kept)
    path.symlink_to(kept)
    with pytest.raises(EnvironmentFault, match=r"alpha\.py: not a plain file"):
        installed.apply(env, series=world.series)
    assert path.is_symlink()


def test_linked_package_folder_is_refused(env: InstalledTarget, tmp_path: Path) -> None:
    (env.site / PACKAGE).rename(tmp_path / "shared")
    (env.site / PACKAGE).symlink_to(tmp_path / "shared")
    with pytest.raises(EnvironmentFault, match="is a link to"):
        installed_target(env.python, PACKAGE)


def test_hard_linked_cache_is_not_changed(world: World, env: InstalledTarget, tmp_path: Path) -> None:
    """Installers link files from a cache shared by every environment: only this one may change."""
    path, kept = env.site / PACKAGE / "alpha.py", tmp_path / "cache.py"
    os.link(path, kept)
    text = kept.read_text()
    installed.apply(env, series=world.series)
    assert path.read_text() != text
    assert kept.read_text() == text


def test_patches_applied_without_the_tool_cannot_be_reverted(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    shutil.rmtree(env.state_dir)
    found = check(env, world.series)
    assert (found.state, found.prefix) == ("applied", world.series.length)
    assert "no saved pre-images" in found.notes[0]
    with pytest.raises(UsageError, match="no pre-images are saved") as caught:
        installed.revert(env, series=world.series)
    assert "pip install" in caught.value.remedy


def test_damaged_pre_image_stops_revert_before_any_change(world: World, env: InstalledTarget) -> None:
    installed.apply(env, series=world.series)
    record = journal.read_state(env)
    assert record is not None
    victim = next(f for f in record.files if f.path.endswith("sub/deep.py"))
    (env.state_dir / "saved" / victim.saved_name).write_text("damaged\n")
    before = snapshot(env.site)
    with pytest.raises(EnvironmentFault, match="missing or damaged"):
        installed.revert(env, series=world.series)
    assert snapshot(env.site) == before


def test_another_version_of_the_series_is_reverted_from_what_was_saved(world: World, env: InstalledTarget) -> None:
    before = snapshot(env.site)
    installed.apply(env, series=world.series)
    edit(world.work / "python" / PACKAGE / "alpha.py", "return x + 701\n", "return x + 702\n")
    commit(world.work, message("fix(alpha): and another"), 40)
    export.export(world.work, series=world.series, against=world.base)
    changed = manifest.load(world.series.folder)
    edit(world.work / "python" / PACKAGE / "delta.py", "return x + 3\n", "return x + 4\n")
    commit(world.work, message("fix(delta): one more"), 41)
    export.export(world.work, series=changed, against=world.base)
    changed = manifest.load(world.series.folder)
    assert "another version of the series" in check(env, changed).reason
    installed.revert(env, series=changed)
    assert snapshot(env.site) == before
    # apply does the same by itself, also from an interrupted state
    installed.apply(env, series=world.series)
    installed.apply(env, series=changed)
    assert check(env, changed).prefix == 6
    installed.apply(env, series=world.series)
    assert check(env, world.series).prefix == 4
    installed.revert(env, series=changed)
    assert snapshot(env.site) == before


def test_reinstalled_and_another_version_of_the_series(
    world: World, env: InstalledTarget, pristine: InstalledTarget
) -> None:
    installed.apply(env, series=world.series, to=1)
    shutil.copy2(pristine.site / PACKAGE / "alpha.py", env.site / PACKAGE / "alpha.py")
    edit(world.work / "python" / PACKAGE / "delta.py", "return x + 3\n", "return x + 4\n")
    commit(world.work, message("fix(delta): one more"), 41)
    export.export(world.work, series=world.series, against=world.base)
    changed = manifest.load(world.series.folder)
    assert check(env, changed).state == "clean"
    installed.apply(env, series=changed)
    assert check(env, changed).prefix == 5


def test_a_patch_that_left_the_series_is_not_overlooked(world: World, env: InstalledTarget) -> None:
    """Its files are no longer touched by the series, so that content alone would say applied."""
    before = snapshot(env.site)
    edit(world.work / "python" / PACKAGE / "delta.py", "return x + 3\n", "return x + 4\n")
    commit(world.work, message("fix(delta): four"), 40)
    export.export(world.work, series=world.series, against=world.base)
    installed.apply(env, series=manifest.load(world.series.folder))
    git.run(["reset", "-q", "--hard", "HEAD~1"], world.work)
    export.export(world.work, series=manifest.load(world.series.folder), against=world.base)
    shorter = manifest.load(world.series.folder)
    found = check(env, shorter)
    assert found.state == "drifted"
    assert "another version of the series" in found.reason
    installed.revert(env, series=shorter)
    assert snapshot(env.site) == before


def test_reinstalled_package_with_leftover_state_is_clean(
    world: World, env: InstalledTarget, pristine: InstalledTarget
) -> None:
    installed.apply(env, series=world.series)
    shutil.rmtree(env.site / PACKAGE)
    shutil.copytree(pristine.site / PACKAGE, env.site / PACKAGE)
    found = check(env, world.series)
    assert found.state == "clean"
    assert STATE_DIR in found.notes[0]
    installed.revert(env, series=world.series)
    assert not env.state_dir.exists()


def pip(env: InstalledTarget, *args: object) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", env.python, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_pip_does_to_a_patched_package(world: World, env: InstalledTarget, tmp_path: Path) -> None:
    """docs/SERIES.md, "Installed packages and pip": every sentence of it."""
    wheel = make_wheel(tmp_path / "dist", source_files())
    before = snapshot(env.site)
    installed.apply(env, series=world.series)
    assert "No broken requirements" in pip(env, "check")
    # a reinstall brings the pinned files back and leaves what the series added, which status names
    pip(env, "install", "--no-index", "--no-deps", "--force-reinstall", wheel)
    found = check(env, world.series)
    assert found.state == "drifted"
    assert "changed since the series was applied" in found.reason
    assert "alpha.py" in found.reason
    installed.revert(env, series=world.series)
    assert {n: v for n, v in snapshot(env.site).items() if n.startswith(PACKAGE + "/")} == {
        n: v for n, v in before.items() if n.startswith(PACKAGE + "/")
    }
    # an uninstall removes what pip installed, patched or not, and leaves what the series added
    installed.apply(env, series=world.series)
    pip(env, "uninstall", "-y", PACKAGE)
    left = {p.relative_to(env.site / PACKAGE).as_posix() for p in (env.site / PACKAGE).rglob("*.py")}
    assert left == {"late.py", "extra/__init__.py", "extra/inner/__init__.py"}


# --- faults of the machine ---------------------------------------------------------------------------------------


def test_unwritable_folder_is_refused_before_any_change(world: World, env: InstalledTarget) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the read-only mount below covers this")
    (env.site / PACKAGE / "sub").chmod(0o555)
    try:
        with pytest.raises(EnvironmentFault, match="not writable"):
            installed.apply(env, series=world.series)
        assert check(env, world.series).state == "clean"
    finally:
        (env.site / PACKAGE / "sub").chmod(0o755)


def mount(kind: str, *args: str) -> bool:
    return subprocess.run(["mount", *args], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be filled up and remounted read-only."""
    point = tmp_path / "disk"
    point.mkdir()
    if os.geteuid() != 0 or not mount("tmpfs", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(point)):
        pytest.skip("mounting a small file system needs root")
    yield point
    subprocess.run(["umount", point], check=True)


def on_disk(env: InstalledTarget, disk: Path) -> InstalledTarget:
    """Return the environment's package copied to a small file system."""
    site = disk / "site-packages"
    shutil.copytree(env.site, site)
    return InstalledTarget(env.python, env.package, env.version, site)


def test_read_only_file_system(world: World, env: InstalledTarget, small_disk: Path) -> None:
    target = on_disk(env, small_disk)
    before = snapshot(target.site)
    assert mount("", "-o", "remount,ro", str(small_disk))
    with pytest.raises(EnvironmentFault, match="not writable, nothing was changed"):
        installed.apply(target, series=world.series)
    assert snapshot(target.site) == before


def test_disk_full_at_every_amount_of_free_space(world: World, env: InstalledTarget, small_disk: Path) -> None:
    """From no space to just enough, page by page: each try fails with nothing changed or succeeds entirely."""
    target = on_disk(env, small_disk)
    before = snapshot(target.site)
    outcomes, said = [], []
    for pages in range(40):
        filler = small_disk / "filler"
        filler.write_bytes(b"")
        with filler.open("wb") as f:
            room = os.statvfs(small_disk)
            f.write(b"x" * max(room.f_bavail * room.f_bsize - pages * 4096, 0))
        try:
            installed.apply(target, series=world.series)
        except EnvironmentFault as fault:
            outcomes.append("full")
            said.append(str(fault))
            assert snapshot(target.site) == before
        else:
            outcomes.append("done")
            # a revert must work without any free space: top the disk up first
            room = os.statvfs(small_disk)
            with filler.open("ab") as f:
                f.write(b"x" * (max(room.f_bavail - 1, 0) * room.f_bsize))
            assert check(target, world.series).prefix == world.series.length
            installed.revert(target, series=world.series)
            assert snapshot(target.site) == before
        filler.unlink()
    assert set(outcomes) == {"full", "done"}
    assert all("No space left" in line and "nothing was changed" in line for line in said)


def test_error_in_the_middle_of_writing_is_undone(
    world: World, env: InstalledTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails while files are being replaced: the pin is put back."""
    before, calls, real = snapshot(env.site), [], os.replace

    def failing(source: Path, dest: Path) -> None:
        if PACKAGE in Path(dest).parts:
            calls.append(dest)
            if len(calls) == 3:
                raise OSError(5, "Input/output error", str(dest))
        real(source, dest)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(EnvironmentFault, match="Input/output error; nothing was changed"):
        installed.apply(env, series=world.series)
    assert snapshot(env.site) == before


# --- killed ------------------------------------------------------------------------------------------------------

APPLY = """
import sys
from pathlib import Path
from q4kit.series import installed, manifest
from q4kit.series.targets import InstalledTarget
series = manifest.load(Path(sys.argv[1]))
target = InstalledTarget(sys.executable, sys.argv[3], sys.argv[4], Path(sys.argv[2]))
operation = getattr(installed, sys.argv[5])
print("ready", flush=True)
operation(target, series=series)
print("done", flush=True)
"""


def start(env: InstalledTarget, series: Series, operation: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", APPLY, series.folder, env.site, env.package, env.version, operation]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[InstalledTarget, Series]:
    """A package of 60 files, all touched by a series of 6 patches, so that there are many moments to be killed at."""
    root = tmp_path_factory.mktemp("big")
    files = {f"{PACKAGE}/__init__.py": ""}
    files |= {f"{PACKAGE}/m{i:03d}.py": f"# {i}\n" + "x = 1\n" * 400 for i in range(60)}
    pin = root / "base"
    write_files(pin / "python", files)
    commit_id = base.commit_base(pin, PACKAGE, VERSION)
    tree = git.out(["rev-parse", "HEAD^{tree}"], pin)
    folder = root / "repo" / "upstream" / "series-q4head"
    folder.mkdir(parents=True)
    (folder / manifest.MANIFEST).write_text(
        f'schema = 1\n[base]\nurl = "u"\ntag = "t"\npackage = "{PACKAGE}"\nversion = "{VERSION}"\n'
        f'commit = "{commit_id}"\ntree = "{tree}"\n[base.wheels]\n[base.files]\n'
    )
    work = root / "work"
    git.run(["clone", "-q", "--no-local", pin, work], root)
    git.run(["update-ref", base.BASE_REF, "HEAD"], work)
    for n in range(6):
        for i in range(n * 10, n * 10 + 10):
            edit(work / "python" / PACKAGE / f"m{i:03d}.py", f"# {i}\n", f"# {i} patched\n")
        (work / "python" / PACKAGE / f"new{n}").mkdir()
        (work / "python" / PACKAGE / f"new{n}" / "__init__.py").write_text(f"N = {n}\n")
        commit(work, message(f"feat(m): step {n}"), n)
    export.export(work, series=manifest.load(folder), against=pin)
    target = install(root / "env", make_wheel(root / "dist", files))
    return target, manifest.load(folder)


def test_killed_at_random_moments(big: tuple[InstalledTarget, Series]) -> None:
    """kill -9 at 20 moments of an apply and 10 of a revert or more, over the whole run and over its writing phase."""
    env, series = big
    before = snapshot(env.site)
    rng = random.Random(20261129)
    seen: dict[str, int] = {}

    def duration(operation: str) -> float:
        process = start(env, series, operation)
        began = time.monotonic()
        assert process.wait(60) == 0
        return time.monotonic() - began

    lengths = {op: duration(op) for op in ("apply", "revert")}
    caught = ("apply: drifted", "revert: drifted")
    for trial in range(150):
        if trial >= 30 and all(seen.get(name, 0) >= 3 for name in caught):
            break  # 30 kills at least, and more where a fast machine is rarely caught in the act
        op = "revert" if trial % 3 == 2 else "apply"
        if op == "revert":
            installed.apply(env, series=series)
        process = start(env, series, op)
        if trial % 4 < 2:  # anywhere in the run
            time.sleep(rng.uniform(0, lengths[op]))
        else:  # in the phase that changes the package, which is short
            end = time.monotonic() + 30
            while not journal.journal_path(env).exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.0002)
            time.sleep(rng.uniform(0, lengths["revert"] / 2))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = check(env, series)
        if found.state == "drifted":
            assert "interrupted" in found.reason
            assert found.interrupted
        else:
            assert (found.state, found.prefix) in [("clean", 0), ("applied", series.length)]
        seen[f"{op}: {found.state}"] = seen.get(f"{op}: {found.state}", 0) + 1
        if trial % 3 == 0:  # apply mends as well as revert does
            installed.apply(env, series=series)
            assert check(env, series).prefix == series.length
        installed.revert(env, series=series)
        assert snapshot(env.site) == before, (trial, found)
    print("states after kill -9:", seen)
    assert all(seen.get(name, 0) >= 3 for name in caught), seen


def test_interrupted_apply_names_each_file(
    big: tuple[InstalledTarget, Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, series = big
    calls, real = [], os.replace

    def dying(source: Path, dest: Path) -> None:
        if PACKAGE in Path(dest).parts and STATE_DIR not in Path(dest).parts:
            calls.append(dest)
            if len(calls) == 11:
                raise KeyboardInterrupt  # like a kill: nothing may tidy up
        real(source, dest)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        installed.apply(env, series=series)
    monkeypatch.undo()
    found = check(env, series)
    assert sum(line.endswith(": written") for line in found.interrupted) == 10
    assert sum(line.endswith(": not yet written") for line in found.interrupted) == 56
    installed.revert(env, series=series)
    assert check(env, series).state == "clean"


def test_two_applies_at_once(big: tuple[InstalledTarget, Series]) -> None:
    env, series = big
    both = [start(env, series, "apply") for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    assert check(env, series).prefix == series.length
    installed.revert(env, series=series)


def test_a_held_lock_is_an_error_in_the_end(world: World, env: InstalledTarget) -> None:
    with journal.lock(env), pytest.raises(EnvironmentFault, match="another apply or revert"), journal.lock(env, 0.2):
        pass
