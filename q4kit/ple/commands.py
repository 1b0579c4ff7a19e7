"""The bench and the table tool behind their command lines: open, run, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from q4kit import provenance
from q4kit.errors import EnvironmentFault, UsageError
from q4kit.ple import contenders, fio, flat, measure, patched, render, summary
from q4kit.report import Report

READERS = ("auto", "io_uring", "io_uring-cached", "pread", "mmap")
CACHED = "-cached"
"""Suffix of a reader that goes through the page cache instead of O_DIRECT."""


def open_table(path: Path, prefix: str | None = None) -> Any:
    """Return the row source at `path`; UsageError with the reader's own words where there is none."""
    rows = patched.rows_module()
    try:
        return rows.open_source(str(path), prefix=prefix)
    except rows.PleTableError as error:
        several = prefix is None and "several n-gram tables" in str(error)
        remedy = "name one of them: --prefix NAME" if several else "check the path; `inspect` describes what is there"
        raise UsageError(str(error), remedy=remedy) from error


def bench(
    table: Path,
    plan: measure.Plan,
    readers: Sequence[str],
    baselines: Sequence[str],
    *,
    with_fio: bool,
    log: measure.Log,
) -> tuple[Report, measure.Measurement]:
    """Measure `readers` and `baselines` on the flat table in `table` and return report and raw samples."""
    if with_fio and not fio.available():
        raise EnvironmentFault("fio is not installed", remedy="apt-get install fio, or run with --no-fio")
    source = open_table(table)
    if source.kind != "flat":
        raise UsageError(f"{table}: a {source.kind} table", remedy="export it first: tools/ple_table.py export")
    path = Path(source.files[0].path)
    rows = patched.rows_module()
    settled: dict[str, str] = {}
    with ExitStack() as stack:
        opened: dict[str, contenders.Contender] = {}
        for name in readers:
            try:
                options = rows.RowReaderOptions(direct_min_rows=None if name.endswith(CACHED) else 0)
                reader = rows.open_row_reader(source, name.removesuffix(CACHED), options=options)
            except RuntimeError as error:
                raise EnvironmentFault(str(error), remedy=f"leave {name} out: --readers") from error
            opened[name] = contenders.Reader(reader)
            settled[name] = reader.describe() if hasattr(reader, "describe") else reader.name
        for name in baselines:
            opened[name] = contenders.BASELINES[name](path, source.row_bytes)
        for contender in opened.values():
            stack.callback(contender.close)
        measured = measure.run(opened, [path], source.row_bytes, source.rows, plan, with_fio=with_fio, log=log)
    lines = [summary.summarise(s) for s in measured.samples.values()]
    ratios = summary.ratios(lines, measured.waves, measured.bulk)
    load = os.getloadavg()[0]
    facts = [
        ("table", f"{source.nbytes / 2**20:.0f} MiB, {source.rows} rows of {source.row_bytes} B"),
        ("load average at the end", load),
        *settled.items(),
    ]
    result = render.report(lines, measured.waves, measured.bulk, ratios, facts)
    result.warnings += warnings(measured)
    result.data = {
        **ratios,
        "lines": [asdict(line) for line in lines],
        "raw": measured.to_json(),
        "provenance": provenance.collect(None, tool="ple_bench", package=patched.package(rows), files={"table": path})
        | {
            "fio": fio.version() if with_fio else None,
            "load_average": load,
        },
    }
    return result, measured


def warnings(measured: measure.Measurement) -> list[str]:
    """Return what a reader of the report must know before its figures."""
    found = ["interrupted: partial"] if measured.partial else []
    if measured.no_warm:
        some = any(cache == "warm" for _, _, cache in measured.samples)
        found.append(f"{'warm rounds ended early' if some else 'no warm figures'}: {measured.no_warm}")
    return found


def inspect(path: Path, prefix: str | None = None) -> Report:
    """Describe a table without reading its rows."""
    source = open_table(path, prefix)
    result = Report(
        f"PLE table {source.name}",
        facts=[
            ("kind", source.kind),
            ("rows", source.rows),
            ("dim", source.dim),
            ("dtype", source.dtype),
            ("row bytes", source.row_bytes),
            ("table bytes", source.nbytes),
            ("weight_scale", source.weight_scale),
            ("files", len(source.files)),
            ("extents", len(source.extents)),
            ("extents at a multiple of 4096", sum(e.offset % 4096 == 0 for e in source.extents)),
        ],
    )
    result.data = {
        "table": {k: getattr(source, k) for k in ("kind", "rows", "dim", "dtype", "row_bytes", "weight_scale")},
        "extents": [asdict(e) for e in source.extents],
    }
    return result


def export(path: Path, folder: Path, prefix: str | None, *, force: bool, progress: flat.Progress) -> Report:
    """Write the table at `path` as a flat table into `folder`."""
    source = open_table(path, prefix)
    description = flat.export(source, folder, force=force, progress=progress)
    return Report(f"exported {source.rows} rows", facts=[("bytes", source.nbytes), ("description", str(description))])


def verify(path: Path, other: Path | None, prefix: str | None, progress: flat.Progress) -> tuple[Report, bool]:
    """Check a flat table against its stored checksums, or two tables against each other."""
    source = open_table(path, prefix)
    if other is None:
        if source.kind != "flat":
            raise UsageError(
                f"{path}: a {source.kind} table stores no checksums",
                remedy="name the flat table first, or a second table",
            )
        outcome = flat.check_stored(source, progress)
    else:
        outcome = flat.compare(source, open_table(other, prefix), progress)
    verdict = "EQUAL" if outcome.equal else "DIFFERENT"
    return Report(f"verify {source.name}", verdict=verdict, evidence=outcome.evidence), outcome.equal
