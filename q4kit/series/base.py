"""The pinned base as a git work tree, and runnable trees at any prefix of the series."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from q4kit.errors import EnvironmentFault, Q4Error, UsageError
from q4kit.series import git, manifest, wheel
from q4kit.series.blobs import Entry
from q4kit.series.manifest import Base, Series
from q4kit.series.wheel import Progress, silent

PREFIX = "python"
"""Folder that holds the package in SGLang's repository, hence in every path of the series."""

BASE_REF = "refs/q4head/base"
"""Ref of the pinned commit in trees that `fetch` made."""

_DATE = "2026-10-30T00:00:00+0000"
_EXCLUDE = "# built for one Python ABI, so outside the tree whose id everybody shares\n*.so\n__pycache__/\n"


def commit_base(repo: Path, base_package: str, version: str) -> str:
    """Commit everything in a fresh folder and return the commit id, the same for everybody and every Python ABI."""
    git.run(["init", "-q", "--object-format=sha1", "--template=", "-b", "base"], repo)
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "exclude").write_text(_EXCLUDE)
    git.run(["add", "-A"], repo)
    who = {"GIT_AUTHOR_NAME": git.MAINTAINER, "GIT_AUTHOR_EMAIL": git.MAINTAINER_EMAIL}
    when = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE}
    git.run(["commit", "-q", "-m", f"{base_package} {version}"], repo, env=who | when)
    git.run(["update-ref", BASE_REF, "HEAD"], repo)
    return git.out(["rev-parse", "HEAD"], repo)


