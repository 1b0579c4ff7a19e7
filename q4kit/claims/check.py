"""Do documents quote the ledger, and does the ledger quote its raw files? Pure: texts and bytes in, findings out.

A number with a unit of measurement is accounted for when one of these is true:

* a marker on its line, `<!-- c:ID -->` or `[c:ID]`, names a claim that it rounds from;
* a list in its section, `<!-- claims: ID, ID -->`, holds such a claim (a list before the first heading covers the
  whole document; a patch message lists them in a `Claims: ID, ID` trailer);
* the ledger exempts that very text (`[[exempt]]`, with a reason): a GPU class or a threshold is no measurement.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from q4kit.claims.ledger import Claim, Ledger
from q4kit.claims.numbers import Quoted, blank_code, canonical_unit, find

_INLINE = re.compile(r"<!--\s*c:([^\s>]+)\s*-->|\[c:([^\]\s]+)\]")
_LIST = re.compile(r"<!--\s*claims:\s*((?:.|\n)*?)\s*-->|^Claims:\s*(.*)$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*)$")
NOT_REMEASURED = "not re-measured"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, what, and what would be right."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Section:
    """Lines `first..last` (1-based) of a document and the ids its lists name."""

    first: int
    last: int
    ids: tuple[str, ...]


def check_document(
    name: str,
    text: str,
    ledger: Ledger,
    *,
    base: str,
    complete: bool = True,
    exact: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return what is wrong with the numbers of one document.

    `base` is the current base (e.g. `v0.5.23`): a claim measured on another one must say so on its line or in its
    paragraph. With `complete=False` unmarked numbers are allowed and only the marked ones are checked. `exact` are
    the unrounded values (see `exact_values`); without them the ledger's own rounding is taken.
    """
    findings: list[Finding] = []
    # Code shows the syntax of markers, it does not use it.
    lines = blank_code(text).splitlines()
    sections = split_sections("\n".join(lines))
    claims = ledger.claims
    for line_number, ids in _all_ids(lines, sections):
        for claim_id in ids:
            if claim_id not in claims:
                findings.append(Finding(f"{name}:{line_number}", f"claim {claim_id!r} is not in the ledger"))
    exempt = {e.text.replace("\u00a0", " ") for e in ledger.exempt}
    matched: dict[int, set[str]] = {}
    for quoted in find(text):
        if _plain(quoted.text) in exempt:
            continue
        inline = _inline_ids(lines[quoted.line - 1])
        listed = tuple(i for s in sections if s.first <= quoted.line <= s.last for i in s.ids)
        candidates = [claims[i] for i in (*inline, *listed) if i in claims]
        fitting = [c for c in candidates if fits(quoted, c, (exact or {}).get(c.id))]
        if fitting:
            matched.setdefault(quoted.line, set()).update(c.id for c in fitting)
            for claim in fitting[:1]:
                findings += _base_finding(name, quoted, claim, lines, base)
        elif inline:
            findings.append(Finding(f"{name}:{quoted.line}", _misquoted(quoted, inline, claims)))
        elif complete:
            findings.append(
                Finding(f"{name}:{quoted.line}", f"{quoted.text!r} has no claim (mark it, list it, or exempt it)")
            )
    for at, line in enumerate(lines, 1):
        for claim_id in _inline_ids(line):
            if claim_id in claims and claim_id not in matched.get(at, set()):
                findings.append(
                    Finding(
                        f"{name}:{at}",
                        f"marker {claim_id} stands beside no number that rounds from {_value(claims[claim_id])}",
                    )
                )
    return _unique(findings)


def fits(quoted: Quoted, claim: Claim, exact: float | None = None) -> bool:
    """Return whether a quoted number rounds from the claim's exact value, or from either end of its range.

    Rounding a rounded number again can be off by one digit (12.3456 -> 12.35 -> 12.4), hence `exact`.
    """
    if canonical_unit(claim.unit) != quoted.unit:
        return False
    return any(quoted.rounds_from(v) for v in ((claim.value, claim.high) if exact is None else (exact,)))


def exact_values(ledger: Ledger, read: Callable[[str], bytes | None]) -> dict[str, float]:
    """Return the unrounded values of claims that have a raw file or a formula; broken ones are left out."""
    values: dict[str, float] = {}
    for claim in ledger.claims.values():
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if claim.owner == "derived":
                values[claim.id] = evaluate(claim.formula)
            elif claim.owner == "ours" and (raw := read(claim.raw)) is not None:
                values[claim.id] = float(resolve_pointer(decode_raw(claim.raw, raw), claim.pointer)) * claim.scale
    return values


def check_ledger(
    ledger: Ledger, read: Callable[[str], bytes | None], anchors: Iterable[str], *, campaign: str = "docs/CAMPAIGN.md"
) -> list[Finding]:
    """Return what is wrong with the claims themselves.

    `read` returns the bytes of a file of the repository, or None; `anchors` are the heading anchors of CAMPAIGN.
    """
    known = set(anchors)
    findings: list[Finding] = []
    for claim in ledger.claims.values():
        where = f"claim {claim.id}"
        if claim.owner == "derived":
            findings += _check_formula(where, claim)
        if claim.owner != "ours":
            continue
        if claim.campaign.lstrip("#") not in known:
            findings.append(Finding(where, f"{campaign} has no heading with the anchor #{claim.campaign.lstrip('#')}"))
        raw = read(claim.raw)
        if raw is None:
            findings.append(Finding(where, f"raw file {claim.raw} is missing"))
            continue
        digest = hashlib.sha256(raw).hexdigest()
        if digest != claim.sha256:
            findings.append(
                Finding(where, f"{claim.raw} has sha256 {digest[:12]}..., the ledger says {claim.sha256[:12]}...")
            )
            continue
        findings += _check_raw_value(where, claim, raw)
    return findings


