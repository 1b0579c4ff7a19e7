"""Run the speed bench against a server: requests out, samples in. No printing, no statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from q4kit.bench import machine
from q4kit.bench.accounting import NAN_MATCHED, Delta, Expectation, StreamSample, measure
from q4kit.bench.domains import Question
from q4kit.bench.machine import PageCache, Snapshot
from q4kit.bench.prompts import exact_prompt, repeat_seed
from q4kit.bench.room import room
from q4kit.bench.stream import chat_deltas, native_deltas
from q4kit.bench.texts import TextKind
from q4kit.errors import ServerError, UsageError
from q4kit.server.client import GREEDY, StreamEvent

PUBLISHED_CONTEXTS = (101, 421, 1701, 6821, 10001)
"""Prompt lengths of the published single-stream table, tokens."""

Progress = Callable[[str], None]


class Server(Protocol):
    """What the bench needs from `q4kit.server.client.Client`."""

    base_url: str

    def tokenize(self, text: str) -> list[int]: ...
    def tokenize_chat(self, messages: Sequence[Mapping[str, str]], **chat: Any) -> list[int]: ...
    def flush_cache(self) -> None: ...
    def server_info(self) -> dict[str, Any]: ...
    def models(self) -> list[str]: ...
    def stream_generate(self, payload: Mapping[str, Any]) -> Iterable[StreamEvent]: ...
    def openai_stream(self, path: str, payload: Mapping[str, Any]) -> Iterable[StreamEvent]: ...


class Api(StrEnum):
    """Route a request takes. `native` sends token ids and gets ids back; `chat` goes through the parsers."""

    NATIVE = "native"
    CHAT = "chat"


class Ended(StrEnum):
    """How a run came to its end; anything but COMPLETE makes the result partial."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    FAULT = "fault"


@dataclass(frozen=True)
class BenchConfig:
    """What to measure. Lengths in tokens."""

    contexts: tuple[int, ...] = PUBLISHED_CONTEXTS
    kinds: tuple[TextKind, ...] = (TextKind.FILLER,)
    tokens: int = 200
    repeats: int = 5
    seed: int = 0
    warmup: bool = True
    resend: bool = True
    """Send the last prompt of a point a second time and keep what the prefix cache makes of it, apart."""
    page_cache: str = "as-is"
    """`as-is`, `cold` (evict the table files before each repeat) or `warm` (read them before each point)."""
    table: tuple[Path, ...] = ()
    settle_s: float = 0.0
    """Pause before each repeat, seconds."""

    def __post_init__(self) -> None:
        for name in ("tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.tokens < 2:
            raise UsageError("a decode rate needs at least 2 tokens, found 1")
        if self.page_cache not in ("as-is", "cold", "warm"):
            raise UsageError(f"page cache must be as-is, cold or warm, found {self.page_cache!r}")
        if self.page_cache != "as-is" and not self.table:
            raise UsageError(
                f"--page-cache {self.page_cache} needs the table's files", remedy="name them with --table PATH"
            )


@dataclass
class Repeat:
    """One measured request with the machine's state around it."""

    index: int
    sample: StreamSample
    before: Snapshot
    after: Snapshot
    load: dict[str, Any] = field(default_factory=dict)
    """GPU clocks, power, temperature and PCIe link while the request ran: [least, greatest] a field."""

    @property
    def page_cache(self) -> PageCache:
        return machine.page_cache_state(self.before.table_resident)

    @property
    def disk_read_bytes(self) -> int | None:
        a, b = self.before.disk_read_bytes, self.after.disk_read_bytes
        return None if a is None or b is None else b - a

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            **self.sample.to_json(),
            "page_cache": self.page_cache.value,
            "disk_read_bytes": self.disk_read_bytes,
            "machine_before": self.before.to_json(),
            "machine_after": self.after.to_json(),
            "machine_under_load": self.load,
        }


@dataclass
class Point:
    """All repeats of one context length and text kind."""

    context: int
    kind: TextKind
    tokens: int
    repeats: list[Repeat] = field(default_factory=list)
    warmup: StreamSample | None = None
    resend: StreamSample | None = None

    @property
    def valid(self) -> list[Repeat]:
        return [r for r in self.repeats if r.sample.valid]


@dataclass
class DomainAnswer:
    """One request of the domain run."""

    domain: str
    index: int
    sample: StreamSample


@dataclass
class RunResult:
    """Everything measured so far. `ended` is set even when an exception cut the run short."""

    points: list[Point] = field(default_factory=list)
    answers: list[DomainAnswer] = field(default_factory=list)
    ended: Ended = Ended.COMPLETE
    fault: str = ""
    remedy: str = ""


def sampling(tokens: int) -> dict[str, Any]:
    """Return explicit greedy sampling parameters with `ignore_eos` for `tokens` tokens."""
    return {**GREEDY, "ignore_eos": True, "max_new_tokens": tokens}


