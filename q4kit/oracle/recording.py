"""A recording: what one server said about the scored positions, and its file.

File: JSON lines, plain (`.jsonl`) or gzip (`.jsonl.gz`); one header, one line for each prompt's ids, one
for each item, one for each position, one end line. Text that diffs, never pickle. Log-probabilities are
written in the shortest form that reads back to the same float32 (SGLang computes them in float32), or
as float64 when any value is not one, and `number` in the header says which.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from q4kit.errors import NotComparableError, UsageError
from q4kit.oracle import numbers
from q4kit.oracle.plan import Item, Options
from q4kit.oracle.promptset import ids_fingerprint
from q4kit.report import write_atomic

SCHEMA = "q4kit.oracle.recording/1"
FLOOR_SCHEMA = "q4kit.oracle.floor/1"
"""Known here too, so that a floor given in place of a recording is called one."""
_NEW = "A recording is made by: logprob_diff.py record --base-url URL --out FILE."


@dataclass(slots=True)
class Position:
    """One scored position.

    Attributes:
        pos: index of the token in its sequence, 0-based.
        token: id of the token at `pos` (forced in prefill, generated in decode).
        logprob: ln p(token | everything before it), nats.
        top: the server's most likely (id, logprob), best first; empty where a route gives none.
        again: decode only: logprob of the same token when the segment is teacher-forced, nats.
    """

    pos: int
    token: int
    logprob: float
    top: list[tuple[int, float]]
    again: float | None = None


@dataclass(slots=True)
class ItemResult:
    """One item with its positions in order. Decode items include the extend's token at index 0."""

    item: Item
    positions: list[Position]
    cached_tokens: int | None
    """Prompt tokens served from the prefix cache: 0, or None where the server does not say."""


@dataclass(slots=True)
class Recording:
    """Everything one run measured."""

    header: dict[str, Any]
    prompts: dict[str, list[int]]
    results: list[ItemResult] = field(default_factory=list)
    complete: bool = True
    reason: str = ""
    """Why it is not complete."""
    plan: list[Item] | None = field(default=None, compare=False, repr=False)
    """Items to measure, where they come from a reference; None makes them from prompts and options."""

    @property
    def options(self) -> Options:
        """Options the recording was made with."""
        return Options(**self.header["options"])

    @property
    def provenance(self) -> dict[str, Any]:
        """Provenance block of the measured server."""
        block: dict[str, Any] = self.header["provenance"]
        return block

    @property
    def cache_unknown(self) -> int:
        """Number of items of which the server did not say how much of the prompt was cached."""
        return sum(result.cached_tokens is None for result in self.results)

    def content_hash(self) -> str:
        """Return a hash over every measured value: equal hashes mean bit-identical results."""
        digest = hashlib.sha256()
        for result in self.results:
            digest.update(result.item.name.encode())
            for position in result.positions:
                values = {name: getattr(position, name) for name in Position.__slots__}
                digest.update(repr(values).encode())
        return digest.hexdigest()[:16]


def _all_values(recording: Recording) -> Iterator[float]:
    for result in recording.results:
        for position in result.positions:
            yield position.logprob
            yield from (logprob for _, logprob in position.top)
            if position.again is not None:
                yield position.again


def encode(recording: Recording) -> bytes:
    """Return the file content of a recording, uncompressed."""
    number = numbers.kind(_all_values(recording))
    text = partial(numbers.text, number=number)

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    lines = [line({"schema": SCHEMA, "number": number, **recording.header})]
    lines += [line({"prompt": name, "ids": ids}) for name, ids in recording.prompts.items()]
    count = 0
    for result in recording.results:
        lines.append(line({"item": asdict(result.item), "cached_tokens": result.cached_tokens}))
        for position in result.positions:
            top = ",".join(f"[{token},{text(logprob)}]" for token, logprob in position.top)
            again = "" if position.again is None else f',"again":{text(position.again)}'
            lines.append(
                f'{{"pos":{position.pos},"token":{position.token},"lp":{text(position.logprob)}{again},"top":[{top}]}}'
            )
            count += 1
    end = {"positions": count, "complete": recording.complete, "content": recording.content_hash()}
    lines.append(line({"end": end | ({"reason": recording.reason} if recording.reason else {})}))
    return ("\n".join(lines) + "\n").encode()


