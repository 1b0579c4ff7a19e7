"""A loopback server that answers like SGLang's native route, for answers a real server cannot be made to give.

Its "model" is a hash: the logprob of a token depends on every token before it, so a shifted or truncated
context gives other numbers, as in a real model. `spoil` changes an answer before it is sent.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB = 512
Spoil = Callable[[dict[str, Any], dict[str, Any]], None]
"""(request payload, answer) -> None; changes the answer."""


def distribution(context: list[int], noise: float, run: int) -> np.ndarray:
    """Return log-probabilities, float32, shape [VOCAB], after `context`."""
    return _distribution(tuple(context[-64:]), noise, run)


@lru_cache(maxsize=20_000)
def _distribution(context: tuple[int, ...], noise: float, run: int) -> np.ndarray:
    seed = 0
    for token in context:
        seed = (seed * 1_000_003 + token + 1) % (1 << 61)
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB)
    if noise:
        logits = logits + noise * np.random.default_rng([seed, run]).normal(size=VOCAB)
    return np.float32(logits - np.log(np.exp(logits).sum()))


class FakeServer:
    """State of one fake server."""

    def __init__(self) -> None:
        self.spoil: Spoil = lambda payload, answer: None
        self.noise = 0.0
        self.run = 0
        self.requests: list[dict[str, Any]] = []
        self.flushes = 0
        self.fail_after: int | None = None
        self.token_shift = 0
        self.base_url = ""
        self.limits: dict[str, int] = {}
        """What /server_info says of the room for a request; such a request is refused, as by SGLang."""

    def tokenize(self, text: str) -> list[int]:
        return [(byte + self.token_shift) % 256 for byte in text.encode()]

    def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(payload)
        ids, top = list(payload["input_ids"]), payload["top_logprobs_num"]
        start = payload["logprob_start_len"]
        entries: list[Any] = [[None, ids[start], None]]
        tops: list[Any] = [None]
        for pos in range(start + 1, len(ids)):
            table = distribution(ids[:pos], self.noise, self.run)
            entries.append([float(table[ids[pos]]), ids[pos], None])
            tops.append(self._top(table, top))
        out, out_tops, sequence = [], [], list(ids)
        for _ in range(payload["sampling_params"]["max_new_tokens"]):
            table = distribution(sequence, self.noise, self.run)
            token = int(table.argmax())
            out.append([float(table[token]), token, None])
            out_tops.append(self._top(table, top))
            sequence.append(token)
        answer = {
            "text": "",
            "output_ids": sequence[len(ids) :],
            "meta_info": {
                "finish_reason": {"type": "length", "length": len(out)},
                "prompt_tokens": len(ids),
                "completion_tokens": len(out),
                "cached_tokens": 0,
                "input_token_logprobs": entries,
                "input_top_logprobs": tops,
                "output_token_logprobs": out,
                "output_top_logprobs": out_tops,
            },
        }
        self.spoil(payload, answer)
        return answer

    @staticmethod
    def _top(table: np.ndarray, count: int) -> list[list[Any]]:
        return [[float(table[token]), int(token), None] for token in np.argsort(-table, kind="stable")[:count]]


def _handler(state: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _send(self, value: Any, status: int = 200) -> None:
            body = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            routes: dict[str, Any] = {
                "/health": "",
                "/server_info": {"version": "0.5.23", "device": "cpu", "model_path": "fake", **state.limits},
                "/model_info": {"model_path": "fake"},
                "/v1/models": {"data": [{"id": "fake"}]},
            }
            self._send(routes.get(self.path, "not found"), 200 if self.path in routes else 404)

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            path = self.path.partition("?")[0]
            if path == "/flush_cache":
                state.flushes += 1
                self._send("flushed")
            elif path == "/tokenize":
                self._send({"tokens": state.tokenize(payload["prompt"])})
            elif path == "/generate":
                if state.fail_after is not None and len(state.requests) >= state.fail_after:
                    self.close_connection = True
                    return
                tokens = len(payload["input_ids"]) + payload["sampling_params"]["max_new_tokens"]
                if tokens > state.limits.get("context_length", tokens):
                    self._send("longer than the model's context length", 400)
                    return
                self._send(state.generate(payload))
            elif path == "/v1/completions":
                self._send(self._completion(payload))
            else:
                self._send("not found", 404)

        def _completion(self, payload: dict[str, Any]) -> dict[str, Any]:
            ids = payload["prompt"]
            values = [None] + [
                float(distribution(ids[:pos], state.noise, state.run)[ids[pos]]) for pos in range(1, len(ids))
            ]
            answer = {
                "choices": [{"text": "", "finish_reason": "length", "logprobs": {"token_logprobs": [*values, -1.0]}}],
                "usage": {"prompt_tokens": len(ids)},
            }
            state.spoil(payload, answer)
            return answer

    return Handler


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Yield a running fake server on a free loopback port."""
    state = FakeServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.base_url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


assert math.isclose(float(np.exp(distribution([1, 2], 0.0, 0)).sum()), 1.0, rel_tol=1e-5)
