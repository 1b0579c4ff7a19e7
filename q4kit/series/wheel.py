"""Released wheels: downloaded by pip, checked by sha256, cached, and read without being installed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series.manifest import REPO_ROOT, Base

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Progress sink for callers that do not report."""


def cache_dir() -> Path:
    """Return the cache folder for fetched trees and wheels: ``$Q4_CACHE``, else ``.cache/series`` of the repository."""
    return Path(os.environ.get("Q4_CACHE") or REPO_ROOT / ".cache" / "series").resolve()


def python_tag(python: str | Path = sys.executable) -> str:
    """Return the CPython tag (``cp311``) of an interpreter."""
    if str(python) == sys.executable:
        return f"cp{sys.version_info.major}{sys.version_info.minor}"
    code = "import sys; print('cp%d%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise UsageError(f"{python}: not a usable Python interpreter: {exc}") from None
    return done.stdout.strip()


def fetch_pinned(base: Base, tag: str, cache: Path, progress: Progress = silent) -> Path:
    """Return the pinned wheel for a Python tag, downloaded once; raises when its sha256 is not the recorded one."""
    expected = base.wheels.get(tag)
    if expected is None:
        raise UsageError(
            f"{base.package} {base.version} has no recorded wheel for {tag}, expected one of {sorted(base.wheels)}",
            remedy="use --python with one of these interpreters",
        )
    folder = cache / "wheels" / base.version / tag
    for path in sorted(folder.glob("*.whl")):
        if sha256(path) == expected:
            return path
        progress(f"{path.name}: not the recorded wheel, downloading it again")
        path.unlink()
    path = download(base.package, base.version, tag, folder, progress)
    found = sha256(path)
    if found != expected:
        path.unlink()
        raise EnvironmentFault(
            f"{path.name}: sha256 {found}, expected {expected}",
            remedy="the download was damaged or the index serves another file: try again, then check the index",
        )
    return path


def download(package: str, version: str, tag: str, folder: Path, progress: Progress = silent) -> Path:
    """Return the path of a wheel fetched by pip into ``folder``; nothing is installed or resolved."""
    folder.mkdir(parents=True, exist_ok=True)
    progress(f"pip download {package}=={version} for {tag}")
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download"),
        *("--no-deps", "--only-binary=:all:", "--dest", str(folder), "--quiet"),
        *("--implementation", "cp", "--python-version", tag.removeprefix("cp"), "--abi", tag),
        *("--platform", "manylinux_2_34_x86_64", "--platform", "manylinux2014_x86_64", "--platform", "any"),
        *("--abi", "none", "--abi", "abi3"),
        f"{package}=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob(f"{package}-*.whl"))
    if done.returncode != 0 or not wheels:
        raise EnvironmentFault(
            f"pip could not download {package}=={version} for {tag}: {done.stderr.strip()[-400:]}",
            remedy="check the network and the name of the version (`pip index versions sglang`)",
        )
    return wheels[-1]


def newest(package: str) -> str:
    """Return the newest released version that pip sees."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"^Available versions: ([^,\s]+)", done.stdout, re.MULTILINE)
    if match is None:
        raise EnvironmentFault(f"pip index versions {package} gave no version: {done.stderr.strip()[-300:]}")
    return match[1]


def sha256(path: Path) -> str:
    """Return the sha256 of a file as hex digits."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def extract(wheel: Path, package: str, into: Path, keep: Callable[[str], bool] = lambda _: True) -> list[Path]:
    """Unpack ``package/`` of a wheel below ``into`` with its executable bits; returns the files written.

    ``keep`` selects by the name inside the wheel.
    """
    written: list[Path] = []
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            if info.is_dir() or not name.startswith(f"{package}/") or not keep(name):
                continue
            if ".." in Path(name).parts:
                raise EnvironmentFault(f"{wheel.name}: unsafe path {name!r}")
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(info))
            target.chmod(0o755 if (info.external_attr >> 16) & 0o100 else 0o644)
            written.append(target)
    return written
