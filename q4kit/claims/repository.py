"""Run all claim checks over a work tree."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from q4kit.claims import history
from q4kit.claims.check import (
    Finding,
    check_document,
    check_ledger,
    exact_values,
    heading_anchors,
    patch_message,
)
from q4kit.claims.ledger import Ledger, load
from q4kit.errors import UsageError

DOCUMENTS = ("README.md", "docs/WRITEUP.md")
"""Documents in which every number with a unit of measurement needs a claim."""
CAMPAIGN = "docs/CAMPAIGN.md"
SERIES = "upstream/series-q4head"
LEDGER = "results/claims.toml"


@dataclass(frozen=True)
class Checked:
    """Findings and how much was looked at, so that an empty list is not mistaken for an empty check."""

    findings: list[Finding]
    claims: int
    documents: list[str]
    campaign_versions: int
    shallow: bool


def check(root: Path, *, ledger_path: Path | None = None) -> Checked:
    """Return all findings of a repository; other documents are checked where they carry markers.

    Raises:
        UsageError: no ledger, or a broken one.
    """
    ledger = load(ledger_path or root / LEDGER)
    base = current_base(root)
    findings = check_ledger(ledger, lambda name: _read(root / name), _campaign_anchors(root))
    exact = exact_values(ledger, lambda name: _read(root / name))
    documents: list[str] = []
    for name in DOCUMENTS:
        text = _read(root / name)
        if text is None:
            findings.append(Finding(name, "is missing"))
            continue
        documents.append(name)
        findings += check_document(name, text.decode(), ledger, base=base, exact=exact)
    for path in sorted((root / "docs").glob("*.md")):
        name = path.relative_to(root).as_posix()
        if name not in DOCUMENTS:
            documents.append(name)
            findings += check_document(name, path.read_text(), ledger, base=base, complete=False, exact=exact)
    for path in sorted((root / SERIES).glob("*.patch")):
        documents.append(path.name)
        findings += check_document(path.name, patch_message(path.read_text()), ledger, base=base, exact=exact)
    git = history.git_in(root)
    past = history.versions(git, CAMPAIGN)
    findings += history.check_only_grew(CAMPAIGN, past, _read(root / CAMPAIGN))
    return Checked(findings, len(ledger.claims), documents, len(past), history.is_shallow(git))


def current_base(root: Path) -> str:
    """Return the tag of the pinned base from series.toml."""
    path = root / SERIES / "series.toml"
    try:
        return str(tomllib.loads(path.read_text())["base"]["tag"])
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{SERIES}/series.toml does not name a base tag ({error})") from error


def unused(ledger: Ledger, root: Path) -> list[str]:
    """Return ids of our own claims that no document or patch mentions."""
    texts = "\n".join(
        p.read_text(errors="replace")
        for p in [root / "README.md", *(root / "docs").glob("*.md"), *(root / SERIES).glob("*.patch")]
        if p.is_file()
    )
    return [c.id for c in ledger.claims.values() if c.ours and c.id not in texts]


def _campaign_anchors(root: Path) -> list[str]:
    text = _read(root / CAMPAIGN)
    return heading_anchors(text.decode()) if text is not None else []


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
