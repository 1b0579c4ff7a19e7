"""Which SGLang a folder holds, told from its files alone: no git, no installation, nothing imported.

A package may be a git work tree, site-packages, or a plain copy put on PYTHONPATH on another machine. What it
contains of the series is found by comparing its files with every recorded prefix.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from q4kit.series.base import PREFIX
from q4kit.series.blobs import Entry, blob_id, tree_id
from q4kit.series.journal import series_id
from q4kit.series.manifest import Series
from q4kit.versions import source_version

_NAMED = 5
"""Files that a reason names before it counts the rest."""


def package_file(package: Path, path: str) -> Path:
    """Return the place of a path of the series (``python/<package>/...``) in a package's folder."""
    return package.joinpath(*Path(path).parts[len(Path(PREFIX).parts) + 1 :])


def identify(package: Path, series: Series) -> dict[str, Any]:
    """Return what a package's folder contains of the series; links are followed.

    Keys: `state` ("clean", "applied" or "other"), `patches` (number applied; None unless the touched files are exactly
    those of a prefix), `length` and `id` of the series, `tree` (git tree id of the touched files as found), `version`
    (None where the folder states none) and `reason` (why `patches` is None, with the nearest prefix; else empty).
    """
    found = {path: entry for path in series.touched if (entry := _entry(package_file(package, path)))}
    version = source_version(package)
    distance = [_differing(found, files) for files in series.prefixes]
    nearest = min(range(len(distance)), key=lambda k: len(distance[k]))
    reason = ""
    if distance[nearest]:
        names = [path.removeprefix(f"{PREFIX}/") for path in distance[nearest][:_NAMED]]
        more = len(distance[nearest]) - len(names)
        reason = f"nearest is prefix {nearest}, but for {', '.join(names)}{f' and {more} more' if more else ''}"
    elif version not in (None, series.base.version):
        reason = f"version {version}, expected {series.base.version}"
    return {
        "state": "other" if reason else "applied" if nearest else "clean",
        "patches": None if reason else nearest,
        "length": series.length,
        "id": series_id(series),
        "tree": tree_id(found),
        "version": version,
        "reason": reason,
    }


def _differing(found: Mapping[str, Entry], expected: Mapping[str, Entry]) -> list[str]:
    """Return the paths whose contents differ; modes are left out, as installers and copies set them differently."""

    def blob(files: Mapping[str, Entry], path: str) -> str | None:
        return files[path].blob if path in files else None

    return sorted(path for path in {**found, **expected} if blob(found, path) != blob(expected, path))


def _entry(path: Path) -> Entry | None:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return None
        return Entry("100755" if mode & 0o100 else "100644", blob_id(path.read_bytes()))
    except OSError:
        return None


def newest(package: Path, series: Series) -> tuple[float, str]:
    """Return the latest modification (seconds since 1970) among the touched files, and which file; (0, "") for none."""
    times = [(0.0, "")]
    for path in series.touched:
        try:
            times.append((package_file(package, path).stat().st_mtime, path.removeprefix(f"{PREFIX}/")))
        except OSError:
            continue
    return max(times)


def python_hash(package: Path) -> tuple[str, int]:
    """Return a sha256 over the names and contents of all ``.py`` files below a folder, and their number."""
    files = [(name, path, path.stat()) for name, path in sorted(_files(package, ".py"))]
    return _hash(tuple((name, str(path), info.st_size, info.st_mtime_ns) for name, path, info in files)), len(files)


@functools.lru_cache(maxsize=8)
def _hash(files: tuple[tuple[str, str, int, int], ...]) -> str:
    """Return the hash of files that have not changed since they were last asked for: a floor asks at every run."""
    digest = hashlib.sha256()
    for name, path, _size, _mtime_ns in files:
        digest.update(f"{name}\0".encode() + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def folder_tree(folder: Path, suffixes: tuple[str, ...]) -> str:
    """Return git's id of the tree of the files with these suffixes below a folder.

    It is what ``git rev-parse COMMIT:FOLDER`` prints for the commit that they are of, if they are unchanged.
    """
    found = ((name, _entry(path)) for name, path in _files(folder, suffixes))
    return tree_id({name: entry for name, entry in found if entry})


def _files(folder: Path, suffixes: str | tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield name (with ``/``) and path of the files below a folder; linked folders are entered, once each."""
    seen: set[str] = set()
    for place, below, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if name != "__pycache__"]
        for name in files:
            if name.endswith(suffixes):
                path = Path(place, name)
                yield path.relative_to(folder).as_posix(), path
