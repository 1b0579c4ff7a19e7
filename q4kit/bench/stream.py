"""Client events to `Delta`s, for the native route and the OpenAI chat route. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from q4kit.bench.accounting import Delta
from q4kit.server.client import StreamEvent

_CHAT_KINDS = {"content": "content", "reasoning_content": "reasoning", "tool_calls": "tool_calls"}


def native_deltas(events: Iterable[StreamEvent]) -> Iterable[Delta]:
    """Yield one delta an event of /generate; ids are counted as they arrive."""
    ids = 0
    for event in events:
        ids += len(event.output_ids)
        kinds = {name for name, part in (("text", event.text_delta), ("ids", event.output_ids)) if part}
        meta = event.meta
        yield Delta(
            t=event.t_monotonic,
            completion_tokens=event.completion_tokens,
            ids_total=ids,
            kinds=frozenset(kinds),
            finish=_finish(meta.get("finish_reason"), None),
            prompt_tokens=meta.get("prompt_tokens"),
            cached_tokens=meta.get("cached_tokens"),
            accept_length=meta.get("spec_accept_length"),
        )


def chat_deltas(events: Iterable[StreamEvent]) -> Iterable[Delta]:
    """Yield one delta an event of /v1/chat/completions or /v1/completions.

    A role announcement with empty content is no token. Reasoning and tool-call parts are: time to first token
    must not wait for the first `content`.
    """
    for event in events:
        raw = event.raw or event.meta
        choices = raw.get("choices") or [{}]
        choice = choices[0]
        delta = choice.get("delta") or {}
        kinds = {name for key, name in _CHAT_KINDS.items() if delta.get(key)}
        if choice.get("text"):
            kinds.add("text")
        usage = raw.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        meta = choice.get("meta_info") or raw.get("meta_info") or {}
        yield Delta(
            t=event.t_monotonic,
            completion_tokens=usage.get("completion_tokens"),
            ids_total=None,
            kinds=frozenset(kinds),
            finish=_finish(choice.get("finish_reason"), choice.get("matched_stop")),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            accept_length=meta.get("spec_accept_length"),
        )


def _finish(reason: str | Mapping[str, Any] | None, matched: Any) -> Mapping[str, Any] | None:
    """Return the finish reason in the native form `{"type": ..., "matched": ...}`."""
    if reason is None:
        return None
    if isinstance(reason, Mapping):
        return reason
    return {"type": reason, **({"matched": matched} if matched is not None else {})}
