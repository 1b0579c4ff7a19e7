"""scripts/demo.sh removes results of its own only. The script is real; the setup that it runs first is a stand-in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SETUP = "#!/bin/sh\nexit 77\n"
"""Ends the demo where it would begin: exit code 77 says that the folder was accepted."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout that holds the demo and nothing it could run."""
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("demo.sh", "lib.sh"):
        shutil.copy(SCRIPTS / name, scripts / name)
    (scripts / "setup.sh").write_text(SETUP)
    (scripts / "setup.sh").chmod(0o755)
    return scripts.parent


def demo(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [checkout / "scripts" / "demo.sh", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)


def fill(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("x")
    return folder


@pytest.mark.parametrize(
    "files",
    [
        ("results/mine.json", "README.md"),
        ("results/mine.json",),
        ("faulty/mine",),
        ("results/series.json", "notes.txt"),
        (".hidden",),
    ],
)
def test_a_folder_of_somebody_else_is_refused_and_left_alone(checkout: Path, files: tuple[str, ...]) -> None:
    folder = fill(checkout / "work", *files)
    done = demo(checkout, "work")
    assert done.returncode == 2
    assert "error: work holds files that the demo did not make" in done.stderr
    assert "remedy: " in done.stderr
    assert all((folder / file).read_text() == "x" for file in files)


def test_the_checkout_itself_is_refused(checkout: Path) -> None:
    fill(checkout, "results/figure.json")
    assert demo(checkout, ".").returncode == 2
    assert (checkout / "results" / "figure.json").exists()


def test_a_file_is_refused(checkout: Path) -> None:
    fill(checkout, "file")
    assert demo(checkout, "file").returncode == 2


@pytest.mark.parametrize(
    "files",
    [
        (),
        (".q4-demo", "results/series.json", "notes.txt"),
        ("model/config.json", "results/series.json", "faulty/config.json", "report.md"),
        ("model/config.json",),
    ],
)
def test_a_folder_of_the_demo_is_used_again(checkout: Path, files: tuple[str, ...]) -> None:
    (checkout / "work").mkdir()
    fill(checkout / "work", *files)
    assert demo(checkout, "work").returncode == 77


def test_the_default_folder_of_an_earlier_version_is_used_again(checkout: Path) -> None:
    fill(checkout / ".cache" / "demo", "results/half", "other")
    assert demo(checkout).returncode == 77
    assert demo(checkout, ".cache/demo").returncode == 77


def test_a_new_folder_is_used(checkout: Path) -> None:
    assert demo(checkout, "new").returncode == 77
