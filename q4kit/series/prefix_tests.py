"""Tests of patches against one prefix: which must pass, which must fail, and what each really did."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from q4kit.errors import EnvironmentFault
from q4kit.series import base
from q4kit.series.base import PREFIX
from q4kit.series.manifest import Series
from q4kit.series.wheel import Progress, silent

Expectation = Literal["pass", "red"]

_TYPOS = frozenset({"NameError", "SyntaxError", "IndentationError", "FixtureLookupError", "UnboundLocalError"})
_HEARTBEAT_S = 30.0


@dataclass(frozen=True)
class Plan:
    """What to run at a prefix: test file -> number of the patch it belongs to (0: regression, passes everywhere)."""

    prefix: int
    files: Mapping[str, int]


@dataclass(frozen=True)
class Outcome:
    """One test at one prefix; ``problem`` is empty when it did what the series claims."""

    nodeid: str
    patch: int
    expected: Expectation
    outcome: str
    detail: str
    problem: str


def plan(series: Series, prefix: int, *, full: bool, patch: int | None = None) -> Plan:
    """Return the test files to run at a prefix.

    ``full``: every file. Otherwise what this prefix adds to its neighbours' runs: the tests of patch ``prefix`` (must
    pass), those of the next one (must be red), and at both ends everything.
    """
    files: dict[str, int] = {}
    everything = full or prefix in (0, series.length)
    for entry in series.entries:
        if patch is not None and entry.number != patch:
            continue
        if everything or entry.number in (prefix, prefix + 1):
            files |= dict.fromkeys(entry.tests, entry.number)
    if everything and patch is None:
        files |= dict.fromkeys((t for r in series.regressions for t in r.tests), 0)
    return Plan(prefix, files)


def require_pytest(python: str) -> None:
    """Raise EnvironmentFault when ``python`` cannot run the tests: asked first, before a tree is made for them."""
    probe = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('pytest') else 9)"
    done = subprocess.run([python, "-P", "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode == 9:
        raise EnvironmentFault(
            f"{python} has no pytest, which runs the tests of the patches",
            remedy="run scripts/setup.sh --test, or name an interpreter that has it with --python",
        )
    if done.returncode != 0:
        raise EnvironmentFault(f"{python} could not be asked for pytest: {done.stderr.strip()[-400:]}")


def judge(nodeid: str, patch: int, prefix: int, item: Mapping[str, Any]) -> Outcome:
    """Return whether one test did what is claimed for it at this prefix. Pure."""
    applied = patch <= prefix
    expected: Expectation = "red" if item["red"] and not applied else "pass"
    outcome, when, error = item["outcome"], item["when"], item["error"]
    detail = f"{error}: {item['message']}" if error else ""
    problem = ""
    if patch == 0 and item["red"]:
        problem = "a regression test must not be marked red_on_stock"
    elif outcome not in ("passed", "failed"):
        problem = f"{outcome}, expected to {'fail' if expected == 'red' else 'pass'}: it proves nothing"
    elif expected == "pass" and outcome != "passed":
        problem = f"fails in its {when} phase, expected to pass"
    elif expected == "red" and outcome == "passed":
        problem = "passes without its patch, expected to fail: it does not show the fault"
    elif expected == "red" and when != "call" and not _declared(item):
        problem = f"fails in its {when} phase: red for another reason than the fault"
    elif expected == "red" and error in _TYPOS:
        problem = f"red by {error}: a mistake in the test, not the fault"
    return Outcome(nodeid, patch, expected, outcome, detail, problem)


def _declared(item: Mapping[str, Any]) -> bool:
    """Return whether a failing fixture is the fault: declared so, and not a fixture that does not exist."""
    return bool(item.get("red_in_setup")) and item["when"] == "setup" and item["error"] != "FixtureLookupError"


def run(
    series: Series,
    what: Plan,
    tree: Path,
    *,
    python: str,
    progress: Progress = silent,
    timeout_s: float = 3600.0,
    log: Path | None = None,
) -> list[Outcome]:
    """Run a plan in one pytest process on ``tree`` and return every test's outcome, collection failures included."""
    files = sorted(what.files)
    missing = [f for f in files if not (series.root / f).is_file()]
    outcomes = [Outcome(f, what.files[f], "pass", "missing", "", f"{f}: the test file does not exist") for f in missing]
    present = [f for f in files if f not in missing]
    if not present:
        return outcomes
    report = _pytest(series, present, tree, python, progress, timeout_s, log, what.prefix)
    expected = (tree / PREFIX / series.base.package).resolve()
    if Path(report["package"]).resolve() != expected:
        raise EnvironmentFault(
            f"the tests imported {series.base.package} from {report['package']}, expected {expected}",
            remedy="remove what puts another copy in front of PYTHONPATH (a .pth file, an editable install)",
        )
    for failure in report["collect"]:
        name = failure["nodeid"]
        number = what.files.get(name.split("::")[0], 0)
        last = failure["message"].strip().split("\n")[-1]
        outcomes.append(
            Outcome(name, number, "pass", "not collected", last, "cannot be collected, so it proves nothing")
        )
    for nodeid, item in report["items"].items():
        outcomes.append(judge(nodeid, what.files[nodeid.split("::")[0]], what.prefix, item))
    silent_files = [
        f
        for f in present
        if not any(n.split("::")[0] == f for n in [*report["items"], *(c["nodeid"] for c in report["collect"])])
    ]
    outcomes += [Outcome(f, what.files[f], "pass", "empty", "", "holds no test") for f in silent_files]
    outcomes += _never_red(series, what, outcomes)
    return outcomes


