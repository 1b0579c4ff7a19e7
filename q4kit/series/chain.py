"""The blob chain: what every prefix of the series must contain, from series.toml and the patch files alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from q4kit.errors import UsageError
from q4kit.series.blobs import ABSENT, Entry, tree_id
from q4kit.series.patchfile import Patch


class ChainError(UsageError):
    """A patch does not start from what the base and the patches before it leave behind."""

    def __init__(self, patch: str, path: str, found: str, expected: str) -> None:
        super().__init__(
            f"{patch}: {path}: pre-image blob {found}, expected {expected} from the base and the patches before it",
            remedy="export the series again from a work tree on the pinned base: tools/series.py export WORKTREE",
        )
        self.patch, self.path = patch, path


def prefixes(base: Mapping[str, Entry | None], patches: Sequence[Patch]) -> list[dict[str, Entry]]:
    """Return the touched files at every prefix, index 0 (the pin) to n; raises ChainError at the first broken link.

    ``base`` names every touched file of the whole series; None for one the series adds.
    """
    state = {path: entry for path, entry in base.items() if entry is not None}
    found = [dict(state)]
    for patch in patches:
        for diff in patch.files:
            if diff.path not in base:
                raise ChainError(patch.name, diff.path, diff.old_blob, "no entry in [base.files]")
            before = state.get(diff.path)
            if diff.old_blob != (before.blob if before else ABSENT):
                raise ChainError(patch.name, diff.path, diff.old_blob, before.blob if before else "an absent file")
            if before and diff.old_mode != before.mode:
                raise ChainError(patch.name, diff.path, f"mode {diff.old_mode}", f"mode {before.mode}")
            if diff.new_blob == ABSENT:
                del state[diff.path]
            else:
                state[diff.path] = Entry(diff.new_mode or "100644", diff.new_blob)
        found.append(dict(state))
    return found


def prefix_trees(base: Mapping[str, Entry | None], patches: Sequence[Patch]) -> list[str]:
    """Return the git tree id of the touched files at every prefix 0..n."""
    return [tree_id(files) for files in prefixes(base, patches)]
