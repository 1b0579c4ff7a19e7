"""Lock files that a killed git leaves behind. Each blocks the next git that needs it, until somebody removes it."""

from __future__ import annotations

import time
from pathlib import Path

from q4kit.series import git

SETTLE_S = 2.0
"""Seconds that a shared lock must stay unchanged to be taken for one without an owner.

Git holds packed-refs.lock for milliseconds, some more while it rewrites a long packed-refs, and gives up waiting for it
after 1 s itself (core.packedRefsTimeout).
"""


def remove_stale(root: Path, folder: Path, since: float) -> None:
    """Remove what a killed ``am``, ``reset``, ``update-ref`` or ``am --quit`` in the work tree ``root`` left locked.

    ``folder`` is the git folder of this very work tree, whose locks must have no living owner; ``since`` (seconds, as
    st_mtime) is when the killed operation began.
    """
    common = Path(git.out(["rev-parse", "--path-format=absolute", "--git-common-dir"], root))
    branch = git.run(["symbolic-ref", "-q", "HEAD"], root, check=False).stdout.decode().strip()
    # HEAD, ORIG_HEAD, REBASE_HEAD and whatever else a version of git writes: a work tree has its own of all of them.
    own = [folder / "index.lock", *folder.glob("[A-Z]*.lock")]
    for lock in [*own, *([common / f"{branch}.lock"] if branch else [])]:
        lock.unlink(missing_ok=True)
    _remove_shared(common / "packed-refs.lock", since)


def _remove_shared(lock: Path, since: float) -> None:
    """Remove a lock that a git in any work tree may hold, unless it is older than ``since`` or anything moves.

    Git takes it whenever it deletes a ref, as ``am`` does with REBASE_HEAD around each patch.
    """
    before = _identity(lock)
    if before is None or before[2] < since:
        return  # one from before the operation is not of its children
    # The lock itself stays empty while its owner writes the new packed-refs beside it.
    written = lock.with_suffix(".new")
    growing = _identity(written)
    time.sleep(SETTLE_S)
    if _identity(lock) == before and _identity(written) == growing:
        lock.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int, float] | None:
    """Return what tells a file from a later one of the same name, and its growth: inode, size and st_mtime."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime
