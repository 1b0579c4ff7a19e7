"""HTTP client of a running SGLang server: native and OpenAI routes, streams, one kind of failure.

Every failure is a `ServerError` that names the URL, the status or transport fault, the server's own
message and what to do. Nothing is retried: a measurement that needed a second try is a different
measurement. Nothing is printed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import requests

from q4kit.errors import ServerError

NAN_FINISH_TEXT = "NaN happened"
"""`finish_reason.matched` with which SGLang reports NaN logits (as an ordinary "stop")."""

GREEDY: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "no_stop_trim": True,
}
"""Greedy decoding with every parameter stated: what is left out, SGLang takes from the model's
`generation_config.json`, so two checkpoints of one model would be sampled differently."""

API_KEY_VARIABLE = "Q4_API_KEY"
"""Environment variable with the key of the server that a tool asks. Not an option: the process list would show it."""
_CONNECT_TIMEOUT_S = 10.0
_MESSAGE_LIMIT = 600


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event, as it arrived."""

    t_monotonic: float
    """`time.monotonic()` when the event's last byte was read, seconds."""
    text_delta: str
    """Text new in this event ("" while the server holds back an incomplete UTF-8 sequence)."""
    output_ids: list[int] = field(default_factory=list)
    """Token ids new in this event (empty where the route does not send ids)."""
    completion_tokens: int | None = None
    """Tokens generated so far by the server's own count; None where the event carries none."""
    meta: dict[str, Any] = field(default_factory=dict)
    """`meta_info` on the native route; on OpenAI routes the whole chunk."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The decoded event, untouched."""


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header that shows a server its key; none without a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def check_finish(meta: Mapping[str, Any], *, url: str) -> str:
    """Return the finish type of a completed answer; NaN logits and aborts raise `ServerError`."""
    reason = meta.get("finish_reason")
    if isinstance(reason, str):
        return reason
    if not isinstance(reason, Mapping) or "type" not in reason:
        raise ServerError(
            f"{url}: answer without a finish reason (found {reason!r}, expected an object with 'type')",
            remedy="The request did not complete; read the server's log.",
        )
    if reason.get("matched") == NAN_FINISH_TEXT:
        raise ServerError(
            f"{url}: the model produced NaN logits (finish_reason {dict(reason)!r})",
            remedy="The weights, a kernel or the KV cache is broken; no number of this server can be used.",
        )
    if reason["type"] == "abort":
        raise ServerError(
            f"{url}: the server aborted the request: {reason.get('message', 'no message')}",
            remedy="Read the server's log; a context overflow and a full queue both end like this.",
        )
    return str(reason["type"])


