"""Find numbers with units of measurement in text. Pure.

Only units of measurement count: speeds, times, sizes, shares, factors. Plain integers (layers, lines, ports, dates,
issue numbers) are not claims. Code, inline code and link targets are not prose and are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_UNITS = {
    "tok/s": "tok/s", "tokens/s": "tok/s", "rows/s": "rows/s", "ms": "ms", "us": "us", "µs": "us", "μs": "us",
    "GiB": "GiB", "MiB": "MiB", "KiB": "KiB", "TB": "TB", "GB": "GB", "MB": "MB", "GB/s": "GB/s", "GiB/s": "GiB/s",
    "%": "%", "x": "x", "×": "x", "nats": "nats", "IOPS": "IOPS",
}  # fmt: skip
"""Spelling -> unit as the ledger writes it."""

_NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_UNIT = "|".join(re.escape(u) for u in sorted(_UNITS, key=len, reverse=True))
_WITH_UNIT = re.compile(
    rf"(?<![\w.,/:#-])(?:(?P<first>{_NUMBER})\s?(?:[-–—]|\.\.|to|/)\s?)?(?P<number>{_NUMBER})[\s\u00a0]?(?P<unit>{_UNIT})(?![\w/])(?!\s?\d)"
)
_BARE = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w.])")
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")


@dataclass(frozen=True)
class Quoted:
    """A number as a document quotes it. `decimals` is the precision that was written."""

    line: int
    text: str
    value: float
    decimals: int
    unit: str

    def rounds_from(self, exact: float) -> bool:
        """Return whether `exact`, rounded to the written precision, gives this number (halves either way)."""
        return abs(self.value - exact) <= 0.5 * 10.0**-self.decimals * (1 + 1e-9)


def canonical_unit(unit: str) -> str:
    """Return the ledger's spelling of a unit; an unknown unit is its own."""
    return _UNITS.get(unit, unit)


def parse_number(text: str) -> tuple[float, int]:
    """Return (value, decimals written) of e.g. `2,338`, `57.10` or `9.5e-07`."""
    clean = text.replace(",", "").replace("−", "-")
    mantissa, _, exponent = clean.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return float(clean), decimals


def find(text: str) -> Iterator[Quoted]:
    """Yield every number with a unit of measurement, table cells under a heading with a unit included."""
    header: list[str] = []
    for number, prose in enumerate(blank_code(text).splitlines(), 1):
        yield from _in_prose(prose, number)
        if prose.lstrip().startswith("|"):
            cells = _cells(prose)
            if not header:
                header = [_header_unit(c) for c in cells]
            elif not re.fullmatch(r"[\s|:-]+", prose):
                yield from _in_cells(cells, header, number)
        else:
            header = []


def blank_code(text: str) -> str:
    """Return the text with fenced code, inline code and link targets blanked out; lines and columns stay."""
    lines = []
    fenced = False
    for line in text.splitlines():
        fence = line.lstrip().startswith(("```", "~~~"))
        hidden = fenced or fence
        fenced = fenced != fence
        lines.append("" if hidden else _CODE.sub(lambda m: " " * len(m.group(0)), line))
    return "\n".join(lines)


def _in_prose(line: str, number: int) -> Iterator[Quoted]:
    for match in _WITH_UNIT.finditer(line):
        unit = canonical_unit(match["unit"])
        for part in (match["first"], match["number"]):
            if part is not None:
                yield _quoted(part, unit, number, f"{part} {match['unit']}")


def _in_cells(cells: list[str], units: list[str], number: int) -> Iterator[Quoted]:
    for cell, unit in zip(cells, units, strict=False):
        if not unit or _WITH_UNIT.search(cell):
            continue
        for match in _BARE.finditer(cell):
            yield _quoted(match.group(0), unit, number, f"{match.group(0)} {unit}")


def _quoted(part: str, unit: str, line: int, text: str) -> Quoted:
    value, decimals = parse_number(part)
    return Quoted(line, text, value, decimals, unit)


def _cells(line: str) -> list[str]:
    # Markers hold digits in their ids; they are not numbers of the cell.
    plain = re.sub(r"<!--.*?-->|\[c:[^\]]*\]", "", line)
    return [c.strip() for c in plain.strip().strip("|").split("|")]


def _header_unit(cell: str) -> str:
    match = re.search(rf"(?:^|[\s,(])({_UNIT})\)?$", cell)
    return canonical_unit(match.group(1)) if match else ""
