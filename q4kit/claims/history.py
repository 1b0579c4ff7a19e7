"""CAMPAIGN may only grow: every committed version must begin with the one before it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from q4kit.claims.check import Finding
from q4kit.errors import EnvironmentFault

Git = Callable[..., bytes]


def git_in(root: Path) -> Git:
    """Return a function that runs git in `root` and returns its output."""

    def git(*arguments: str) -> bytes:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True)
        except FileNotFoundError as error:
            raise EnvironmentFault("git is not installed", remedy="install git") from error
        except subprocess.CalledProcessError as error:
            raise EnvironmentFault(
                f"git {arguments[0]} failed: {error.stderr.decode(errors='replace').strip()}"
            ) from error
        return done.stdout

    return git


def versions(git: Git, path: str) -> list[tuple[str, bytes]]:
    """Return (commit, content) of every committed version of a file along first parents, oldest first."""
    commits = git("log", "--first-parent", "--reverse", "--format=%H", "--", path).decode().split()
    found = []
    for commit in commits:
        listed = git("ls-tree", "--name-only", commit, "--", path)
        found.append((commit, git("show", f"{commit}:{path}") if listed.strip() else b""))
    return found


def check_only_grew(path: str, history: Sequence[tuple[str, bytes]], now: bytes | None) -> list[Finding]:
    """Return one finding for each version that does not begin with its predecessor.

    `now` is the file as it lies in the work tree (None: deleted).
    """
    findings = []
    before_name, before = "", b""
    for name, content in [*history, ("work tree", now or b"")]:
        if not content.startswith(before):
            line = _first_changed_line(before, content)
            label = name if name == "work tree" else name[:10]
            findings.append(
                Finding(
                    f"{path} in {label}",
                    f"line {line} of {before_name[:10]} was changed or removed; entries are only added",
                )
            )
        before_name, before = name, content
    return findings


def is_shallow(git: Git) -> bool:
    return git("rev-parse", "--is-shallow-repository").strip() == b"true"


def _first_changed_line(before: bytes, after: bytes) -> int:
    for number, (a, b) in enumerate(zip(before.split(b"\n"), after.split(b"\n"), strict=False), 1):
        if a != b:
            return number
    return min(before.count(b"\n"), after.count(b"\n")) + 1
