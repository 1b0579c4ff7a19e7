"""Patch series: base, blob chains, apply, status, verify, export.

Read docs/SERIES.md for the concepts. Everything that other tools need is re-exported here.
"""

from q4kit.series.base import cached_base, fetch, tree_at
from q4kit.series.manifest import Series, load
from q4kit.series.state import EXIT_CODES, SeriesStatus, status
from q4kit.series.targets import InstalledTarget, WorkTree, installed_target, work_tree

__all__ = [
    "EXIT_CODES",
    "InstalledTarget",
    "Series",
    "SeriesStatus",
    "WorkTree",
    "cached_base",
    "fetch",
    "installed_target",
    "load",
    "status",
    "tree_at",
    "work_tree",
]
