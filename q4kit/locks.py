"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from q4kit.errors import EnvironmentFault


@contextmanager
def exclusive(folder: Path, taken: str, remedy: str) -> Iterator[None]:
    """Hold `folder`, made if need be; EnvironmentFault with `taken` and `remedy` where another process holds it.

    The lock ends with its process, however that ends; the file `lock` stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFault(taken, remedy=remedy) from None
        yield
