"""Kill `apply --installed` at random moments, on a copy of a real package, and see whether it can always be mended."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.series import git, installed, journal, state, targets
from q4kit.series.manifest import Series

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill. `after_s`: seconds from the start of the command; `restored`: revert gave the pin's bytes back."""

    after_s: float
    writing: bool
    """Whether the command had begun to change the package."""
    state: str
    prefix: int | None
    interrupted: int
    """Files that an interrupted command was to write."""
    mended_by: str
    restored: bool


@dataclass(slots=True)
class Drill:
    """All kills of one run."""

    package: str
    version: str
    patches: int
    files: int
    apply_s: float
    seed: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """There was a kill, each left a state that has a name, and every tree was restored byte for byte."""
        return bool(self.trials) and all(
            t.restored and (t.state in ("clean", "applied") or t.interrupted > 0) for t in self.trials
        )

    def states(self) -> dict[str, int]:
        seen: dict[str, int] = {}
        for t in self.trials:
            name = name_of(t.state)
            seen[name] = seen.get(name, 0) + 1
        return seen

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds, "states": self.states()}


def name_of(state: str) -> str:
    """Return the word for a state: `status` calls an interrupted command's tree drifted and says why."""
    return "interrupted" if state == "drifted" else state


def check_count(count: int) -> None:
    """Raise UsageError for a drill that would kill nothing, and so show nothing."""
    if count < 1:
        raise UsageError(f"--count {count}: expected 1 kill or more", remedy="20 is the default")


def copy_environment(source: targets.InstalledTarget, root: Path) -> str:
    """Return the interpreter of a new environment inside a git checkout at `root`, with a copy of the package.

    The copy is what the drill damages; the source is only read.
    """
    root.mkdir(parents=True)
    git.run(["init", "-q"], root)
    env = root / "env"
    done = subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], capture_output=True, text=True)
    if done.returncode != 0:
        raise EnvironmentFault(f"python -m venv failed: {done.stderr.strip()[-300:]}", remedy="install python3-venv")
    site = next((env / "lib").glob("python*/site-packages"))
    for folder in (source.package, f"{source.package}-{source.version}.dist-info", targets.STATE_DIR):
        if (source.site / folder).is_dir():
            shutil.copytree(source.site / folder, site / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return str(env / "bin" / "python")


def snapshot(target: targets.InstalledTarget) -> dict[str, str]:
    """Return path -> mode and SHA-256 of every file of the package, folders included, byte-code caches left out."""
    found = {}
    for path in sorted((target.site / target.package).rglob("*")):
        if "__pycache__" in path.parts:
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(target.site))] = f"{path.lstat().st_mode:o} {digest}"
    return found


def run(
    python: str, series: Series, *, command: list[str], count: int, seed: int, progress: Progress = lambda line: None
) -> Drill:
    """Kill `command` (an apply to the environment of `python`) `count` times, each time from the untouched pin.

    Half of the kills fall anywhere in the run, half in the short phase that changes the package.
    """
    check_count(count)
    target = targets.installed_target(python, series.base.package)
    installed.revert(target, series=series)
    before = snapshot(target)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EnvironmentFault(f"the command fails unkilled: {done.stderr.strip()[-300:]}", remedy="run it by itself")
    whole = time.monotonic() - began
    began = time.monotonic()
    installed.revert(target, series=series)
    phase = time.monotonic() - began
    drill = Drill(series.base.package, series.base.version, series.length, len(before), whole, seed)
    rng = random.Random(seed)
    for number in range(count):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        start = time.monotonic()
        if number % 2 == 0:
            time.sleep(rng.uniform(0, whole))
        else:
            while not journal.journal_path(target).exists() and process.poll() is None:
                time.sleep(0.0002)
            time.sleep(rng.uniform(0, phase))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        after = time.monotonic() - start
        process.wait()
        writing = journal.journal_path(target).exists()
        found = state.status(target, series=series)
        mended_by = "revert"
        if number % 4 == 1:
            mended_by = "apply, revert"
            installed.apply(target, series=series)
        installed.revert(target, series=series)
        drill.trials.append(
            Trial(
                after, writing, found.state, found.prefix, len(found.interrupted), mended_by, snapshot(target) == before
            )
        )
        progress(f"{number + 1} of {count}: killed after {after:.2f} s, {name_of(found.state)}")
    return drill
