"""Whether a plan's requests fit a server, and what to do when they do not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from q4kit.bench.room import Room, room
from q4kit.errors import UsageError
from q4kit.oracle.plan import Item, Options, clip, make_plan

_CONTEXT = "context_length"
_POOL = "max_total_num_tokens"


def _cause(info: Mapping[str, Any], found: Room) -> tuple[str, int]:
    """Return the limit that can be set: SGLang derives max_req_input_len from the smaller of context and pool."""
    if found.name in (_CONTEXT, _POOL):
        return found.name, found.limit
    known = [(int(info[name]), name) for name in (_CONTEXT, _POOL) if isinstance(info.get(name), int)]
    limit, name = min(known, default=(found.limit, found.name))
    return name, limit


def longest(items: Sequence[Item]) -> Item:
    """Return the item with the longest request: a decode segment is sent once more with its own tokens."""
    return max(items, key=_tokens)


def _tokens(item: Item) -> int:
    return item.length + item.generate


def check(info: Mapping[str, Any], items: Sequence[Item], remedies: Sequence[str]) -> None:
    """Raise `UsageError` when a request cannot fit, as far as /server_info (`info`) says what fits.

    Args:
        items: the plan.
        remedies: what the user may do beside starting the server with more room.
    """
    found = room(info, 1)
    if found is None or not items:
        return
    item = longest(items)
    needed = _tokens(item)
    if needed <= found.longest:
        return
    name, limit = _cause(info, found)
    shown = f"{name} is {limit}" + ("" if found.name == name else f" ({found.name} {found.limit})")
    # What the server keeps of it for itself stays the same when it grows.
    enough = limit + needed - found.longest
    more = f"a {name} of {enough} or more" + (f" (scripts/serve.sh: --context {enough})" if name == _CONTEXT else "")
    raise UsageError(
        f"prompt {item.prompt!r} does not fit: {item.name} sends {needed} tokens and asks for 1, the server's {shown}",
        remedy=", or ".join([*remedies, f"start the server with {more}"]) + ".",
    )


def remedies(
    info: Mapping[str, Any], prompts: dict[str, list[int]], ids: dict[str, list[int]], options: Options
) -> list[str]:
    """Return the options of `record` that make requests which fit; only such that do.

    Args:
        info: /server_info.
        prompts: what did not fit, as token ids.
        ids: the prompts of `--prompts ids`; empty where there are none.
        options: as given by the user.
    """
    found = room(info, 1)
    if found is None:
        return []
    choices = [("--prompts ids", ids, options)]
    # The last segment begins one token before a prompt's end.
    cut = found.longest - (options.decode_tokens - 1 if options.decode else 0)
    if cut > 0:
        choices.append((f"--max-prompt-tokens {cut}", prompts, replace(options, max_prompt_tokens=cut)))
    return [f"record with {text}" for text, chosen, how in choices if _fits(chosen, how, found.longest)]


def _fits(prompts: dict[str, list[int]], options: Options, room_tokens: int) -> bool:
    try:
        items = make_plan({name: clip(ids, options) for name, ids in prompts.items()}, options)
    except UsageError:
        return False
    return _tokens(longest(items)) <= room_tokens