def _never_red(series: Series, what: Plan, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Report a patch whose tests run on a tree without it, yet none of them is declared to fail there."""
    found = []
    for entry in series.entries:
        ran = [o for o in outcomes if o.patch == entry.number]
        if entry.number > what.prefix and ran and not any(o.expected == "red" for o in ran):
            problem = "none of its tests is marked red_on_stock: nothing shows the fault it mends"
            found.append(Outcome(entry.file, entry.number, "red", "none", "", problem))
    return found


def _pytest(
    series: Series,
    files: list[str],
    tree: Path,
    python: str,
    progress: Progress,
    timeout_s: float,
    log: Path | None,
    prefix: int,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="q4head-tests-") as tmp:
        plugin, result = Path(tmp) / "q4_marks.py", Path(tmp) / "report.json"
        shutil.copyfile(Path(__file__).with_name("_marks.py"), plugin)
        env = base.run_environment(tree, tmp) | {
            "Q4_MARKS_REPORT": str(result),
            "Q4_MARKS_PACKAGE": series.base.package,
        }
        options = ["-p", "q4_marks", "-p", "no:cacheprovider", "-q", "--tb=short", f"--rootdir={series.root}"]
        command = [python, "-P", "-m", "pytest", *options, *files]
        output = log or Path(tmp) / "pytest.log"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, cwd=series.root, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                _wait(process, f"prefix {prefix}: {len(files)} test files", progress, timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not result.exists():
            tail = output.read_text(errors="replace")[-1500:]
            raise EnvironmentFault(
                f"pytest at prefix {prefix} ended with exit {process.returncode} and no report:\n{tail}",
                remedy=f"run it by hand: PYTHONPATH={tree / PREFIX} {python} -m pytest {' '.join(files)}",
            )
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def _wait(process: subprocess.Popen[bytes], what: str, progress: Progress, timeout_s: float) -> None:
    began, said = time.monotonic(), 0.0
    progress(f"{what}: running")
    while True:
        try:
            process.wait(timeout=1.0)
            return
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - began
        if passed > timeout_s:
            raise EnvironmentFault(
                f"{what}: not finished after {timeout_s:.0f} s", remedy="see what hangs with --patch"
            )
        if passed - said >= _HEARTBEAT_S:
            said = passed
            progress(f"{what}: {passed:.0f} s")