def one_request(
    server: Server,
    ids: list[int],
    tokens: int,
    expect: Expectation,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> StreamSample:
    """Return the sample of one native request; a broken stream gives a refused sample, then raises.

    Raises:
        BrokenStreamError: the server went away or failed the request; `sample` holds what had arrived.
    """
    start = clock()
    events = server.stream_generate({"input_ids": ids, "sampling_params": sampling(tokens)})
    return _consume(start, native_deltas(events), expect)


def one_chat(
    server: Server,
    messages: Sequence[Mapping[str, str]],
    tokens: int,
    expect: Expectation,
    *,
    model: str,
    clock: Callable[[], float] = time.monotonic,
) -> StreamSample:
    """Return the sample of one chat completion (usage on every chunk is asked for)."""
    payload = {
        "model": model,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    start = clock()
    return _consume(start, chat_deltas(server.openai_stream("/v1/chat/completions", payload)), expect)


class BrokenStreamError(ServerError):
    """A stream that ended in a server fault; `sample` is refused and holds what had arrived."""

    def __init__(self, error: ServerError, sample: StreamSample) -> None:
        super().__init__(str(error), remedy=error.remedy)
        self.sample = sample


def _consume(start: float, deltas: Iterable[Delta], expect: Expectation) -> StreamSample:
    seen: list[Delta] = []
    try:
        for delta in deltas:
            seen.append(delta)  # one by one: what arrived before a fault is kept
    except ServerError as error:
        if NAN_MATCHED in str(error):
            # Not a fault of the connection: the model computed NaN, which is a result and a refusal.
            t = seen[-1].t if seen else start
            seen.append(Delta(t=t, finish={"type": "stop", "matched": NAN_MATCHED}))
            return measure(start, seen, expect)
        raise BrokenStreamError(error, measure(start, seen, expect, closed=False)) from error
    return measure(start, seen, expect)


def check_room(info: Mapping[str, Any], context: int, tokens: int) -> None:
    """Raise UsageError when a context and its tokens cannot fit, as far as the server says what fits."""
    found = room(info, tokens)
    if found is not None and context > found.longest:
        raise UsageError(
            f"context {context} + {tokens} tokens does not fit: the server's {found.name} is {found.limit}",
            remedy=f"the longest context that fits is {max(found.longest, 0)}; leave this one out, or start the server "
            f"with a larger {found.name}",
        )


def run_contexts(
    server: Server,
    config: BenchConfig,
    result: RunResult,
    *,
    progress: Progress = lambda _: None,
    look: Callable[..., Snapshot] = machine.snapshot,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RunResult:
    """Measure every context x kind into `result` and return it; Ctrl-C and server faults end it early, kept."""
    info = server.server_info()
    for context in config.contexts:
        check_room(info, context, config.tokens)
    local_table = config.table if machine.is_local(server.base_url) else ()
    try:
        for kind, context in itertools.product(config.kinds, config.contexts):
            point = Point(context, kind, config.tokens)
            result.points.append(point)
            _run_point(server, config, point, local_table, progress, look, sleep, clock)
    except KeyboardInterrupt:
        result.ended = Ended.INTERRUPTED
    except ServerError as error:
        result.ended, result.fault, result.remedy = Ended.FAULT, str(error), error.remedy
    return result


def _run_point(
    server: Server,
    config: BenchConfig,
    point: Point,
    table: Sequence[Path],
    progress: Progress,
    look: Callable[..., Snapshot],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    expect = Expectation(point.context, config.tokens)

    def prompt(repeat: int | str) -> list[int]:
        return exact_prompt(
            server.tokenize, point.kind, repeat_seed(config.seed, point.context, repeat), point.context
        ).ids

    name = point_name(point.context, point.kind)
    if config.page_cache == "warm":
        machine.warm(table)
    if config.warmup:
        progress(f"{name}: warm-up")
        point.warmup = one_request(server, prompt("warmup"), config.tokens, expect, clock=clock)
    ids: list[int] = []
    for index in range(config.repeats):
        ids = prompt(index)
        server.flush_cache()
        if config.page_cache == "cold":
            machine.evict(table)
        sleep(config.settle_s)
        before = look(table)
        watch = machine.GpuWatch()
        try:
            with watch:
                sample = one_request(server, ids, config.tokens, expect, clock=clock)
        except BrokenStreamError as error:
            point.repeats.append(Repeat(index, error.sample, before, look(table), watch.summary()))
            raise
        point.repeats.append(Repeat(index, sample, before, look(table), watch.summary()))
        progress(f"{name}: repeat {index + 1}/{config.repeats}: {brief(sample)}")
    if config.resend:
        # The same prompt once more: shows beside the honest number what a prefix cache would have made of it.
        point.resend = one_request(
            server, ids, config.tokens, Expectation(point.context, config.tokens, None), clock=clock
        )


def run_domains(
    server: Server,
    questions: Sequence[Question],
    tokens: int,
    result: RunResult,
    *,
    api: Api = Api.NATIVE,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    chat: Mapping[str, Any] | None = None,
) -> RunResult:
    """Measure one request a question into `result`; the chat template is the server's own on both routes."""
    try:
        model = server.models()[0] if api is Api.CHAT else ""
        for number, question in enumerate(questions, 1):
            messages = [{"role": "user", "content": question.text}]
            ids = server.tokenize_chat(messages, **(chat or {}))
            server.flush_cache()
            expect = Expectation(len(ids), tokens, cache_report_optional=api is Api.CHAT)
            try:
                if api is Api.NATIVE:
                    sample = one_request(server, ids, tokens, expect, clock=clock)
                else:
                    sample = one_chat(server, messages, tokens, expect, model=model, clock=clock)
            except BrokenStreamError as error:
                result.answers.append(DomainAnswer(question.domain, question.index, error.sample))
                raise
            result.answers.append(DomainAnswer(question.domain, question.index, sample))
            progress(f"{question.domain} {number}/{len(questions)}: {brief(sample)}")
    except KeyboardInterrupt:
        result.ended = Ended.INTERRUPTED
    except ServerError as error:
        result.ended, result.fault, result.remedy = Ended.FAULT, str(error), error.remedy
    return result


def point_name(context: int, kind: TextKind) -> str:
    return f"pp{context}+tg ({kind.value})"


def brief(sample: StreamSample) -> str:
    """Return one line about a sample, for progress output."""
    if sample.refusals:
        return "refused: " + ", ".join(r.name for r in sample.refusals)
    return f"prefill {sample.prefill_rate:.1f} tok/s, decode {sample.decode_rate:.2f} tok/s, ttft {sample.ttft_s:.3f} s"
