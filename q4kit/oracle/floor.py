"""The A/A floor: what several runs of the same thing say about the same positions.

A floor keeps the values of every run, not a summary: the verdict compares position by position. Runs of
one configuration give a repeat floor; runs under changes that are known to be harmless (another chunk
size, another batch size) give a variation floor, which is what rounding looks like on a machine that
repeats itself to the bit.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from q4kit import provenance
from q4kit.errors import NotComparableError, UsageError
from q4kit.oracle import align, numbers
from q4kit.oracle.plan import Item
from q4kit.oracle.recording import FLOOR_SCHEMA, Recording, plan_hash, read_content
from q4kit.oracle.recording import SCHEMA as RECORDING_SCHEMA
from q4kit.report import write_atomic

SCHEMA = FLOOR_SCHEMA
MIN_RUNS = 2
ADVISED_RUNS = 5
_NEW = "A floor is made of recordings by: logprob_diff.py floor RUN1 RUN2 ... --out FILE."


@dataclass(slots=True)
class FloorItem:
    """One item of a floor.

    Attributes:
        item: the plan's item.
        tokens: the base run's tokens, scored or not.
        logprobs: one list a run, ln p of `tokens`; a run that diverged has a shorter list, whose last
            entry is the differing position.
    """

    item: Item
    tokens: list[int]
    logprobs: list[list[float]]


@dataclass(slots=True)
class Floor:
    """Several runs of the same thing; run 0 is the base, whose tokens the others are read at."""

    plan: str
    provenance: dict[str, Any]
    runs: list[dict[str, Any]]
    """One entry a run: id, time, server start, provenance differences to the base; `cache_unknown`: items without a
    count of cached tokens, where there are any."""
    items: list[FloorItem]

    @property
    def kind(self) -> str:
        """Return "variation" when the runs differ in server arguments or code, else "repeat"."""
        return "variation" if any(run["differences"] for run in self.runs) else "repeat"

    @property
    def restarts(self) -> int:
        """Number of server starts among the runs, as far as known."""
        return len({run["server_started"] for run in self.runs})


def recording_id(recording: Recording) -> str:
    """Return a name for one run: two runs with equal results are still two runs."""
    return f"{recording.provenance.get('time')}/{recording.content_hash()}"


def build(recordings: Sequence[Recording], *, vary: Iterable[str] = ()) -> Floor:
    """Return the floor of recordings of the same thing.

    Raises:
        NotComparableError: they differ in what a floor may not vary, or one run is there twice.
    """
    if len(recordings) < MIN_RUNS:
        raise UsageError(f"{len(recordings)} recording: a floor needs at least {MIN_RUNS}, {ADVISED_RUNS} are advised")
    base = recordings[0]
    identities = [recording_id(recording) for recording in recordings]
    if len(set(identities)) != len(identities):
        raise NotComparableError("the same recording is given twice", remedy="Each run of the server counts once.")
    runs = []
    columns: list[list[list[float]]] = [[] for _ in base.results]
    for identity, recording in zip(identities, recordings, strict=True):
        found = align.check_plans(base, recording, vary=vary)
        runs.append(
            {
                "id": identity,
                "time": recording.provenance.get("time"),
                "server_started": recording.provenance.get("server_started"),
                "differences": {difference.field: difference.right for difference in found if _matters(difference)},
                **({"cache_unknown": recording.cache_unknown} if recording.cache_unknown else {}),
            }
        )
        for index, item in enumerate(align.pair(base, recording)):
            first = [] if item.leg == "prefill" else [recording.results[index].positions[0].logprob]
            rows = [row.logprob for row in item.rows]
            diverged_first = item.divergence is not None and item.divergence.offset == 0
            columns[index].append([] if diverged_first else first + rows)
    items = [
        FloorItem(result.item, [position.token for position in result.positions], columns[index])
        for index, result in enumerate(base.results)
    ]
    return Floor(plan_hash(base), base.provenance, runs, items)


def _matters(difference: provenance.Difference) -> bool:
    """Return whether a difference is one of configuration, not of something nobody could find out.

    Nor is it which card of a host served: what kind of card it is is compared on its own.
    """
    if difference.field == "server_env.CUDA_VISIBLE_DEVICES":
        return False
    sides = (difference.left, difference.right)
    return not any(isinstance(side, str) and side.startswith(provenance.UNKNOWN) for side in sides)


def encode(floor: Floor) -> bytes:
    """Return the file content: one line for the header, one for each item."""
    number = numbers.kind(value for item in floor.items for run in item.logprobs for value in run)
    header = {
        "schema": SCHEMA,
        "number": number,
        "kind": floor.kind,
        "plan": floor.plan,
        "runs": floor.runs,
        "provenance": floor.provenance,
    }
    lines = [json.dumps(header, ensure_ascii=False)]
    for item in floor.items:
        rows = ["[" + ",".join(numbers.text(value, number) for value in run) + "]" for run in item.logprobs]
        head = json.dumps({"item": asdict(item.item), "tokens": item.tokens}, separators=(",", ":"))
        lines.append(f'{head[:-1]},"logprobs":[{",".join(rows)}]}}')
    body = "\n".join(lines) + "\n"
    return (body + json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n").encode()


def write(floor: Floor, path: Path) -> None:
    """Write a floor; `.gz` is compressed."""
    content = encode(floor)
    write_atomic(path, gzip.compress(content, 9, mtime=0) if path.suffix == ".gz" else content)


def read(path: Path) -> Floor:
    """Return the floor in a file; a damaged or foreign file raises by name."""
    content = read_content(path, missing=_NEW, damaged="Measure the floor again.")
    body, _, tail = content.decode("utf-8", errors="replace").rstrip("\n").rpartition("\n")
    try:
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]
        if header["schema"] == RECORDING_SCHEMA:
            raise UsageError(f"{path}: a single recording, expected a floor", remedy=_NEW)
        if header["schema"] != SCHEMA:
            raise UsageError(
                f"{path}: schema {header['schema']!r}, expected {SCHEMA!r}", remedy="Measure the floor again."
            )
        if json.loads(tail)["sha256"] != hashlib.sha256((body + "\n").encode()).hexdigest():
            raise NotComparableError(f"{path}: content does not match its hash", remedy="Measure the floor again.")
        items = [
            FloorItem(
                Item(**line["item"]),
                line["tokens"],
                [[numbers.parse(value, header["number"]) for value in run] for run in line["logprobs"]],
            )
            for line in lines[1:]
        ]
        return Floor(header["plan"], header["provenance"], header["runs"], items)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"{path}: not a floor file ({error!r})", remedy=_NEW) from error


def check_applies(floor: Floor, reference: Recording, *, vary: Iterable[str] = ()) -> list[provenance.Difference]:
    """Raise unless the floor was measured over the reference's positions, on its device and model."""
    if floor.plan != plan_hash(reference):
        raise NotComparableError(
            f"the floor was measured over other positions (plan {floor.plan}, reference {plan_hash(reference)})",
            remedy="Record the floor's runs with --like REFERENCE.",
        )
    return provenance.check_comparable(floor.provenance, reference.provenance, vary=vary)
