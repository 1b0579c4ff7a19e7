"""The proof of the whole series: every prefix on a fresh tree of the pin, offline chain, round trip."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from q4kit.errors import Q4Error
from q4kit.series import base, chain, export, git, lint, manifest, prefix_tests, wheel, worktree
from q4kit.series.base import BASE_REF, PREFIX
from q4kit.series.blobs import tree_id
from q4kit.series.manifest import Series
from q4kit.series.prefix_tests import Outcome
from q4kit.series.wheel import Progress, silent


@dataclass(frozen=True)
class Check:
    """One check: its name, how much it looked at, and what is wrong (empty when nothing is)."""

    name: str
    looked_at: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class PrefixReport:
    """All checks of one prefix and its tests."""

    prefix: int
    commit: str
    checks: tuple[Check, ...]
    tests: tuple[Outcome, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks) and not any(t.problem for t in self.tests)


@dataclass(frozen=True)
class Report:
    """The outcome of a verify."""

    length: int
    series: tuple[Check, ...]
    prefixes: tuple[PrefixReport, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.series) and all(p.ok for p in self.prefixes)


def offline(series: Series) -> tuple[Check, ...]:
    """Return what the folder alone proves: no git, no network, no base tree."""
    checks = [_guard("blob chain", lambda: _chain(series))]
    checks.append(Check("lints", f"{series.length} patches", tuple(lint.lint(series))))
    return tuple(checks)


def verify(
    series: Series | None = None,
    *,
    python: str = sys.executable,
    cache: Path | None = None,
    run_tests: bool = True,
    full: bool = False,
    offline_only: bool = False,
    imports: bool = True,
    report: Callable[[PrefixReport], None] = lambda _: None,
    progress: Progress = silent,
) -> Report:
    """Return the proof of the series; ``report`` gets each prefix as it is done.

    ``full`` runs every test at every prefix instead of only those whose outcome changes there.
    """
    series = series or manifest.load()
    checks = offline(series)
    if offline_only or not all(c.ok for c in checks[:1]):
        return Report(series.length, checks)
    if run_tests:
        prefix_tests.require_pytest(python)
    cache = cache or wheel.cache_dir()
    pin = base.cached_base(series, cache, python=python, progress=progress)
    reports: list[PrefixReport] = []
    importable: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="q4head-verify-") as tmp:
        tree = Path(tmp) / "tree"
        git.run(["worktree", "add", "-q", "-f", "--detach", tree, BASE_REF], pin)
        try:
            base.add_extensions(pin, tree)
            for k in range(series.length + 1):
                reports.append(_prefix(series, tree, k, python, importable, imports, run_tests, full, progress))
                report(reports[-1])
            trip = _guard("round trip", lambda: _round_trip(series, tree))
        finally:
            git.run(["worktree", "remove", "--force", tree], pin, check=False)
    return Report(series.length, (*checks, trip), tuple(reports))


def _prefix(
    series: Series,
    tree: Path,
    k: int,
    python: str,
    importable: dict[str, str],
    imports: bool,
    run_tests: bool,
    full: bool,
    progress: Progress,
) -> PrefixReport:
    """Bring the tree to prefix ``k`` and check it; the imports run beside the tests, each in a process of its own."""
    began = time.monotonic()
    worktree.apply(tree, series=series, to=k)
    checks = [
        _guard("tree id", lambda: _tree_id(series, tree, k)),
        _guard("compile", lambda: _compile(series, tree, k)),
    ]
    tests: list[Outcome] = []
    with ThreadPoolExecutor(1) as beside:
        importing = beside.submit(_imports, series, tree, k, python, importable) if imports else None
        progress(f"prefix {k}: {'importing the touched modules' if imports else 'applied'}")
        if run_tests:
            what = prefix_tests.plan(series, k, full=full)
            tests = prefix_tests.run(series, what, tree, python=python, progress=progress)
        if importing:
            checks.append(importing.result())
    commit = git.out(["rev-parse", "HEAD"], tree)
    return PrefixReport(k, commit, tuple(checks), tuple(tests), time.monotonic() - began)


def _guard(name: str, run: Callable[[], tuple[str, list[str]]]) -> Check:
    """Return a check whose own error is its problem, so that the other checks still run."""
    try:
        looked_at, problems = run()
    except Q4Error as exc:
        return Check(name, "", (str(exc),))
    return Check(name, looked_at, tuple(problems))


def _chain(series: Series) -> tuple[str, list[str]]:
    trees = chain.prefix_trees(series.base.files, series.patches)
    problems = [
        f"{e.file}: tree_after {e.tree_after}, the chain gives {tree}"
        for e, tree in zip(series.entries, trees[1:], strict=True)
        if e.tree_after != tree
    ]
    links = sum(len(p.files) for p in series.patches)
    return f"{links} links over {len(series.touched)} files", problems


def _tree_id(series: Series, tree: Path, k: int) -> tuple[str, list[str]]:
    """Compare git's own tree of the touched files, modes included, with the recorded id."""
    found = base.entry_map(git.entries(tree, "HEAD", series.touched))
    oid = tree_id(found)
    expected = series.entries[k - 1].tree_after if k else chain.prefix_trees(series.base.files, [])[0]
    return oid[:12], [] if oid == expected else [f"tree {oid}, recorded {expected}"]