def fetch(
    series: Series,
    dest: Path,
    *,
    cache: Path | None = None,
    python: str | Path = sys.executable,
    source: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Return ``dest``, a git work tree of the pin with ``python/sglang/...``, ready for ``git am``.

    From the pinned wheel, or from ``source``: a clone at the tag (a shallow one will do), or the package's own folder
    as installed from a wheel for ``python``, without patches. The compiled extensions of ``python`` lie in the tree but
    not in git. Raises when the result is not the pin; ``dest`` is then not created.
    """
    dest = Path(os.path.abspath(dest))
    if dest.exists() and any(dest.iterdir()):
        _check_existing(series, dest)
        return dest
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=dest.parent) as tmp:
        work = Path(tmp) / "tree"
        work.mkdir()
        if source is None:
            _from_wheel(series.base, work, cache or wheel.cache_dir(), python, progress)
        elif (source / "__init__.py").is_file():
            _from_package(series.base, work, source, progress)
        else:
            _from_clone(series.base, work, source, progress)
        if dest.exists():
            dest.rmdir()
        work.rename(dest)
    return dest


def _from_wheel(base: Base, work: Path, cache: Path, python: str | Path, progress: Progress) -> None:
    path = wheel.fetch_pinned(base, wheel.python_tag(python), cache, progress)
    progress(f"unpacking {path.name}")
    wheel.extract(path, base.package, work / PREFIX)
    commit = commit_base(work, base.package, base.version)
    tree = git.out(["rev-parse", "HEAD^{tree}"], work)
    if tree != base.tree or commit != base.commit:
        raise EnvironmentFault(
            f"the unpacked wheel gives commit {commit}, tree {tree}, expected {base.commit}, {base.tree}",
            remedy="the wheel has its recorded sha256: if the pin was just changed, record these two ids in [base]",
        )


def _from_package(base: Base, work: Path, source: Path, progress: Progress) -> None:
    progress(f"copying the package at {source}")
    shutil.copytree(source, work / PREFIX / base.package, ignore=shutil.ignore_patterns("__pycache__"))
    commit = commit_base(work, base.package, base.version)
    if commit != base.commit:
        mismatch = wrong_base(base, git.entries(work, commit, sorted(base.files)))
        raise UsageError(
            f"{source}: {mismatch or f'gives commit {commit}, expected {base.commit}'}",
            remedy=f"name the folder of {base.package} {base.version} as its wheel holds it: unpatched, nothing added",
        )


def _from_clone(base: Base, work: Path, source: Path, progress: Progress) -> None:
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder", remedy="name a clone of SGLang at the tag")
    rev = "HEAD"
    if git.run(["rev-parse", "-q", "--verify", f"{base.tag}^{{commit}}"], source, check=False).returncode == 0:
        rev = base.tag
    commit = git.out(["rev-parse", f"{rev}^{{commit}}"], source)
    mismatch = wrong_base(base, git.entries(source, commit, sorted(base.files)))
    if mismatch:
        raise UsageError(f"{source} ({rev}): {mismatch}", remedy=f"check out {base.tag} there, or fetch the wheel")
    progress(f"copying {commit[:12]} ({rev}) from {source}")
    git.run(["init", "-q", "--template=", "-b", "base"], work)
    (work / ".git" / "info").mkdir(exist_ok=True)
    (work / ".git" / "info" / "exclude").write_text(_EXCLUDE)
    git.run(["fetch", "-q", "--depth=1", "--no-tags", source.resolve().as_uri(), commit], work)
    git.run(["reset", "-q", "--hard", "FETCH_HEAD"], work)
    git.run(["update-ref", BASE_REF, "HEAD"], work)


def wrong_base(base: Base, found: dict[str, tuple[str, str]]) -> str:
    """Return what is wrong with a candidate base (file, blob found, blob expected), or an empty string.

    Modes are not compared: a wheel and the repository it was built from may differ in them.
    """
    for path, expected in base.files.items():
        entry = found.get(path)
        if expected is None and entry is not None:
            return f"{path}: blob {entry[1]}, expected no such file"
        if expected is not None and (entry is None or entry[1] != expected.blob):
            what = f"blob {entry[1]}" if entry else "no such file"
            return f"{path}: {what}, expected blob {expected.blob} of {base.tag}"
    return ""


def _check_existing(series: Series, dest: Path) -> None:
    done = git.run(["rev-parse", "-q", "--verify", f"{BASE_REF}^{{commit}}"], dest, check=False)
    if done.returncode != 0:
        raise UsageError(f"{dest}: not empty and not made by fetch", remedy="name a new folder")
    if done.stdout.decode().strip() == series.base.commit:
        return  # also while the files of a new pin are not recorded yet
    mismatch = wrong_base(series.base, git.entries(dest, BASE_REF, series.touched))
    if mismatch:
        raise UsageError(f"{dest}: fetched for another pin: {mismatch}", remedy="remove the folder and fetch again")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cached_base(
    series: Series,
    cache: Path | None = None,
    *,
    python: str | Path = sys.executable,
    progress: Progress = silent,
) -> Path:
    """Return the cached work tree of the pin for an interpreter's ABI, fetched on first use. Do not change it."""
    cache = cache or wheel.cache_dir()
    tag = wheel.python_tag(python)
    with _locked(cache / f"base-{tag}.lock"):
        return fetch(series, cache / f"base-{series.base.version}-{tag}", cache=cache, python=python, progress=progress)


def tree_at(
    k: int,
    cache_dir: Path | None = None,
    *,
    series: Series | None = None,
    python: str | Path = sys.executable,
    dest: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Return a work tree at prefix ``k`` with the compiled extensions: ``PYTHONPATH=<tree>/python`` runs it.

    Made once and kept in the cache under the id of its content (or made at ``dest``); a kept tree that was changed
    since is made again. Several callers may ask at once.
    """
    from q4kit.series import worktree  # it needs this module

    series = series or manifest.load()
    k = series.check_prefix(k)
    cache = cache_dir or wheel.cache_dir()
    repo = cached_base(series, cache, python=python, progress=progress)
    tag = wheel.python_tag(python)
    tree = series.entries[k - 1].tree_after if k else series.base.tree
    path = Path(os.path.abspath(dest)) if dest else cache / f"tree-{tag}-{k:04d}-{tree[:12]}"
    with _locked(cache / f"base-{tag}.lock"):
        if path.exists() and not (dest and not any(path.iterdir())):
            if _intact(series, repo, path, k):
                return path
            if dest:
                raise UsageError(f"{path}: exists and is not prefix {k}", remedy="remove it or name another folder")
            progress(f"{path.name}: changed since it was made, making it again")
            shutil.rmtree(path)
        git.run(["worktree", "prune"], repo)
        progress(f"making a tree at prefix {k} of {series.length}")
        git.run(["worktree", "add", "-q", "-f", "--detach", path, BASE_REF], repo)
        try:
            add_extensions(repo, path)
            worktree.apply(path, series=series, to=k)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            git.run(["worktree", "prune"], repo, check=False)
            raise
    return path


def _intact(series: Series, repo: Path, path: Path, k: int) -> bool:
    """Return whether a kept tree is still prefix ``k``, unchanged, and belongs to ``repo`` (not to a moved copy)."""
    from q4kit.series import state

    try:
        common = git.out(["rev-parse", "--path-format=absolute", "--git-common-dir"], path)
        found = state.status(path, series=series)
        changed = git.out(["status", "--porcelain", "--untracked-files=no"], path)
    except Q4Error:
        return False
    return Path(common).resolve() == (repo / ".git").resolve() and found.prefix == k and not changed


def add_extensions(source: Path, dest: Path) -> None:
    """Link (or copy) the compiled extensions of one tree into another."""
    for built in sorted((source / PREFIX).rglob("*.so")):
        target = dest / built.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            continue
        try:
            os.link(built, target)
        except OSError:
            shutil.copy2(built, target)


def entry_map(found: dict[str, tuple[str, str]]) -> dict[str, Entry]:
    """Return ``git.entries`` output as entries."""
    return {path: Entry(mode, blob) for path, (mode, blob) in found.items()}


def run_environment(tree: Path, package_path: str = "") -> dict[str, str]:
    """Return the environment that runs a tree's code on a machine without a GPU; ``package_path`` goes behind it.

    Compiled files are written even if the caller's environment says otherwise: importing SGLang without them takes
    three times as long, and they stay inside the tree.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tree / PREFIX), package_path])),
        "SGLANG_PLATFORM": "cpu_ref",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
