"""Running git so that neither the user's configuration, nor hooks, nor an enclosing repository change the result."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from q4kit.errors import EnvironmentFault

MAINTAINER = "q4head maintainers"
MAINTAINER_EMAIL = "maintainers@users.noreply.a-seed-0cae4eb1.example"

# Every setting that can change what `am`, `apply` or `format-patch` write. Repository-local settings survive the
# environment below, so they are overridden one by one.
_SETTINGS = {
    "am.keepcr": "false",
    "am.messageId": "false",
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.abbrev": "40",
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.renames": "false",
    "format.coverLetter": "false",
    "format.encodeEmailHeaders": "true",
    "format.forceInBodyFrom": "false",
    "format.from": "false",
    "format.noprefix": "false",
    "format.signOff": "false",
    "format.subjectPrefix": "PATCH",
    "format.thread": "false",
    "format.useAutoBase": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "utf-8",
    "i18n.logOutputEncoding": "utf-8",
    "mailinfo.scissors": "false",
    "maintenance.auto": "false",
    "user.useConfigOnly": "false",
}


def environment(extra: Mapping[str, str] | None = None, *, ceiling: Path | None = None) -> dict[str, str]:
    """Return the environment for git: no inherited GIT_*, no user or system configuration, English messages.

    What only looks takes no lock (GIT_OPTIONAL_LOCKS), so that a killed `status` leaves none behind.

    ``ceiling`` stops the search for a repository at that folder, so that one around it is never found.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_COMMITTER_NAME": MAINTAINER,
        "GIT_COMMITTER_EMAIL": MAINTAINER_EMAIL,
        "LC_ALL": "C",
        "LANGUAGE": "C",
        "TZ": "UTC",
    }
    # A work tree of another owner is what `sudo` and containers give; the caller named it, so trust it.
    env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    if ceiling is not None:
        env["GIT_CEILING_DIRECTORIES"] = str(ceiling.resolve())
    return env | dict(extra or {})


def run(
    args: Sequence[str | Path],
    cwd: Path,
    *,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    ceiling: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run ``git args`` in ``cwd``; returns the finished process, raises EnvironmentFault if it fails and ``check``."""
    binary = shutil.which("git")
    if binary is None:
        raise EnvironmentFault("git is not installed", remedy="install git 2.32 or newer, e.g. `apt-get install git`")
    settings = [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]
    done = subprocess.run(
        [binary, *settings, *map(str, args)],
        cwd=cwd,
        env=environment(env, ceiling=ceiling),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        pass_fds=pass_fds,
        check=False,
    )
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise EnvironmentFault(f"git {args[0]} failed in {cwd} (exit {done.returncode}): {said}")
    return done


def out(args: Sequence[str | Path], cwd: Path, *, env: Mapping[str, str] | None = None) -> str:
    """Return the stripped output of ``git args``."""
    return run(args, cwd, env=env).stdout.decode().strip()


def entries(cwd: Path, rev: str, paths: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return ``path -> (mode, blob id)`` of those ``paths`` that are files in ``rev``."""
    if not paths:
        return {}
    found: dict[str, tuple[str, str]] = {}
    listing = run(["ls-tree", "-z", "-r", "--full-tree", rev, "--", *paths], cwd).stdout.decode()
    for row in filter(None, listing.split("\0")):
        meta, path = row.split("\t", 1)
        mode, kind, oid = meta.split()
        if kind == "blob":
            found[path] = (mode, oid)
    return found
