"""Alignment: turns recordings of one plan into values per position, or refuses by name.

Decode segments are aligned until the first generated token that differs. The differing position itself
still counts (both sides saw the same context there): the other side's log-probability of the reference's
token is read from its alternatives; where it is not among them, the smallest listed one stands for it,
which understates the change, and the position is marked as a bound. Nothing after it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from q4kit import provenance
from q4kit.errors import NotComparableError
from q4kit.oracle.measure import check_tokenizer
from q4kit.oracle.recording import ItemResult, Position, Recording, plan_hash

LEGS = ("prefill", "decode")


@dataclass(slots=True)
class Row:
    """One reference position as another run saw it.

    Attributes:
        ref: the reference's position.
        logprob: the other run's ln p of the reference's token, nats.
        other: the other run's own position.
        bound: whether `logprob` is only an upper bound (the token was not among the alternatives).
    """

    ref: Position
    other: Position
    logprob: float
    bound: bool = False


@dataclass(slots=True)
class Divergence:
    """Where a decode segment's tokens part."""

    item: str
    offset: int
    """Index of the differing token in the segment; 0 is the extend's token."""
    margin: float
    """Reference's gap between its best and second-best alternative there, nats."""
    row: Row


@dataclass(slots=True)
class ItemPair:
    """One item seen by two runs: rows in order, the reference's first positions."""

    name: str
    leg: str
    prompt: str
    rows: list[Row] = field(default_factory=list)
    divergence: Divergence | None = None
    lost: int = 0
    """Scored positions behind the divergence."""


def check_plans(reference: Recording, other: Recording, *, vary: Iterable[str] = ()) -> list[provenance.Difference]:
    """Raise unless the two recordings scored the same positions of the same text under like conditions.

    Returns:
        Provenance differences that are allowed, for printing.
    """
    for side, recording in (("reference", reference), ("candidate", other)):
        if not recording.complete:
            raise NotComparableError(
                f"the {side} is a partial recording ({recording.reason})", remedy="Record it again to the end."
            )
        if not recording.results:
            raise NotComparableError(f"the {side} is empty", remedy="Record it again.")
    check_tokenizer(reference.header["tokenizer"], other.header["tokenizer"])
    for name in ("prompt_set", "options", "backend"):
        if reference.header[name] != other.header[name]:
            raise NotComparableError(
                f"different {name.replace('_', ' ')}: reference {reference.header[name]!r}, "
                f"candidate {other.header[name]!r}",
                remedy="Record the candidate with: logprob_diff.py record --like REFERENCE.",
            )
    if plan_hash(reference) != plan_hash(other):
        raise NotComparableError(
            f"different token ids or items: plan {plan_hash(reference)} against {plan_hash(other)}",
            remedy="Record the candidate with: logprob_diff.py record --like REFERENCE.",
        )
    return provenance.check_comparable(reference.provenance, other.provenance, vary=vary)


def pair(reference: Recording, other: Recording) -> list[ItemPair]:
    """Return the rows of every item; call `check_plans` first."""
    return [_pair(a, b) for a, b in zip(reference.results, other.results, strict=True)]


def _pair(reference: ItemResult, other: ItemResult) -> ItemPair:
    item = reference.item
    start = item.first if item.leg == "prefill" else item.length
    for side, result in (("reference", reference), ("candidate", other)):
        found = [position.pos for position in result.positions]
        expected = list(range(start, item.length + item.generate))
        if found != expected:
            raise NotComparableError(
                f"{item.name}: the {side} has {_first_fault(found, expected)}", remedy="Record it again."
            )
    paired = ItemPair(item.name, item.leg, item.prompt)
    for offset, (ref, seen) in enumerate(zip(reference.positions, other.positions, strict=True)):
        same = ref.token == seen.token
        if not same and item.leg == "prefill":
            raise NotComparableError(
                f"{item.name}: misaligned at position {ref.pos}: token {seen.token} against {ref.token}"
            )
        row = Row(ref, seen, seen.logprob) if same else _row_at_divergence(ref, seen)
        if item.leg == "prefill" or offset > 0:
            paired.rows.append(row)
        if not same:
            paired.divergence = Divergence(item.name, offset, margin(ref), row)
            paired.lost = item.generate - 1 - offset
            break
    return paired


def _row_at_divergence(ref: Position, seen: Position) -> Row:
    known = dict(seen.top)
    if ref.token in known:
        return Row(ref, seen, known[ref.token])
    return Row(ref, seen, min(known.values(), default=seen.logprob), bound=True)


def margin(position: Position) -> float:
    """Return the gap between the best and the second-best alternative, nats (0 where none are known)."""
    return position.top[0][1] - position.top[1][1] if len(position.top) > 1 else 0.0


def _first_fault(found: Sequence[int], expected: Sequence[int]) -> str:
    if len(set(found)) != len(found):
        twice = next(pos for pos in found if found.count(pos) > 1)
        return f"position {twice} twice"
    missing = sorted(set(expected) - set(found))
    if missing:
        return f"no position {missing[0]} ({len(found)} of {len(expected)} are there)"
    return f"positions out of order or beyond the plan ({len(found)} found, {len(expected)} expected)"
