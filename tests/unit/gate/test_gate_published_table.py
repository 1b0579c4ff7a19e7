"""The gate's table in the write-up is the one in results/, and that one is of records which are there."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUN = ROOT / "results" / "gate_h200_20261130b"


def test_the_write_up_quotes_the_filed_table() -> None:
    rows = json.loads((RUN / "table.json").read_text())["blocks"][0]["rows"]
    text = (ROOT / "docs" / "WRITEUP.md").read_text()
    section = text.split("**The gate**, patch by patch", 1)[1]
    head, *quoted = section.split("```text\n", 1)[1].split("\n```", 1)[0].splitlines()
    starts = [head.index(name) for name in ("prefix", "patch", "oracle")]
    assert len(quoted) == len(rows) == 23
    for line, row in zip(quoted, rows, strict=True):
        assert line[starts[0] : starts[1]].strip() == str(row["prefix"])
        assert line[starts[1] : starts[2]].strip() == row["patch"]
        verdict, *figures = line[starts[2] :].split()
        assert verdict == row["oracle"]
        digits = {"against": 0, "max |change|": 4, "decode tok/s": 0, "prefill tok/s": 0, "boot s": 0, "RSS GiB": 1}
        assert figures == [f"{row[name]:.{n}f}" for name, n in digits.items() if row.get(name) is not None]


def test_every_row_of_the_filed_table_has_its_record() -> None:
    records = {}
    for part in ("records_0_to_14.tar.xz", "records_15_to_21.tar.xz"):
        with tarfile.open(RUN / part) as archive:
            for member in archive:
                if found := re.fullmatch(r"prefix-(\d{4})\.json", Path(member.name).name):
                    content = archive.extractfile(member)
                    assert content is not None
                    records[int(found[1])] = json.load(content)
    rows = {row["prefix"]: row for row in json.loads((RUN / "table.json").read_text())["rows"] if "record" in row}
    assert rows.keys() == records.keys() == set(range(22))
    for prefix, row in rows.items():
        assert row["record"] == records[prefix], prefix
