"""A package's version is found where nothing is installed: a source folder on PYTHONPATH."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from q4kit.versions import source_version, version_of

ROOT = Path(__file__).parents[3]
NOT_INSTALLED = """
import importlib.metadata as metadata
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = missing
"""


def stated() -> str:
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return version


def test_the_version_of_an_installed_package() -> None:
    assert version_of("numpy") == __import__("numpy").__version__
    assert version_of("no_such_package_anywhere") == "unknown"


@pytest.mark.parametrize("code", ["from q4kit.versions import version_of; print(version_of('q4kit'))",
                                  "from q4kit.provenance import collect\n"
                                  "print(collect(None, tool='x')['tool']['version'])"])  # fmt: skip
def test_the_tools_tell_their_version_without_an_installation(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOT_INSTALLED + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == stated(), done.stderr


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (
            {"../pyproject.toml": '[project]\nname = "thing"\nversion = "1.2"\n', "_version.py": "version = '9'\n"},
            "1.2",
        ),
        ({"../pyproject.toml": '[project]\nname = "other"\nversion = "1.2"\n'}, None),
        ({"../pyproject.toml": "[project\n"}, None),
        ({"_version.py": "version: str\n__version__ = version = '0.5.23'\n"}, "0.5.23"),
        ({"version.py": 'import x\n__version__ = x.get("y")\n'}, None),
        ({"version.py": '__version__ = "2.0"\n'}, "2.0"),
        ({}, None),
    ],
)
def test_a_source_tree_states_its_version(tmp_path: Path, files: dict[str, str], version: str | None) -> None:
    package = tmp_path / "thing"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    assert source_version(package) == version