class Client:
    """A session with one server; one instance a thread.

    Args:
        base_url: e.g. "http://127.0.0.1:30000".
        timeout_s: longest silence on the socket before a request counts as failed, seconds. A prefill
            of 262,144 tokens sends nothing until it is done, so this is minutes, not seconds.
        api_key: sent as a bearer token; default: API_KEY_VARIABLE of the environment, where it is set.
        clock: monotonic clock of stream events, seconds; tests replace it.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 600.0,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ServerError(
                f"base URL {base_url!r} has no scheme",
                remedy="Write it in full, e.g. http://127.0.0.1:30000.",
                exit_code=2,
            )
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._clock = clock
        self._session = requests.Session()
        # A proxy variable of the shell must never sit between the tool and a loopback server.
        self._session.trust_env = False
        self._session.headers.update(authorization(api_key or os.environ.get(API_KEY_VARIABLE)))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    # -- state of the server ------------------------------------------------------------------

    def health(self) -> bool:
        """Return True when the server answers /health with 200; anything else raises."""
        self._request("GET", "/health")
        return True

    def server_info(self) -> dict[str, Any]:
        """Return the server's resolved arguments and state (`/server_info`)."""
        return self._json_object("GET", "/server_info")

    def model_info(self) -> dict[str, Any]:
        """Return model path, tokenizer path and architecture (`/model_info`)."""
        return self._json_object("GET", "/model_info")

    def models(self) -> list[str]:
        """Return the model names the OpenAI routes accept (`/v1/models`)."""
        data = self._json_object("GET", "/v1/models").get("data")
        if not isinstance(data, list) or not data:
            raise ServerError(f"{self.base_url}/v1/models: no model listed (found {data!r})")
        return [str(entry["id"]) for entry in data]

    def flush_cache(self, wait_s: float = 10.0) -> None:
        """Empty the prefix cache; waits up to `wait_s` for running requests, then raises."""
        self._request("POST", "/flush_cache", params={"timeout": wait_s})

    def freeze_gc(self) -> None:
        """Move what the server's processes hold now out of the garbage collector's sight."""
        self._request("POST", "/freeze_gc")

    # -- one answer ---------------------------------------------------------------------------

    def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the native /generate route; NaN and aborted answers raise."""
        answer = self._json_object("POST", "/generate", payload={**payload, "stream": False})
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise ServerError(
                f"{self.base_url}/generate: answer without meta_info (keys found: {sorted(answer)})",
                remedy="The URL must be an SGLang server; other servers are reached by their OpenAI route.",
            )
        check_finish(meta, url=f"{self.base_url}/generate")
        return answer

    def openai(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON answer of an OpenAI route such as /v1/completions."""
        answer = self._json_object("POST", path, payload={**payload, "stream": False})
        if not answer.get("choices"):
            raise ServerError(f"{self.base_url}{path}: answer without choices (keys: {sorted(answer)})")
        self._check_openai_finish(answer, path)
        return answer

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text` under the server's tokenizer (no special tokens by default)."""
        payload = {"prompt": text, "add_special_tokens": add_special_tokens}
        tokens = self._json_object("POST", "/tokenize", payload=payload).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerError(f"{self.base_url}/tokenize: no list of token ids (found {tokens!r:.80})")
        return tokens

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]], **chat: Any) -> list[int]:
        """Return the ids of `messages` rendered by the server's chat template, as for a chat completion.

        `chat` passes what changes the rendering, e.g. `chat_template_kwargs={"enable_thinking": False}`.
        """
        payload = {"messages": list(messages), **chat}
        tokens = self._json_object("POST", "/tokenize", payload=payload).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerError(f"{self.base_url}/tokenize: no list of token ids (found {tokens!r:.80})")
        return tokens

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids` under the server's tokenizer, special tokens kept."""
        payload = {"tokens": ids, "skip_special_tokens": False}
        text = self._json_object("POST", "/detokenize", payload=payload).get("text")
        if not isinstance(text, str):
            raise ServerError(f"{self.base_url}/detokenize: no text (found {text!r:.80})")
        return text

    # -- streams ------------------------------------------------------------------------------

    def stream_generate(self, payload: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield the events of a native stream.

        SGLang sends cumulative text and ids unless it runs with --incremental-streaming-output; both
        forms come out as deltas. `completion_tokens` is the server's cumulative count.
        """
        text, seen = "", 0
        for at, event in self._events("/generate", {**payload, "stream": True}):
            meta = event.get("meta_info")
            if not isinstance(meta, dict):
                raise ServerError(f"{self.base_url}/generate: stream event without meta_info (keys: {sorted(event)})")
            full = event.get("text") or ""
            ids = event.get("output_ids") or []
            count = meta.get("completion_tokens")
            cumulative = isinstance(count, int) and len(ids) == count
            if cumulative:
                delta, new_ids = full.removeprefix(text), ids[seen:]
                text, seen = full, len(ids)
            else:
                delta, new_ids = full, ids
            if meta.get("finish_reason") is not None:
                check_finish(meta, url=f"{self.base_url}/generate")
            yield StreamEvent(at, delta, list(new_ids), count, meta, event)

    def openai_stream(self, path: str, payload: Mapping[str, Any]) -> Iterator[StreamEvent]:
        """Yield the events of an OpenAI stream; reasoning text counts as text.

        `completion_tokens` comes from `usage`, which a server sends on every chunk, on the last one,
        or never: ask for it with `"stream_options": {"include_usage": True}`.
        """
        for at, event in self._events(path, {**payload, "stream": True}):
            self._check_openai_finish(event, path)
            choices = event.get("choices") or [{}]
            delta = choices[0].get("delta") or {}
            text = choices[0].get("text") or ((delta.get("reasoning_content") or "") + (delta.get("content") or ""))
            usage = event.get("usage") or {}
            yield StreamEvent(at, text, [], usage.get("completion_tokens"), event, event)

    # -- plumbing -----------------------------------------------------------------------------

    def _check_openai_finish(self, answer: Mapping[str, Any], path: str) -> None:
        for choice in answer.get("choices") or ():
            if choice.get("matched_stop") == NAN_FINISH_TEXT:
                check_finish(
                    {"finish_reason": {"type": "stop", "matched": NAN_FINISH_TEXT}},
                    url=f"{self.base_url}{path}",
                )

    def _json_object(self, method: str, path: str, *, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
        response = self._request(method, path, payload=payload)
        url = f"{self.base_url}{path}"
        try:
            # orjson on the server side writes non-finite floats as null, so NaN cannot hide here.
            decoded = json.loads(response.content)
        except ValueError as error:
            raise ServerError(
                f"{url}: not JSON ({error}); the answer begins {response.text[:80]!r}",
                remedy="Is this URL an SGLang server?",
            ) from error
        if not isinstance(decoded, dict):
            raise ServerError(f"{url}: a JSON object was expected, found {type(decoded).__name__}")
        return decoded

    def _request(
        self,
        method: str,
        path: str,
        *,
        payload: Mapping[str, Any] | None = None,
        params: Mapping[str, float] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        url = f"{self.base_url}{path}"
        try:
            response = self._session.request(
                method,
                url,
                json=payload,
                params=params,
                stream=stream,
                timeout=(_CONNECT_TIMEOUT_S, self.timeout_s),
            )
        except requests.RequestException as error:
            raise self._transport_error(url, error) from error
        if response.status_code != 200:
            raise ServerError(
                f"{url}: HTTP {response.status_code}: {_server_message(response)}",
                remedy=_remedy(response.status_code, path),
            )
        return response

    def _events(self, path: str, payload: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield (arrival time, decoded event) until `[DONE]`; a stream cut short raises."""
        url = f"{self.base_url}{path}"
        done = False
        with self._request("POST", path, payload=payload, stream=True) as response:
            try:
                # chunk_size=None hands over whatever the socket has, so no event waits for a full buffer.
                for line in response.iter_lines(chunk_size=None, delimiter=b"\n"):
                    at = self._clock()
                    line = line.strip()
                    if not line.startswith(b"data:"):
                        continue
                    body = line[len(b"data:") :].strip()
                    if body == b"[DONE]":
                        done = True
                        break
                    try:
                        event = json.loads(body)
                    except ValueError as error:
                        raise ServerError(f"{url}: stream event is not JSON: {body[:80]!r}") from error
                    if "error" in event:
                        raise ServerError(
                            f"{url}: error inside the stream: {_message_of(event['error'])}",
                            remedy="The answer is incomplete and must not be counted; read the server's log.",
                        )
                    yield at, event
            except requests.RequestException as error:
                raise self._transport_error(url, error) from error
        if not done:
            raise ServerError(
                f"{url}: the stream ended without [DONE]",
                remedy="The server or a proxy closed the connection early; read the server's log.",
            )

    def _transport_error(self, url: str, error: requests.RequestException) -> ServerError:
        if isinstance(error, requests.ReadTimeout):
            return ServerError(
                f"{url}: no byte for {self.timeout_s:g} s",
                remedy="The server hangs, or the prompt needs longer: raise --timeout.",
            )
        if isinstance(error, requests.ConnectionError | requests.ConnectTimeout):
            return ServerError(
                f"{url}: no connection ({_innermost(error)})",
                remedy="Is the server up at this address? Check with: curl " + self.base_url + "/health",
            )
        return ServerError(f"{url}: {error}", remedy="Read the server's log.")


def _innermost(error: BaseException) -> str:
    """Return the text of the fault at the bottom of a chain of exceptions."""
    seen: set[int] = set()
    current = error
    while id(current) not in seen:
        seen.add(id(current))
        reason = getattr(current, "reason", None)
        nested = [arg for arg in current.args if isinstance(arg, BaseException)]
        following = reason if isinstance(reason, BaseException) else (nested[0] if nested else None)
        current = following or current.__cause__ or current
    return str(current)[:200] or type(current).__name__


def _message_of(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message)[:_MESSAGE_LIMIT]


def _server_message(response: requests.Response) -> str:
    """Return the server's own words from an error answer."""
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:_MESSAGE_LIMIT] or response.reason or "no message"
    if isinstance(body, Mapping):
        return _message_of(body.get("error") or body.get("message") or body.get("detail") or body)
    return str(body)[:_MESSAGE_LIMIT]


def _remedy(status: int, path: str) -> str:
    if path.startswith("/flush_cache"):
        return "The cache is flushed only while the server is idle: nothing else may use it meanwhile."
    if status in (401, 403):
        return f"The server wants an API key: set {API_KEY_VARIABLE} in the environment to the right one."
    if status == 404:
        return f"This server does not offer {path}."
    if 400 <= status < 500:
        return "The server refused the request: check the context length and the token ids."
    return "Read the server's log."
