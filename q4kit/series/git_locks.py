"""Lock files that a killed git leaves behind. Each blocks the next git that needs it, until somebody removes it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from q4kit.errors import EnvironmentFault
from q4kit.series import git

SETTLE_S = 2.0
"""Seconds that the lock which all work trees share must stay unchanged to be taken for one without an owner.

Git holds packed-refs.lock for milliseconds, some more while it rewrites a long packed-refs, and gives up waiting for it
after 1 s itself (core.packedRefsTimeout).
"""
WAIT_S = 5.0
"""Seconds that a git which works there is waited for: most, a shell prompt's for one, end at once."""


def remove_stale(root: Path, folder: Path, since: float) -> None:
    """Remove what a killed ``am``, ``reset``, ``update-ref`` or ``am --quit`` in the work tree ``root`` left locked.

    ``folder`` is the git folder of this very work tree; ``since`` (seconds, as st_mtime) is when the killed operation
    began: an older lock is not its children's. Raises EnvironmentFault while a git is at work in this work tree.
    """
    common = Path(git.out(["rev-parse", "--path-format=absolute", "--git-common-dir"], root))
    branch = git.run(["symbolic-ref", "-q", "HEAD"], root, check=False).stdout.decode().strip()
    # HEAD, ORIG_HEAD, REBASE_HEAD and whatever else a version of git writes: a work tree has its own of all of them.
    own = [folder / "index.lock", *folder.glob("[A-Z]*.lock"), *([common / f"{branch}.lock"] if branch else [])]
    stale = [lock for lock in own if _ours(lock, since)]
    if stale:
        end = time.monotonic() + WAIT_S
        while running := at_work([root, folder]):
            if time.monotonic() > end:
                raise EnvironmentFault(
                    f"{root}: git is at work there (process {running[0]}) and may hold {stale[0]}",
                    remedy="let it end, then run this again",
                )
            time.sleep(0.1)
    for lock in stale:
        lock.unlink(missing_ok=True)
    _remove_shared(common, since)


def _remove_shared(common: Path, since: float) -> None:
    """Remove a lock that a git in any work tree may hold, unless it is older than ``since`` or may have an owner.

    Git takes it whenever it deletes a ref, as ``am`` does with REBASE_HEAD around each patch.
    """
    lock = common / "packed-refs.lock"
    before = _identity(lock)
    if not _ours(lock, since):
        return
    # The lock itself stays empty while its owner reads loose refs, and then writes the new packed-refs beside it.
    written = lock.with_suffix(".new")
    growing = _identity(written)
    time.sleep(SETTLE_S)
    listing = git.out(["worktree", "list", "--porcelain"], common)
    trees = [Path(line.removeprefix("worktree ")) for line in listing.splitlines() if line.startswith("worktree ")]
    if _identity(lock) == before and _identity(written) == growing and not at_work([common, *trees]):
        lock.unlink(missing_ok=True)


def at_work(places: Iterable[Path], processes: Path = Path("/proc")) -> list[int]:
    """Return the ids of the git processes whose working folder lies in one of ``places``, as far as it can be seen.

    Those of another user cannot; neither are the locks that `remove_stale` removes theirs.
    """
    roots = [place.resolve() for place in places]
    found = []
    for process in processes.iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):  # it ended, or is another user's
            name = (process / "comm").read_bytes().strip()  # cut at 15 bytes, within a character too
            if name != b"git" and not name.startswith(b"git-"):
                continue
            if b"--daemon" in (process / "cmdline").read_bytes():
                continue  # of fsmonitor and credential-cache: they stay, and lock nothing
            cwd = Path(os.readlink(process / "cwd"))
            if any(cwd.is_relative_to(root) for root in roots):
                found.append(int(process.name))
    return sorted(found)


def _ours(lock: Path, since: float) -> bool:
    """Return whether a lock may be that of a child of an operation which this user began at ``since``."""
    try:
        found = lock.stat()
    except FileNotFoundError:
        return False
    return found.st_mtime >= since and os.geteuid() in (0, found.st_uid)


def _identity(path: Path) -> tuple[int, int, float] | None:
    """Return what tells a file from a later one of the same name, and its growth: inode, size and st_mtime."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime
