"""A server of known truth on a virtual clock, behind the real client.

Only the socket is replaced: `AdversaryTransport` is mounted into the `requests` session of a real `Client`, so URLs,
status codes, SSE parsing, chunk borders and error handling are the client's own. A stream is a script of `(seconds
to wait, bytes)`; reading it advances the clock, so timing assertions are exact and the tests take no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import requests
from requests.adapters import BaseAdapter

from q4kit.server.client import Client

BASE_URL = "http://127.0.0.1:9"


@dataclass
class VirtualClock:
    """Seconds that pass only when told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


Step = tuple[float, bytes]
"""Wait this many seconds, then these bytes arrive."""


BREAK = b"\x00cut"
"""A step with these bytes cuts the connection."""


class _Raw:
    """The part of urllib3's response that requests reads: an iterator over the script."""

    def __init__(self, steps: list[Step], clock: VirtualClock) -> None:
        self.steps, self.clock = steps, clock

    def stream(self, amt: int | None = None, decode_content: bool = True) -> Iterator[bytes]:
        from urllib3.exceptions import ProtocolError

        for wait, data in self.steps:
            self.clock.sleep(wait)
            if data == BREAK:
                raise ProtocolError("Connection broken: IncompleteRead", None)
            yield data

    def read(self, *_: Any, **__: Any) -> bytes:
        return b"".join(self.stream())

    def close(self) -> None: ...
    def release_conn(self) -> None: ...


Handler = Callable[[dict[str, Any]], "Reply"]


@dataclass
class Reply:
    """Status and body (JSON value or a scripted stream)."""

    body: Any = None
    steps: list[Step] | None = None
    status: int = 200


@dataclass
class AdversaryTransport(BaseAdapter):
    """Answers requests by path; keeps every payload in `seen`."""

    clock: VirtualClock
    handlers: dict[str, Handler]
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    down: bool = False

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:  # type: ignore[override]
        path = str(request.path_url).split("?")[0]
        payload = json.loads(request.body) if request.body else {}
        self.seen.append((path, payload))
        if self.down:
            raise requests.ConnectionError("Connection refused")
        reply = self.handlers[path](payload) if path in self.handlers else Reply({"error": "no such route"}, None, 404)
        response = requests.Response()
        response.status_code = reply.status
        response.url = str(request.url)
        response.request = request
        response.encoding = "utf-8"
        steps = reply.steps if reply.steps is not None else [(0.0, json.dumps(reply.body).encode())]
        response.raw = _Raw(steps, self.clock)
        return response

    def close(self) -> None: ...


def sse(*events: dict[str, Any] | str) -> bytes:
    """Return events as server-sent bytes; a string is sent as it is (e.g. `[DONE]`)."""
    return b"".join(
        b"data: " + (e if isinstance(e, str) else json.dumps(e, ensure_ascii=False)).encode() + b"\n\n" for e in events
    )


DONE = "[DONE]"


class FakeTokenizer:
    """One id per UTF-8 byte: exact both ways, no files, and every length can be hit."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@dataclass
class Adversary:
    """A fake server with the routes the tools use; tests replace single handlers."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    info: dict[str, Any] = field(default_factory=lambda: {"version": "0.5.23", "context_length": 400_000})
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def __post_init__(self) -> None:
        self.transport = AdversaryTransport(
            self.clock,
            {
                "/health": lambda _: Reply({}),
                "/server_info": lambda _: Reply(self.info),
                "/model_info": lambda _: Reply({"model_path": "fake"}),
                "/v1/models": lambda _: Reply({"data": [{"id": "fake"}]}),
                "/flush_cache": lambda _: Reply({}),
                "/tokenize": self._tokenize,
                "/detokenize": lambda p: Reply({"text": self.tokenizer.decode(p["tokens"])}),
            },
        )

    @property
    def handlers(self) -> dict[str, Handler]:
        return self.transport.handlers

    def client(self) -> Client:
        client = Client(BASE_URL, clock=self.clock)
        client._session.mount("http://", self.transport)
        return client

    def payloads(self, path: str) -> list[dict[str, Any]]:
        """Return what was sent to `path`, oldest first."""
        return [payload for p, payload in self.transport.seen if p == path]

    def _tokenize(self, payload: dict[str, Any]) -> Reply:
        if "messages" in payload:
            text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in payload["messages"])
            return Reply({"tokens": self.tokenizer.encode(text + "<|im_start|>assistant\n")})
        return Reply({"tokens": self.tokenizer.encode(payload["prompt"])})


@dataclass
class StreamScript:
    """A native /generate stream of known truth: chunk sizes in tokens, waits in seconds.

    True prefill is `ttft` seconds, true decode one chunk every `gap` seconds.
    """

    chunks: list[int]
    ttft: float = 0.5
    gap: float = 0.1
    cached: int | None = 0
    finish: dict[str, Any] | None = field(default_factory=lambda: {"type": "length", "length": 0})
    count_field: bool = True
    ids_field: bool = True
    spec_accept_length: float | None = None
    tail_wait: float = 0.0
    """A closing event without tokens, this many seconds after the last token."""
    prompt_extra: int = 0
    """Tokens that the server adds to the prompt, as a chat template or a BOS does."""

    def reply(self, payload: dict[str, Any]) -> Reply:
        prompt = len(payload["input_ids"]) + self.prompt_extra
        total, steps = 0, []
        events = list(self.chunks)
        for number, size in enumerate(events):
            total += size
            last = number == len(events) - 1 and not self.tail_wait
            steps.append((self.ttft if number == 0 else self.gap, sse(self._event(prompt, total, last))))
        if self.tail_wait:
            steps.append((self.tail_wait, sse(self._event(prompt, total, True))))
        if self.finish is not None:
            steps.append((0.0, sse(DONE)))
        else:
            steps.append((0.0, BREAK))
        return Reply(steps=steps)

    def _event(self, prompt: int, total: int, last: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {"prompt_tokens": prompt, "finish_reason": self.finish if last else None}
        if self.cached is not None:
            meta["cached_tokens"] = self.cached
        if self.count_field:
            meta["completion_tokens"] = total
        if self.spec_accept_length is not None:
            meta["spec_accept_length"] = self.spec_accept_length
        return {"text": "x" * total, "output_ids": list(range(total)) if self.ids_field else [], "meta_info": meta}
