"""Append claims of ours to the ledger; existing text, comments included, is kept byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from q4kit.claims.check import decode_raw, resolve_pointer
from q4kit.claims.ledger import ID_PATTERN, load, parse
from q4kit.errors import UsageError
from q4kit.report import write_atomic


def entry_from_raw(
    root: Path,
    claim_id: str,
    raw: Path,
    pointer: str,
    *,
    unit: str,
    statement: str,
    campaign: str,
    base: str,
    decimals: int = 2,
    scale: float = 1.0,
    metric: str = "",
    gpu: str = "",
    tree: str = "",
) -> dict[str, Any]:
    """Return a ledger entry whose value and hash come from the raw file.

    Raises:
        UsageError: the file lies outside the results folder, is no JSON (lines), or the pointer leads to no number.
    """
    if not ID_PATTERN.fullmatch(claim_id):
        raise UsageError(f"id {claim_id!r}: an id is lower-case letters, digits, dots and hyphens")
    path = (raw if raw.is_absolute() else root / raw).resolve()
    results = (root / "results").resolve()
    if not path.is_relative_to(results):
        raise UsageError(
            f"{raw} lies outside results/", remedy="copy the raw file there first; it is never changed again"
        )
    try:
        content = path.read_bytes()
        value = resolve_pointer(decode_raw(path.name, content), pointer)
    except (OSError, ValueError, LookupError) as error:
        raise UsageError(f"{raw}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{raw}: pointer {pointer!r} leads to {value!r}, not to a number")
    optional = {"metric": metric, "gpu": gpu, "tree": tree, **({"scale": scale} if scale != 1.0 else {})}
    return {
        "id": claim_id,
        "owner": "ours",
        "statement": statement,
        "value": round(value * scale, decimals),
        "unit": unit,
        "base": base,
        **{k: v for k, v in optional.items() if v},
        "raw": path.relative_to(root.resolve()).as_posix(),
        "sha256": hashlib.sha256(content).hexdigest(),
        "pointer": pointer,
        "campaign": campaign.lstrip("#"),
    }


def append(ledger: Path, entry: Mapping[str, Any]) -> None:
    """Append `entry` to the ledger file, atomically.

    Raises:
        UsageError: the id is taken, or the ledger would be invalid with it.
    """
    if str(entry["id"]) in load(ledger).claims:
        raise UsageError(f"claim {entry['id']!r} exists already", remedy="ids are for ever: choose a new one")
    block = tomlkit.document()
    tables = tomlkit.aot()
    tables.append(tomlkit.item(dict(entry)))
    block["claim"] = tables
    text = ledger.read_text().rstrip("\n") + "\n\n" + tomlkit.dumps(block)
    parse(tomlkit.parse(text).unwrap())
    write_atomic(ledger, text.encode())
