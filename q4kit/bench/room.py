"""How long a prompt may be so that a server neither refuses it nor cuts its answer short. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_POOLS = ("context_length", "max_total_num_tokens")
_SPARE = 2
"""Tokens of a pool that no request gets: SGLang keeps one for itself and one more of the answer (its scheduler sets
max_new_tokens to the pool's size - 2 - the prompt's length where less is left, and says nothing)."""


class Room(NamedTuple):
    """The longest prompt, tokens, and the limit of the server that decides it."""

    longest: int
    name: str
    limit: int


def room(info: Mapping[str, Any], new_tokens: int) -> Room | None:
    """Return the room for a prompt before `new_tokens` of answer, by /server_info; None where it gives no limit."""
    found = [Room(limit - _SPARE - new_tokens, name, limit) for name in _POOLS if (limit := _whole(info, name))]
    if limit := _whole(info, "max_req_input_len"):
        found.append(Room(limit - 1, "max_req_input_len", limit))  # refused from this length on
    return min(found, default=None)


def _whole(info: Mapping[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if isinstance(value, int) else None
