"""Pytest plugin for the tests of patches: writes what each test did, and which package it did it to.

Runs in the interpreter under test, alone on its path: it may import nothing of q4kit.
"""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

_ITEMS: dict[str, dict[str, Any]] = {}
_COLLECT: list[dict[str, str]] = []


def pytest_configure(config: Any) -> None:
    """Declare the marker, wherever the configuration file is."""
    config.addinivalue_line("markers", "red_on_stock(setup=False): fails before its own patch, passes from it on")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Note every test and whether it is declared red on stock."""
    for item in items:
        mark = item.get_closest_marker("red_on_stock")
        _ITEMS[item.nodeid] = {
            "red": mark is not None,
            "red_in_setup": mark is not None and mark.kwargs.get("setup") is True,
            "outcome": "not run",
            "when": "",
            "error": "",
            "message": "",
        }


def pytest_collectreport(report: Any) -> None:
    """Note files that cannot be collected: their tests would silently be missing."""
    if report.failed:
        _COLLECT.append({"nodeid": report.nodeid, "message": str(report.longrepr)[-2000:]})


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Note the outcome of each phase; the first phase that does not pass decides."""
    entry = _ITEMS[item.nodeid]
    if call.excinfo is None:
        if call.when == "call" and entry["outcome"] == "not run":
            entry.update(outcome="passed", when="call")
        return
    if entry["outcome"] not in ("not run", "passed"):
        return
    name = call.excinfo.type.__name__
    outcome = "skipped" if name == "Skipped" else "failed"
    message = str(call.excinfo.value).strip().split("\n")[0][:300]
    entry.update(outcome=outcome, when=call.when, error=name, message=message)


def pytest_runtest_logreport(report: Any) -> None:
    """Note expected failures as what pytest calls them."""
    if hasattr(report, "wasxfail"):
        _ITEMS[report.nodeid]["outcome"] = "xpassed" if report.passed else "xfailed"


def pytest_sessionfinish() -> None:
    """Write the report named by the environment."""
    spec = importlib.util.find_spec(os.environ["Q4_MARKS_PACKAGE"])
    where = next(iter(spec.submodule_search_locations or [""])) if spec else ""
    with open(os.environ["Q4_MARKS_REPORT"], "w", encoding="utf-8") as f:
        json.dump({"package": where, "items": _ITEMS, "collect": _COLLECT}, f)
