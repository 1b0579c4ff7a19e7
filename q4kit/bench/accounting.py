"""From the events of one stream to tokens, times and rates. Pure: no clock, no HTTP.

Rules, each of which a published benchmark has broken:

* tokens are counted by the server's cumulative completion count, never by chunks or by the requested length;
* where the server also sends token ids, both counts must be equal;
* the decode rate is `(n_last - n_first) / (t_last - t_first)`: a first chunk that carries k tokens does not count as
  decoding, and time to the first token is not part of it;
* the first token is the first delta of any kind: text, reasoning, tool call or bare ids;
* a run that ended early, was cut off, answered from a prefix cache or hit NaN has no rate. It has a named refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

NAN_MATCHED = "NaN happened"
"""What SGLang puts into `finish_reason.matched` when the logits hold a NaN; the reason itself reads `stop`."""


class Counting(StrEnum):
    """Where the token count comes from, best first. A count that is not exact gives no rate."""

    SERVER_AND_IDS = "server cumulative, cross-checked by ids"
    SERVER = "server cumulative"
    IDS = "output ids"
    USAGE_AT_END = "usage of the last event only"
    NONE = "none"


class Refusal(StrEnum):
    """Why a stream has no rate. The value is the sentence that the report prints."""

    NO_TOKENS = "the server sent no token"
    NO_COUNT = "the server sent neither a token count nor ids; chunks are not tokens"
    NO_RUNNING_COUNT = "only a final count was sent, so the tokens in the first chunk are unknown"
    COUNT_MISMATCH = "the server's count and its output ids disagree"
    COUNT_WENT_BACK = "the cumulative count went down"
    ONE_CHUNK = "all tokens came in one chunk: no time passed between tokens"
    EARLY_STOP = "generation stopped before the requested length"
    ABORTED = "the server aborted the request"
    DISCONNECTED = "the connection ended before a finish reason"
    NAN = "the logits held a NaN"
    CACHED_PREFIX = "part of the prompt came from the prefix cache"
    CACHE_UNKNOWN = "the server did not say how many prompt tokens came from the cache"
    PROMPT_LENGTH = "the server counted another prompt length than was asked for"
    CLOCK_WENT_BACK = "an event is older than the one before it"


Refuse = Callable[[Refusal, str], None]
"""Notes a refusal with the values that led to it."""


@dataclass(frozen=True)
class Delta:
    """One stream event, whatever protocol it came by.

    `t` is monotonic seconds; `completion_tokens` the server's cumulative count (None when absent); `ids_total` the
    number of output ids seen so far (None when the protocol sends none); `kinds` the non-empty parts of the event.
    """

    t: float
    completion_tokens: int | None = None
    ids_total: int | None = None
    kinds: frozenset[str] = frozenset()
    finish: Mapping[str, Any] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    accept_length: float | None = None


@dataclass(frozen=True)
class Expectation:
    """What a valid stream must look like. None means: do not check."""

    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None = 0
    cache_report_optional: bool = False
    """The OpenAI routes report cached tokens only with --enable-cache-report; silence is then no refusal."""


@dataclass(frozen=True)
class StreamSample:
    """One measured request. Times in seconds, rates in tokens per second; a rate is None when refused."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    first_chunk_tokens: int | None
    first_kind: str
    decode_s: float | None
    decode_rate: float | None
    prefill_rate: float | None
    tpot_s: float | None
    latency_s: float
    chunk_sizes: dict[int, int]
    counting: Counting
    finish: str
    accept_length: float | None
    refusals: tuple[Refusal, ...]
    details: tuple[str, ...] = field(default=())

    @property
    def valid(self) -> bool:
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        data = dict(self.__dict__)
        data["counting"] = self.counting.value
        data["refusals"] = [r.name for r in self.refusals]
        data["chunk_sizes"] = {str(k): v for k, v in self.chunk_sizes.items()}
        data["details"] = list(self.details)
        return data


def measure(start: float, deltas: Sequence[Delta], expect: Expectation, *, closed: bool = True) -> StreamSample:
    """Return the sample for a request sent at `start` (seconds, the clock of the deltas).

    `closed` is False when the connection broke; what arrived until then is kept in the sample and refused.
    """
    found: list[tuple[Refusal, str]] = []

    def refuse(refusal: Refusal, detail: str) -> None:
        found.append((refusal, detail))

    if any(later.t < earlier.t for earlier, later in pairwise(deltas)):
        refuse(Refusal.CLOCK_WENT_BACK, "event times are not monotonic")
    counts, counting = _counts(deltas, refuse)
    bearing = [(d, n) for d, n in zip(deltas, counts, strict=True) if d.kinds or (n or 0) > 0]
    final = deltas[-1] if deltas else None
    finish = next((d.finish for d in reversed(deltas) if d.finish), None)
    total = next((n for n in reversed(counts) if n is not None), None)
    prompt = _last(d.prompt_tokens for d in deltas)
    cached = _last(d.cached_tokens for d in deltas)

    _check_finish(finish, total, expect, closed, refuse)
    _check_prompt(prompt, cached, expect, refuse)

    if not bearing:
        refuse(Refusal.NO_TOKENS, f"{len(deltas)} events, none with a token")
    first, first_tokens = bearing[0] if bearing else (None, None)
    ttft = first.t - start if first else None
    decode_s, rate = _decode_span(bearing)
    countable = counting not in (Counting.NONE, Counting.USAGE_AT_END)
    if rate is None and countable and (total or 0) > 1:
        refuse(Refusal.ONE_CHUNK, f"{total} tokens at one instant")

    refusals = tuple(dict.fromkeys(r for r, _ in found))
    ok = not refusals
    return StreamSample(
        prompt_tokens=prompt,
        completion_tokens=total,
        cached_tokens=cached,
        ttft_s=ttft,
        first_chunk_tokens=first_tokens,
        first_kind=("+".join(sorted(first.kinds)) or "ids") if first else "",
        decode_s=decode_s,
        decode_rate=rate if ok else None,
        prefill_rate=prompt / ttft if ok and prompt and ttft else None,
        tpot_s=1 / rate if ok and rate else None,
        latency_s=(final.t - start) if final else 0.0,
        chunk_sizes=dict(sorted(_chunk_sizes([n for _, n in bearing]).items())),
        counting=counting,
        finish=finish_text(finish) if finish else "",
        accept_length=_last(d.accept_length for d in deltas),
        refusals=refusals,
        details=tuple(f"{r.name}: {detail}" for r, detail in found),
    )