def write(recording: Recording, path: Path) -> None:
    """Write a recording; `.gz` is compressed (without a time stamp, so equal content is equal bytes)."""
    content = encode(recording)
    write_atomic(path, gzip.compress(content, 9, mtime=0) if path.suffix == ".gz" else content)


def read_content(path: Path, *, missing: str, damaged: str) -> bytes:
    """Return a plain or gzip file's content; `missing` and `damaged` are the remedies for such a file.

    Raises:
        UsageError: no such file, or one that cannot be read.
        NotComparableError: damaged.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", remedy=f"Is the path right? {missing}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise NotComparableError(f"{path}: damaged ({error})", remedy=damaged) from error
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror})", remedy=f"Is the path right? {missing}"
        ) from error


def read(path: Path) -> Recording:
    """Return the recording in a file.

    Raises:
        UsageError: no such file, or not a recording (a floor is called one).
        NotComparableError: truncated, damaged or not finite; the message names line and field.
    """
    content = read_content(path, missing=_NEW, damaged="Record it again.")
    return decode(content, str(path))


def decode(content: bytes, name: str) -> Recording:
    """Return the recording in a file's uncompressed content; `name` is for messages."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    try:
        header = json.loads(lines[0])
        schema = header.pop("schema")
    except (IndexError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{name}: not an oracle recording (no schema in the first line)", remedy=_NEW) from error
    if schema == FLOOR_SCHEMA:
        raise UsageError(
            f"{name}: a floor, expected a recording",
            remedy="A floor is given to compare, after --floor; in this place name the file of a single recording.",
        )
    if schema != SCHEMA:
        raise UsageError(f"{name}: schema {schema!r}, expected {SCHEMA!r}", remedy="Record it again.")
    number = header.pop("number")
    recording = Recording(header, {})
    end: dict[str, Any] | None = None
    for at, text in enumerate(lines[1:], start=2):
        where = f"{name}:{at}"
        try:
            value = json.loads(text, parse_constant=partial(_not_finite, where))
            if end is not None:
                raise NotComparableError(f"{where}: content after the end line")
            if "pos" in value:
                recording.results[-1].positions.append(_position(value, number, where))
            elif "item" in value:
                recording.results.append(ItemResult(Item(**value["item"]), [], value["cached_tokens"]))
            elif "prompt" in value:
                recording.prompts[value["prompt"]] = value["ids"]
            else:
                end = value["end"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise NotComparableError(f"{where}: damaged ({error!r})", remedy="Record it again.") from error
    if end is None:
        raise NotComparableError(f"{name}: truncated (no end line)", remedy="Record it again.")
    found = sum(len(result.positions) for result in recording.results)
    if found != end["positions"]:
        raise NotComparableError(f"{name}: {found} positions, its end line says {end['positions']}")
    recording.complete, recording.reason = bool(end["complete"]), end.get("reason", "")
    if recording.content_hash() != end["content"]:
        raise NotComparableError(
            f"{name}: values do not match their hash (found {recording.content_hash()}, "
            f"end line says {end['content']})",
            remedy="The file was edited or damaged: record it again.",
        )
    return recording


def _not_finite(where: str, word: str) -> float:
    raise NotComparableError(f"{where}: {word} is not a log-probability", remedy="The server is broken.")


def _position(value: dict[str, Any], number: str, where: str) -> Position:
    def real(item: Any) -> float:
        try:
            return numbers.parse(item, number)
        except ValueError:
            return _not_finite(where, repr(item))

    again = value.get("again")
    return Position(
        value["pos"],
        value["token"],
        real(value["lp"]),
        [(token, real(logprob)) for token, logprob in value["top"]],
        None if again is None else real(again),
    )


def plan_hash(recording: Recording) -> str:
    """Return the hash of prompts' ids and items: equal hashes mean the same positions of the same text."""
    parts = [f"{name}:{ids_fingerprint(ids)}" for name, ids in recording.prompts.items()]
    parts += [json.dumps(asdict(result.item), sort_keys=True) for result in recording.results]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
