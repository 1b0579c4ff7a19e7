"""Versions of packages that are used from a source folder on PYTHONPATH as often as from an installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

UNKNOWN = "unknown"
_ASSIGNED = re.compile(r"^\s*(?:__version__|version)\b[^'\"\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)


def version_of(package: str) -> str:
    """Return the version of an installed package, else that of the source tree it is found in, else "unknown".

    A source tree tells it in the pyproject.toml next to the package's folder, or in the package's own
    `_version.py` or `version.py`. The package is located, not imported.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = source_version(Path(folder))
        if found is not None:
            return found
    return UNKNOWN


def source_version(folder: Path) -> str | None:
    """Return the version that the source tree of a package's `folder` states, None where it states none."""
    pyproject = folder.parent / "pyproject.toml"
    if pyproject.is_file():
        try:
            project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            project = {}
        if project.get("name") == folder.name and isinstance(project.get("version"), str):
            return str(project["version"])
    for name in ("_version.py", "version.py"):
        if (folder / name).is_file() and (match := _ASSIGNED.search((folder / name).read_text(encoding="utf-8"))):
            return match[1]
    return None
