"""`results/claims.toml`: every quoted number with its source, conditions and raw file. Parsing and validation."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q4kit.errors import UsageError

ID_PATTERN = re.compile(r"[a-z0-9]+([.-]+[a-z0-9]+)*")
HIGHER_IS_BETTER = {"pp": True, "tg": True, "throughput": True, "accept_length": True, "ttft": False, "tpot": False}
"""Metrics that `bench_speed.py verify` can measure, and their direction."""

_KNOWN = {
    "id", "owner", "statement", "value", "high", "unit", "metric", "source", "url", "base", "gpu", "n", "sd",
    "margin", "flags", "conditions", "raw", "sha256", "pointer", "campaign", "scale", "formula", "note", "tree",
}  # fmt: skip
NEEDED = {"ours": ("raw", "sha256", "pointer", "campaign"), "theirs": ("source",), "derived": ("formula",)}
"""What each kind of number must be able to show."""


@dataclass(frozen=True)
class Exemption:
    """A number with a unit that is no measurement: a GPU class, a threshold, a quoted name. `text` as written."""

    text: str
    why: str


@dataclass(frozen=True)
class Ledger:
    """The decoded file: claims by id, exemptions in order."""

    claims: dict[str, Claim]
    exempt: tuple[Exemption, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One number. `owner` is `ours` (has a raw file), `theirs` (has a source to cite) or `derived` (has a formula).

    `value` and `high` bound a published range (equal for a single number), in `unit`. `pointer` is the RFC 6901
    JSON pointer of the number in the raw file, multiplied by `scale` (1000 turns seconds into ms). `tree` says which
    patches on `base` a GPU figure of ours was measured with: these states move faster than GPU runs are repeated.
    """

    id: str
    owner: str
    statement: str
    value: float
    high: float
    unit: str
    source: str
    base: str
    metric: str = ""
    url: str = ""
    gpu: str = ""
    n: int | None = None
    sd: float | None = None
    margin: float | None = None
    flags: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    sha256: str = ""
    pointer: str = ""
    campaign: str = ""
    scale: float = 1.0
    formula: str = ""
    note: str = ""
    tree: str = ""

    @property
    def ours(self) -> bool:
        return self.owner == "ours"


def load(path: Path) -> Ledger:
    """Return a ledger.

    Raises:
        UsageError: the file is missing, is not TOML, or an entry is incomplete; the entry is named.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(f"no ledger at {path.name}", remedy="name it with --ledger") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name} is not TOML: {error}") from error
    return parse(data)


def nearest(claims: Mapping[str, Claim], wanted: str) -> str:
    """Return the id most like ``wanted``, capitals aside; empty when none is like it."""
    return next(iter(difflib.get_close_matches(wanted.lower(), claims, n=1)), "")


def parse(data: Mapping[str, Any]) -> Ledger:
    """Return a ledger from its decoded TOML; see `load`."""
    if data.get("schema") != 1:
        raise UsageError(f"ledger schema is {data.get('schema')!r}, expected 1")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(data.get("claim", []), 1):
        claim = _claim(entry, f"claim {entry.get('id', f'number {number}')!r}")
        if claim.id in claims:
            raise UsageError(f"claim {claim.id!r} occurs twice", remedy="ids are for ever: give the newer one a new id")
        claims[claim.id] = claim
    exempt = []
    for entry in data.get("exempt", []):
        if not entry.get("text") or not entry.get("why"):
            raise UsageError(f"exempt {entry!r}: needs 'text' and 'why'")
        exempt.append(Exemption(entry["text"], entry["why"]))
    return Ledger(claims, tuple(exempt))


def _claim(entry: Mapping[str, Any], name: str) -> Claim:
    unknown = set(entry) - _KNOWN
    if unknown:
        raise UsageError(f"{name}: unknown field {sorted(unknown)[0]!r}", remedy=f"known: {', '.join(sorted(_KNOWN))}")
    for key in ("id", "owner", "statement", "value", "unit", "base"):
        if key not in entry:
            raise UsageError(f"{name}: {key!r} is missing")
    if not ID_PATTERN.fullmatch(str(entry["id"])):
        raise UsageError(f"{name}: an id is lower-case letters, digits, dots and hyphens")
    if entry["owner"] not in NEEDED:
        raise UsageError(f"{name}: owner must be one of {', '.join(NEEDED)}, found {entry['owner']!r}")
    for key in NEEDED[entry["owner"]]:
        if not entry.get(key):
            raise UsageError(f"{name}: a number that is {entry['owner']} needs {key!r}")
    if entry["owner"] == "ours" and entry.get("gpu") and not entry.get("tree"):
        raise UsageError(
            f"{name}: a GPU figure of ours needs 'tree'", remedy='say what was measured, e.g. tree = "prefix 21"'
        )
    if entry.get("metric") and entry["metric"] not in HIGHER_IS_BETTER:
        raise UsageError(
            f"{name}: metric {entry['metric']!r} is unknown, expected one of {', '.join(HIGHER_IS_BETTER)}"
        )
    value, high = float(entry["value"]), float(entry.get("high", entry["value"]))
    if not (math.isfinite(value) and math.isfinite(high) and value <= high):
        raise UsageError(f"{name}: needs finite value <= high, found {value} and {high}")
    margin = entry.get("margin")
    if margin is not None and not 0 < margin < 1:
        raise UsageError(f"{name}: margin must lie between 0 and 1 (0.03 = 3 %), found {margin}")
    fields = {k: v for k, v in entry.items() if k not in ("value", "high", "flags", "source")}
    return Claim(
        **fields, value=value, high=high, flags=tuple(entry.get("flags", ())), source=str(entry.get("source", ""))
    )
