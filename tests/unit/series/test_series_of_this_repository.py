"""The series of this repository, and the real package where the running interpreter has it installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from q4kit.errors import Q4Error
from q4kit.series import installed, manifest, state, verify
from q4kit.series.targets import STATE_DIR, InstalledTarget, installed_target


def test_the_folder_proves_itself_offline() -> None:
    for check in verify.offline(manifest.load()):
        assert check.problems == (), check.name


@pytest.fixture
def copy(tmp_path: Path) -> InstalledTarget:
    """The touched files of the installed package, with the state of the series if it is applied there."""
    series = manifest.load()
    try:
        real = installed_target(sys.executable, series.base.package)
    except Q4Error as exc:
        pytest.skip(f"the pinned package is not installed here: {exc}")
    if real.version != series.base.version:
        pytest.skip(f"{real.describe()} is not the pin")
    site = tmp_path / "site-packages"
    target = InstalledTarget(real.python, real.package, real.version, site)
    (site / real.package).mkdir(parents=True)
    for path in series.touched:
        if real.file(path).exists():
            target.file(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(real.file(path), target.file(path))
    if real.state_dir.exists():
        shutil.copytree(real.state_dir, site / STATE_DIR)
    return target


def test_every_prefix_on_the_installed_package(copy: InstalledTarget) -> None:
    """Revert to the pin, every prefix up, and back: contents as recorded at each step."""
    series = manifest.load()
    installed.revert(copy, series=series)
    assert state.status(copy, series=series).state == "clean"
    pin = {p: copy.file(p).read_bytes() for p in series.touched if copy.file(p).exists()}
    for k in range(1, series.length + 1):
        installed.apply(copy, series=series, to=k)
        found = state.status(copy, series=series)
        assert (found.state, found.prefix) == ("applied", k)
    installed.revert(copy, series=series)
    assert {p: copy.file(p).read_bytes() for p in series.touched if copy.file(p).exists()} == pin
    assert not copy.state_dir.exists()