def _touched_at(series: Series, k: int) -> list[str]:
    """Return the files to look at: those of patch k, at both ends all that exist."""
    here = series.prefixes[k]
    paths = series.touched if k in (0, series.length) else list(series.entries[k - 1].files)
    return [p for p in paths if p in here]


def _compile(series: Series, tree: Path, k: int) -> tuple[str, list[str]]:
    sources = [p for p in _touched_at(series, k) if p.endswith(".py")]
    with tempfile.TemporaryDirectory() as tmp:
        old, sys.pycache_prefix = sys.pycache_prefix, tmp
        try:
            bad = [p for p in sources if not compileall.compile_file(tree / p, quiet=2, force=True)]
        finally:
            sys.pycache_prefix = old
    return f"{len(sources)} files", [f"{p}: does not compile" for p in bad]


_IMPORT = """
import importlib, json, sys
out = {}
for name in sys.argv[3:]:
    try:
        file = importlib.import_module(name).__file__
        out[name] = "" if file.startswith(sys.argv[2]) else f"imported from {file}"
    except BaseException as exc:
        out[name] = f"{type(exc).__name__}: {exc}"[:300]
with open(sys.argv[1], "w") as f:
    json.dump(out, f)
"""


def _imports(series: Series, tree: Path, k: int, python: str, importable: dict[str, str]) -> Check:
    """Import the touched modules; what cannot be imported on the pin either (a GPU-only kernel) is no problem."""
    modules = [m for p in _touched_at(series, k) if (m := module_name(p))]
    if not modules:
        return Check("import", "0 modules", ())
    env = base.run_environment(tree)
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "imports.json"
        command = [python, "-P", "-c", _IMPORT, str(out), str(tree / PREFIX), *modules]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp, check=False)
        if not out.exists():
            return Check("import", f"{len(modules)} modules", (f"the interpreter died: {done.stderr[-300:]}",))
        found: dict[str, str] = json.loads(out.read_text())
    if k == 0:
        importable.update(found)
    problems = [f"{m}: {e}" for m, e in found.items() if e and not importable.get(m)]
    excused = sum(bool(e) for e in found.values()) - len(problems)
    if k == 0:
        return Check("import", f"{len(found) - excused} of {len(found)} modules", ())
    note = f", {excused} not importable on the pin either" if excused else ""
    return Check("import", f"{len(found)} modules{note}", tuple(problems))


def module_name(path: str) -> str:
    """Return the module of a path of the series, or an empty string for other files."""
    if not path.endswith(".py") or not path.startswith(f"{PREFIX}/"):
        return ""
    return path.removeprefix(f"{PREFIX}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _round_trip(series: Series, tree: Path) -> tuple[str, list[str]]:
    """Export the applied series again and compare every byte with the files in the folder."""
    again = export.format_patches(tree, BASE_REF)
    problems = [f"{n}: exported, but not in the series" for n in again.keys() - {e.file for e in series.entries}]
    for entry in series.entries:
        if entry.file not in again:
            problems.append(f"{entry.file}: not exported again")
        elif again[entry.file] != series.path(entry).read_bytes():
            problems.append(f"{entry.file}: exported with other bytes")
    return f"{len(again)} files, byte for byte", problems
