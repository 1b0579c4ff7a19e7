"""What a series can be applied to: a git work tree, or the package installed in an environment."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import git
from q4kit.series.base import PREFIX
from q4kit.series.blobs import Entry, blob_id

STATE_DIR = ".q4head_series"
"""Folder beside the installed package that keeps pre-images, journal and state."""


@dataclass(frozen=True)
class WorkTree:
    """The root of a git work tree with ``python/<package>``."""

    root: Path

    def file(self, path: str) -> Path:
        return self.root / path

    def describe(self) -> str:
        return str(self.root)


@dataclass(frozen=True)
class InstalledTarget:
    """A package in an environment's site-packages."""

    python: str
    package: str
    version: str
    site: Path
    """The folder that holds the package (``site-packages``)."""

    def file(self, path: str) -> Path:
        return self.site / path.removeprefix(f"{PREFIX}/")

    @property
    def state_dir(self) -> Path:
        return self.site / STATE_DIR

    def describe(self) -> str:
        return f"{self.package} {self.version} in {self.site}"


Target = WorkTree | InstalledTarget


def work_tree(path: Path | str, package: str = "sglang") -> WorkTree:
    """Return the work tree rooted at ``path``; raises UsageError when it is not the root of one.

    ``package`` tells a folder inside a tree of the pin, whose root is meant, from one inside any other repository.
    """
    root = Path(os.path.abspath(path))
    make = f"`{shlex.join(['tools/series.py', 'fetch', str(root)])}` makes a tree of the pin there"
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: not a folder", remedy="name the root of a git work tree, or use --installed")
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder", remedy=f"{make}; or use --installed")
    elsewhere = "`tools/series.py fetch TREE` makes a tree of the pin in a new folder; or use --installed"
    done = git.run(["rev-parse", "--show-toplevel"], root, check=False)
    top = done.stdout.decode().strip()
    if done.returncode != 0:
        raise UsageError(f"{root}: not a git work tree", remedy=elsewhere)
    if Path(top).resolve() != root.resolve():
        ours = (Path(top) / PREFIX / package).is_dir()
        raise UsageError(
            f"{root}: lies inside the work tree {top}" + ("" if ours else f", which has no {PREFIX}/{package}"),
            remedy=f"name {top}, or use --installed" if ours else elsewhere,
        )
    return WorkTree(root)


# Runs in the target's interpreter, which may be any version and need not have q4kit. find_spec of a top-level name
# locates a package without importing it.
_PROBE = """
import importlib.metadata, importlib.util, json, os, site, sys
name = sys.argv[1]
out = {"prefix": sys.prefix, "executable": sys.executable, "pythonpath": os.environ.get("PYTHONPATH", "")}
out["user_site"] = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
spec = importlib.util.find_spec(name)
out["origin"] = list(spec.submodule_search_locations or [])[:1] if spec else []
seen = []
for dist in importlib.metadata.distributions(name=name):
    direct = json.loads(dist.read_text("direct_url.json") or "{}")
    seen.append({
        "version": dist.version,
        "site": str(dist.locate_file("")),
        "editable": bool(direct.get("dir_info", {}).get("editable")),
    })
out["dists"] = seen
print(json.dumps(out))
"""


def installed_target(python: str | Path | None = None, package: str = "sglang") -> InstalledTarget:
    """Return the installed package that ``python`` would import, found without importing it.

    Raises EnvironmentFault when it is missing, editable, shadowed (PYTHONPATH, a second copy) or belongs to another
    environment: patching any of these would change something else than what runs.
    """
    python = str(python or sys.executable)
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE, package], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UsageError(f"{python}: not a usable Python interpreter: {exc}") from None
    if done.returncode != 0:
        raise EnvironmentFault(f"{python} could not be asked for {package}: {done.stderr.strip()[-400:]}")
    found = json.loads(done.stdout)
    if not found["dists"]:
        raise EnvironmentFault(
            f"{package} is not installed for {python}",
            remedy="name the environment's interpreter with --python",
        )
    dist = found["dists"][0]
    site = Path(dist["site"])
    if dist["editable"]:
        raise EnvironmentFault(
            f"{package} is an editable install: its files are a checkout, not site-packages",
            remedy="apply the series to that checkout instead: tools/series.py apply CHECKOUT",
        )
    origin = Path(found["origin"][0]) if found["origin"] else None
    if origin is None or origin.resolve() != (site / package).resolve():
        hint = f" (PYTHONPATH={found['pythonpath']})" if found["pythonpath"] else ""
        raise EnvironmentFault(
            f"{python} imports {package} from {origin}, but the installed one is {site / package}{hint}",
            remedy="unset PYTHONPATH or remove the other copy, so that what is patched is what runs",
        )
    if (site / package).is_symlink():
        raise EnvironmentFault(
            f"{site / package} is a link to {(site / package).resolve()}: other environments may share it",
            remedy="reinstall with copies, e.g. `uv pip install --link-mode copy`",
        )
    home = [Path(p).resolve() for p in (found["prefix"], found["user_site"]) if p]
    if not any(site.resolve().is_relative_to(p) for p in home):
        raise EnvironmentFault(
            f"{package} of {python} lies in {site}, outside that environment ({found['prefix']})",
            remedy="it belongs to another environment: pass that one's interpreter with --python",
        )
    return InstalledTarget(found["executable"], package, dist["version"], site.resolve())


def read_entry(path: Path) -> Entry | None:
    """Return mode and blob id of a file as it lies on disk, None when absent; raises for links and special files."""
    try:
        info = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
    except (FileNotFoundError, NotADirectoryError):  # or replaced just now, by a git that runs
        return None
    if not stat.S_ISREG(info.st_mode):
        raise EnvironmentFault(
            f"{path}: not a plain file (a link or a special file)",
            remedy="reinstall with copies, e.g. `uv pip install --link-mode copy`",
        )
    return Entry("100755" if info.st_mode & 0o100 else "100644", blob_id(data))


def read_entries(target: Target, paths: list[str]) -> dict[str, Entry]:
    """Return the entries of those ``paths`` that exist in the target."""
    found = {path: read_entry(target.file(path)) for path in paths}
    return {path: entry for path, entry in found.items() if entry is not None}


def drop_bytecode(source: Path) -> None:
    """Remove the compiled forms of a source file: their time and size stamps could match the new content by chance."""
    for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
