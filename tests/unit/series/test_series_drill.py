"""The kill drill itself, on a small package: what it reports when mending works, and when it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from series_world import World
from test_series_installed import APPLY

from q4kit.errors import UsageError
from q4kit.series import drill, installed
from q4kit.series.targets import InstalledTarget

TOOL = Path(__file__).resolve().parents[3] / "tools" / "kill_drill.py"


def command(env: InstalledTarget, world: World) -> list[str]:
    words = [sys.executable, "-c", APPLY, world.series.folder, env.site, env.package, env.version, "apply"]
    return [str(word) for word in words]


@pytest.fixture
def python(env: InstalledTarget, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the interpreter of the small environment, which has no SGLang to be found by name."""
    monkeypatch.setattr(drill.targets, "installed_target", lambda python, package: env)
    return env.python


def test_every_kill_is_named_and_mended(world: World, env: InstalledTarget, python: str) -> None:
    result = drill.run(python, world.series, command=command(env, world), count=8, seed=3)
    assert result.holds
    assert len(result.trials) == 8
    assert sum(result.states().values()) == 8
    assert {t.mended_by for t in result.trials} == {"revert", "apply, revert"}
    assert result.to_json()["holds"] is True


def test_a_tree_that_is_not_restored_is_reported(
    world: World, env: InstalledTarget, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = installed.revert, []

    def forgetful(target: InstalledTarget, **kwargs: object) -> object:
        change = real(target, **kwargs)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 4:
            (target.site / target.package / "left_behind.py").write_text("")
        return change

    monkeypatch.setattr(drill.installed, "revert", forgetful)
    result = drill.run(python, world.series, command=command(env, world), count=2, seed=3)
    assert [t.restored for t in result.trials] == [True, False]
    assert not result.holds


def test_the_copy_has_the_same_bytes(env: InstalledTarget, tmp_path) -> None:
    python = drill.copy_environment(env, tmp_path / "checkout")
    copied = drill.targets.installed_target(python, env.package)
    assert drill.snapshot(copied) == drill.snapshot(env)
    assert (tmp_path / "checkout" / ".git").is_dir()


@pytest.mark.parametrize("count", [0, -1])
def test_a_drill_without_a_kill_is_refused(world: World, env: InstalledTarget, python: str, count: int) -> None:
    before = drill.snapshot(env)
    with pytest.raises(UsageError, match=f"--count {count}: expected 1 kill or more") as caught:
        drill.run(python, world.series, command=command(env, world), count=count, seed=3)
    assert caught.value.remedy
    assert drill.snapshot(env) == before
    done = subprocess.run([sys.executable, TOOL, f"--count={count}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--count {count}" in done.stderr


def test_no_kill_shows_nothing() -> None:
    assert not drill.Drill("sglang", "1", 1, 1, 1.0, 0).holds