def _check_raw_value(where: str, claim: Claim, raw: bytes) -> list[Finding]:
    try:
        value = resolve_pointer(decode_raw(claim.raw, raw), claim.pointer)
    except (ValueError, LookupError) as error:
        return [Finding(where, f"pointer {claim.pointer!r} does not lead to a number in {claim.raw}: {error}")]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [Finding(where, f"pointer {claim.pointer!r} leads to {value!r}, not to a number")]
    if not rounds_to(value * claim.scale, claim.value):
        return [Finding(where, f"the ledger says {claim.value:g}, {claim.raw} says {value * claim.scale:.6g}")]
    return []


def _check_formula(where: str, claim: Claim) -> list[Finding]:
    try:
        value = evaluate(claim.formula)
    except ValueError as error:
        return [Finding(where, f"formula {claim.formula!r}: {error}")]
    if not rounds_to(value, claim.value):
        return [Finding(where, f"the ledger says {claim.value:g}, {claim.formula} is {value:.6g}")]
    return []


def rounds_to(exact: float, written: float) -> bool:
    """Return whether `exact` rounds to `written` at the precision in which `written` is given."""
    decimals = len(repr(written).partition(".")[2]) if "e" not in repr(written) else 12
    if repr(written).endswith(".0"):
        decimals = 0
    return abs(exact - written) <= 0.5 * 10.0**-decimals + 1e-9


def decode_raw(name: str, raw: bytes) -> Any:
    """Return the document of a raw result file: its JSON, or of a `.jsonl` file the list of its lines.

    Raises:
        ValueError: it is neither.
    """
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in raw.splitlines() if line.strip()]
    return json.loads(raw)


def resolve_pointer(data: Any, pointer: str) -> Any:
    """Return the value at an RFC 6901 JSON pointer.

    Raises:
        LookupError: a step does not exist.
    """
    if not pointer.startswith("/"):
        raise LookupError(f"a pointer begins with '/', found {pointer!r}")
    value = data
    for step in pointer[1:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            raise LookupError(f"no {key!r} on the way")
    return value


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def evaluate(formula: str) -> float:
    """Return the value of an arithmetic expression of numbers, + - * / ** and brackets.

    Raises:
        ValueError: anything else is in it.
    """

    def walk(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        raise ValueError(f"only arithmetic is allowed, found {ast.unparse(node)!r}")

    try:
        return float(walk(ast.parse(formula, mode="eval").body))
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def split_sections(text: str) -> list[Section]:
    """Return the sections of a document with the ids of their lists; the part before any heading covers it all."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines, 1) if _HEADING.match(line)]
    total = max(1, len(lines))
    bounds = [(1, (starts[0] - 1) if starts else total, True)]
    bounds += [(a, b - 1, False) for a, b in zip(starts, [*starts[1:], total + 1], strict=False)]
    sections = []
    for first, last, whole in bounds:
        ids: list[str] = []
        for match in _LIST.finditer("\n".join(lines[first - 1 : last])):
            ids += [i for i in re.split(r"[,\s]+", match[1] or match[2] or "") if i]
        if ids:
            sections.append(Section(1 if whole else first, total if whole else last, tuple(ids)))
    return sections


def heading_anchors(text: str) -> list[str]:
    """Return the anchors of all headings as GitHub makes them (duplicates get -1, -2, ...)."""
    seen: dict[str, int] = {}
    anchors = []
    for line in text.splitlines():
        match = _HEADING.match(line)
        if not match:
            continue
        slug = re.sub(r"[^\w\- ]", "", match[1].strip().lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        anchors.append(f"{slug}-{count}" if count else slug)
    return anchors


def patch_message(patch: str) -> str:
    """Return the commit message of a mail-format patch: after the headers, before the `---` line."""
    _, _, body = patch.partition("\n\n")
    return re.split(r"^---\s*$|^diff --git ", body, maxsplit=1, flags=re.MULTILINE)[0]


def _all_ids(lines: list[str], sections: Iterable[Section]) -> Iterable[tuple[int, tuple[str, ...]]]:
    for number, line in enumerate(lines, 1):
        yield number, _inline_ids(line)
    for section in sections:
        yield section.first, section.ids


def _inline_ids(line: str) -> tuple[str, ...]:
    return tuple(a or b for a, b in _INLINE.findall(line))


def _base_finding(name: str, quoted: Quoted, claim: Claim, lines: list[str], base: str) -> list[Finding]:
    """Our own numbers from another base must say so where they are quoted."""
    if claim.owner != "ours" or claim.base.split()[0] == base:
        return []
    paragraph = _paragraph(lines, quoted.line - 1)
    if claim.base.split()[0] in paragraph or NOT_REMEASURED in paragraph:
        return []
    what = f"{quoted.text!r} ({claim.id}) was measured on {claim.base}, not on {base}"
    return [Finding(f"{name}:{quoted.line}", f"{what}: name that base or say '{NOT_REMEASURED}'")]


def _paragraph(lines: list[str], at: int) -> str:
    first = last = at
    while first > 0 and lines[first - 1].strip():
        first -= 1
    while last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    return "\n".join(lines[first : last + 1])


def _misquoted(quoted: Quoted, ids: Iterable[str], claims: Mapping[str, Claim]) -> str:
    known = ", ".join(f"{i} is {_value(claims[i])}" for i in ids if i in claims)
    return f"{quoted.text!r} rounds from none of its claims ({known or 'none is in the ledger'})"


def _value(claim: Claim) -> str:
    return f"{claim.value:g}" + (f" .. {claim.high:g}" if claim.high != claim.value else "") + f" {claim.unit}"


def _plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def _unique(findings: Iterable[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))
