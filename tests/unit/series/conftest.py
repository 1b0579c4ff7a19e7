"""Fixtures: a world made once, copied for tests that change it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from series_world import SERIES, World, install, make_wheel, make_world, source_files

from q4kit.series import manifest
from q4kit.series.targets import InstalledTarget


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world that nobody changes."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A world of one's own: copies of the series and the work tree."""
    for name in ("base", "work", "repo", "cache/wheels"):
        shutil.copytree(made.root / name, tmp_path / name)
    return World(tmp_path, tmp_path / "base", tmp_path / "work", manifest.load(tmp_path / SERIES))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> InstalledTarget:
    """An environment with the package as pip installs it, which nobody changes."""
    root = tmp_path_factory.mktemp("pristine")
    return install(root / "env", make_wheel(root / "dist", source_files()))


@pytest.fixture
def env(pristine: InstalledTarget, tmp_path: Path) -> InstalledTarget:
    """An environment of one's own with the package installed."""
    source = Path(pristine.python).parents[1]
    dest = tmp_path / "env"
    shutil.copytree(source, dest, symlinks=True)
    site = dest / pristine.site.relative_to(source.resolve())
    return InstalledTarget(str(dest / "bin" / "python"), pristine.package, pristine.version, site.resolve())
