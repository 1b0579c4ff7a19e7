"""Reports: one structure, rendered as plain text, markdown, CSV or JSON. Nothing here prints.

A tool builds a `Report`, and its CLI decides where `text()`, `markdown()` or `to_json()` goes. Cells
keep their values; only rendering turns them into characters, so the JSON of a report holds every
digit that its table rounds away.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q4kit.errors import EnvironmentFault

SIGNIFICANT_DIGITS = 4
_MISSING = "-"


def format_cell(value: Any) -> str:
    """Return the characters of one cell: 4 significant digits for floats, "-" for None."""
    if value is None:
        return _MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        if value == 0:
            return "0"
        magnitude = abs(value)
        if 1e-4 <= magnitude < 1e7:
            digits = max(SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(magnitude)), 0)
            text = f"{value:.{digits}f}"
            return text.rstrip("0").rstrip(".") if "." in text else text
        return f"{value:.{SIGNIFICANT_DIGITS - 1}e}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={format_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_cell(item) for item in value)
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(slots=True)
class Table:
    """Rows under named columns, with an optional title above and notes below."""

    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            self._check(row)

    def add(self, *cells: Any) -> None:
        """Append one row; its length must be the number of columns."""
        self._check(cells)
        self.rows.append(cells)

    def _check(self, row: Sequence[Any]) -> None:
        if len(row) != len(self.columns):
            raise ValueError(f"table {self.title!r}: {len(row)} cells for {len(self.columns)} columns")

    def _cells(self) -> list[list[str]]:
        return [[format_cell(value) for value in row] for row in self.rows]

    def _right_aligned(self) -> list[bool]:
        """Return per column whether it holds numbers only (and at least one)."""
        flags = []
        for index in range(len(self.columns)):
            values = [row[index] for row in self.rows if row[index] is not None]
            flags.append(bool(values) and all(_is_number(value) for value in values))
        return flags

    def text(self) -> str:
        """Return the table for a terminal, columns aligned by spaces."""
        cells = self._cells()
        widths = [max([len(str(name)), *(len(row[index]) for row in cells)]) for index, name in enumerate(self.columns)]
        right = self._right_aligned()

        def line(values: Iterable[str]) -> str:
            padded = (
                value.rjust(width) if flush else value.ljust(width)
                for value, width, flush in zip(values, widths, right, strict=True)
            )
            return "  ".join(padded).rstrip()

        lines = [self.title] if self.title else []
        lines += [line(self.columns), line("-" * width for width in widths), *(line(row) for row in cells)]
        return "\n".join([*lines, *self.notes])

    def markdown(self) -> str:
        """Return the table in GitHub's markdown; pipes and line breaks inside cells are escaped."""

        def escape(value: str) -> str:
            return value.replace("|", "\\|").replace("\n", "<br>")

        def line(values: Iterable[str]) -> str:
            return "| " + " | ".join(escape(value) for value in values) + " |"

        rule = ["---:" if flush else "---" for flush in self._right_aligned()]
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [line(self.columns), line(rule), *(line(row) for row in self._cells())]
        return "\n".join(lines + (["", *self.notes] if self.notes else []))

    def csv(self) -> str:
        """Return the table as RFC 4180 CSV, floats in full precision."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if value is None else value for value in row] for row in self.rows)
        return buffer.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON-ready data: a list of objects keyed by column."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


@dataclass(slots=True)
class Report:
    """What one run has to say: headline first, evidence after, details last."""

    title: str
    verdict: str = ""
    """One word, e.g. EQUIVALENT; empty when the run gives no verdict."""
    evidence: str = ""
    """The one line the verdict rests on."""
    facts: list[tuple[str, Any]] = field(default_factory=list)
    """Named values printed under the headline."""
    blocks: list[Table | str] = field(default_factory=list)
    """Tables and paragraphs in reading order."""
    warnings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Everything else for the JSON form: raw statistics, provenance."""

    def text(self) -> str:
        """Return the report for a terminal or a log file."""
        head = [self.title, "=" * len(self.title)]
        if self.verdict:
            head.append(f"** {self.verdict} **" + (f"  {self.evidence}" if self.evidence else ""))
        width = max((len(name) for name, _ in self.facts), default=0)
        head += [f"{name.ljust(width)}  {format_cell(value)}" for name, value in self.facts]
        head += [f"[warn: {warning}]" for warning in self.warnings]
        parts = ["\n".join(head)]
        parts += [block if isinstance(block, str) else block.text() for block in self.blocks]
        return "\n\n".join(parts) + "\n"

    def markdown(self) -> str:
        """Return the report for a document or an issue."""
        parts = [f"## {self.title}"]
        if self.verdict:
            parts.append(f"**{self.verdict}**" + (f": {self.evidence}" if self.evidence else ""))
        if self.facts:
            parts.append("\n".join(f"- {name}: {format_cell(value)}" for name, value in self.facts))
        parts += [f"> Warning: {warning}" for warning in self.warnings]
        parts += [block if isinstance(block, str) else block.markdown() for block in self.blocks]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready data; `data` is merged at the top level."""
        body: dict[str, Any] = {
            "title": self.title,
            "verdict": self.verdict or None,
            "evidence": self.evidence or None,
            "facts": dict(self.facts),
            "warnings": list(self.warnings),
            "blocks": [block if isinstance(block, str) else block.to_json() for block in self.blocks],
        }
        clash = body.keys() & self.data.keys()
        if clash:
            raise ValueError(f"report data must not reuse the keys {sorted(clash)}")
        return body | self.data


def finite(value: Any) -> Any:
    """Return `value` as strict JSON takes it: infinities as "inf", objects by their own `to_json`."""
    if hasattr(value, "to_json"):
        return finite(value.to_json())
    if isinstance(value, float) and not math.isfinite(value):
        return format_cell(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def dump_json(value: Any) -> str:
    """Return strict JSON (no NaN literals), indented by one, with a final newline."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; an existing file is replaced only by a complete one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written ({error.strerror or error})",
            remedy="Choose another output path, or free disk space.",
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON to `path`, atomically."""
    write_atomic(path, dump_json(value).encode())
