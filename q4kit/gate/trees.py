"""Trees of the gate's own, moved from prefix to prefix: no installed package is ever touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from q4kit.errors import EnvironmentFault, Q4Error, UsageError
from q4kit.gate.plan import Plant
from q4kit.series import Series, base, cached_base, git, worktree
from q4kit.series import status as series_status
from q4kit.series.base import BASE_REF, PREFIX
from q4kit.series.targets import drop_bytecode
from q4kit.series.wheel import Progress

_WARM_IMPORT = "import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.models.qwen4_exp"
_WARM_TIMEOUT_S = 300.0


def open_tree(
    folder: Path, series: Series, python: str, env: dict[str, str], progress: Progress, *, like: Path | None = None
) -> Path:
    """Return a work tree of the pin at `folder`, made on first use, and again when it was changed since.

    Its modules are imported once, untimed, so that the first prefix does not pay for compiling them. With `like`,
    another tree of `open_tree`, it shares that one's files, compiled ones too, as hard links: git and Python replace
    files and never write into them. What the series touches is copied: a tree that moves gives up its name of such a
    file, that changes the file's ctime in every tree, and git takes it for an edit there. A folder that is there and
    was not made here raises UsageError and is left alone.
    """
    if folder.exists() and not _marker(folder).exists():
        raise UsageError(
            f"{folder}: it is there, and was not made by this tool, which moves and removes what it makes",
            remedy="name another OUT, or move that folder away",
        )
    repo = cached_base(series, python=python, progress=progress)
    if folder.exists():
        if _usable(folder, series, repo):
            return folder
        progress(f"{folder.name}: changed since it was made, making it again")
        shutil.rmtree(folder)
    git.run(["worktree", "prune"], repo)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _marker(folder).touch()  # first, so that what a kill leaves behind is known as ours
    progress(f"making {folder.name}")
    if like is None:
        git.run(["worktree", "add", "-q", "-f", "--detach", folder, BASE_REF], repo)
        base.add_extensions(repo, folder)
        _compile(folder, python, env, progress)
    else:
        worktree.apply(like, series=series, to=0)
        git.run(["worktree", "add", "-q", "-f", "--no-checkout", "--detach", folder, BASE_REF], repo)
        moved = {str(like / path) for path in series.touched}
        shutil.copytree(
            like / PREFIX,
            folder / PREFIX,
            symlinks=True,
            copy_function=lambda source, target: (shutil.copy2 if source in moved else _link)(source, target),
        )
        git.run(["reset", "-q"], folder)
    return folder


def _compile(tree: Path, python: str, env: dict[str, str], progress: Progress) -> None:
    progress("importing it once, so that boot times do not hold its compilation")
    path = {**env, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree / PREFIX), env.get("PYTHONPATH")]))}
    try:
        subprocess.run(
            [python, "-c", _WARM_IMPORT], env=path, capture_output=True, timeout=_WARM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{python}: {error}", remedy="name an interpreter that has SGLang's packages") from error


def _link(source: str, target: str) -> str:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def remove_tree(folder: Path, series: Series, python: str) -> None:
    """Remove a tree that `open_tree` made; leave any other folder alone."""
    if not _marker(folder).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        _marker(folder).unlink()
    git.run(["worktree", "prune"], cached_base(series, python=python), check=False)


def _marker(folder: Path) -> Path:
    """Return the file beside a tree that says it was made here; inside, git would call the tree changed."""
    return folder.with_name(f"{folder.name}.made-here")


def _usable(folder: Path, series: Series, repo: Path) -> bool:
    try:
        common = git.out(["rev-parse", "--path-format=absolute", "--git-common-dir"], folder)
        changed = git.out(["status", "--porcelain", "--untracked-files=normal"], folder)
        found = series_status(folder, series=series)
    except Q4Error:
        return False
    clean = not changed and found.state in ("clean", "applied")
    return clean and Path(common).resolve() == (repo / ".git").resolve()


@contextmanager
def at_prefix(tree: Path, series: Series, prefix: int, plant: Plant | None) -> Iterator[Path]:
    """Yield the folder for PYTHONPATH with the tree at `prefix`, and the planted fault on top from its prefix on."""
    worktree.apply(tree, series=series, to=prefix)
    if plant is None or prefix < plant.at:
        yield tree / PREFIX
        return
    touched = planted_files(plant.file, tree)
    done = git.run(["apply", "--whitespace=nowarn", plant.file], tree, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise UsageError(
            f"{plant.file.name} does not apply on prefix {prefix}: {said}",
            remedy="make it with `git diff` in a tree at that prefix (tools/series.py tree --to K)",
        )
    try:
        _drop(tree, touched)
        yield tree / PREFIX
    finally:
        git.run(["apply", "-R", "--whitespace=nowarn", plant.file], tree)
        _drop(tree, touched)


def planted_files(patch: Path, tree: Path) -> list[str]:
    """Return the files that a patch file touches; one that git cannot read raises UsageError."""
    done = git.run(["apply", "--numstat", "-z", patch], tree, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise UsageError(f"{patch.name} is not a patch: {said}", remedy="give the output of `git diff`")
    return [line.split("\t")[2] for line in done.stdout.decode().split("\0") if line]


def _drop(tree: Path, files: list[str]) -> None:
    for file in files:
        drop_bytecode(tree / file)