def _decode_span(bearing: Sequence[tuple[Delta, int | None]]) -> tuple[float | None, float | None]:
    """Return (seconds, tokens per second) from the first token-bearing event to the last one that brought a token.

    A closing event without a new token may come later; it is not part of decoding.
    """
    first, first_tokens = bearing[0] if bearing else (None, None)
    if first is None or first_tokens is None:
        return None, None
    total = max(n for _, n in bearing if n is not None)
    last = next(d for d, n in bearing if n == total)
    seconds = last.t - first.t
    if total <= first_tokens or seconds <= 0:
        return None, None
    return seconds, (total - first_tokens) / seconds


def finish_text(finish: Mapping[str, Any]) -> str:
    """Return a finish reason as one string, e.g. `length` or `stop:NaN happened`."""
    matched = finish.get("matched")
    return f"{finish.get('type')}" + (f":{matched}" if matched is not None else "")


def _last(values: Iterable[Any]) -> Any:
    """Return the last value that is not None, else None."""
    result = None
    for value in values:
        if value is not None:
            result = value
    return result


def _counts(deltas: Sequence[Delta], refuse: Refuse) -> tuple[list[int | None], Counting]:
    """Return the cumulative token count at each delta and the rung it was taken from."""
    server = [d.completion_tokens for d in deltas]
    ids = [d.ids_total for d in deltas]
    have_server = [n for n in server if n is not None]
    have_ids = [n for n in ids if n is not None]
    for name, series in (("completion_tokens", have_server), ("output ids", have_ids)):
        if any(b < a for a, b in pairwise(series)):
            refuse(Refusal.COUNT_WENT_BACK, f"{name}: {series}")
    if have_server and have_ids:
        for at, (a, b) in enumerate(zip(server, ids, strict=True)):
            if a is not None and b is not None and a != b:
                refuse(Refusal.COUNT_MISMATCH, f"event {at}: server says {a} tokens, {b} ids arrived")
                break
        return server, Counting.SERVER_AND_IDS
    token_events = [d for d in deltas if d.kinds]
    if have_server:
        if len(have_server) < len(token_events):
            refuse(
                Refusal.NO_RUNNING_COUNT,
                f"{len(token_events)} events with content, {len(have_server)} with a count",
            )
            return server, Counting.USAGE_AT_END
        return server, Counting.SERVER
    if have_ids:
        return ids, Counting.IDS
    if token_events:
        refuse(Refusal.NO_COUNT, f"{len(token_events)} chunks")
    return server, Counting.NONE


def _check_finish(
    finish: Mapping[str, Any] | None, total: int | None, expect: Expectation, closed: bool, refuse: Refuse
) -> None:
    """Refuse everything but `length` at exactly the requested count."""
    if finish is None:
        refuse(Refusal.DISCONNECTED, f"{'stream closed' if closed else 'connection lost'} after {total or 0} tokens")
        return
    kind = finish.get("type")
    if NAN_MATCHED in str(finish.get("matched")) or NAN_MATCHED in str(finish.get("message")):
        refuse(Refusal.NAN, f"finish_reason {dict(finish)} after {total or 0} tokens")
    elif kind == "abort":
        refuse(Refusal.ABORTED, str(finish.get("message") or dict(finish)))
    elif kind != "length":
        refuse(
            Refusal.EARLY_STOP,
            f"finish_reason {finish_text(finish)} after {total} of {expect.completion_tokens} tokens",
        )
    elif total is not None and total != expect.completion_tokens:
        refuse(Refusal.EARLY_STOP, f"{total} tokens, {expect.completion_tokens} asked for")


def _check_prompt(prompt: int | None, cached: int | None, expect: Expectation, refuse: Refuse) -> None:
    if expect.prompt_tokens is not None and prompt != expect.prompt_tokens:
        refuse(Refusal.PROMPT_LENGTH, f"server counted {prompt}, asked for {expect.prompt_tokens}")
    if expect.cached_tokens is None:
        return
    if cached is None:
        if not expect.cache_report_optional:
            refuse(Refusal.CACHE_UNKNOWN, "no cached_tokens in the answer")
    elif cached != expect.cached_tokens:
        refuse(Refusal.CACHED_PREFIX, f"cached_tokens {cached}, expected {expect.cached_tokens}")


def _chunk_sizes(counts: Sequence[int | None]) -> Counter[int]:
    """Return how many chunks brought how many tokens (events without new tokens excluded)."""
    sizes: Counter[int] = Counter()
    before = 0
    for n in counts:
        if n is not None and n > before:
            sizes[n - before] += 1
            before = n
    return sizes
