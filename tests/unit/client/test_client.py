"""The client against a loopback server: every failure names URL, status, the server's words and a remedy."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from q4kit.errors import ServerError
from q4kit.server.client import API_KEY_VARIABLE, GREEDY, Client


class Script:
    """What the loopback server answers: status, content type, raw body, by path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.cut = False
        self.seen: list[tuple[str, str, Any]] = []
        self.keys: list[str | None] = []
        self.base_url = ""

    def say(self, path: str, value: Any, status: int = 200) -> None:
        self.answers[path] = (status, value if isinstance(value, bytes) else json.dumps(value).encode())


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


@pytest.fixture
def script() -> Iterator[Script]:
    state = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.partition("?")[0]
            state.seen.append((self.command, self.path, body))
            state.keys.append(self.headers.get("Authorization"))
            status, content = state.answers.get(path, (404, b'{"detail": "Not Found"}'))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) + (100 if state.cut else 0)))
            self.end_headers()
            self.wfile.write(content)
            if state.cut:
                self.close_connection = True

        do_GET = do_POST = answer  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.base_url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with Client(script.base_url, timeout_s=5) as opened:
        yield opened


def native(ids: list[int], count: int, text: str, finish: Any = None) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": count, "finish_reason": finish}}


def test_a_server_that_is_down_is_named_with_a_remedy() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"/health: no connection \(.*refused") as caught:
            Client(url).health()
    assert f"curl {url}/health" in caught.value.remedy
    assert caught.value.exit_code == 4


def test_a_url_without_a_scheme_is_a_usage_fault() -> None:
    with pytest.raises(ServerError, match="'localhost:30000' has no scheme") as caught:
        Client("localhost:30000")
    assert caught.value.exit_code == 2


def test_a_url_ending_in_v1_means_the_server_itself(script: Script) -> None:
    script.say("/health", b"")
    assert Client(script.base_url + "/v1/").health()


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "The input (40000 tokens) is longer than the model's context length"}},
        {"message": "The input (40000 tokens) is longer than the model's context length"},
        b"The input (40000 tokens) is longer than the model's context length",
    ],
)
def test_a_refusal_carries_the_servers_own_words(script: Script, client: Client, body: Any) -> None:
    script.say("/generate", body, 400)
    with pytest.raises(ServerError, match=r"/generate: HTTP 400: The input \(40000 tokens\) is longer") as caught:
        client.generate({"input_ids": [1]})
    assert "context length" in caught.value.remedy


def test_a_cache_that_cannot_be_flushed_says_why(script: Script, client: Client) -> None:
    script.say("/flush_cache", b"Flush cache failed: 1 running request", 400)
    with pytest.raises(ServerError, match="1 running request") as caught:
        client.flush_cache()
    assert "idle" in caught.value.remedy


def test_a_missing_route_is_named(client: Client) -> None:
    with pytest.raises(ServerError, match="/server_info: HTTP 404: Not Found") as caught:
        client.server_info()
    assert caught.value.remedy == "This server does not offer /server_info."


def test_a_page_that_is_not_json_is_shown(script: Script, client: Client) -> None:
    script.say("/server_info", b"<html>login</html>")
    with pytest.raises(ServerError, match=r"not JSON.*<html>login"):
        client.server_info()


def test_nan_logits_are_never_an_answer(script: Script, client: Client) -> None:
    script.say("/generate", native([1], 1, "x", {"type": "stop", "matched": "NaN happened"}))
    with pytest.raises(ServerError, match="NaN logits"):
        client.generate({"input_ids": [1]})


def test_nan_logits_are_never_the_end_of_a_stream(script: Script, client: Client) -> None:
    script.say("/generate", sse(native([1], 1, "x", {"type": "stop", "matched": "NaN happened"}), b"[DONE]"))
    with pytest.raises(ServerError, match="NaN logits"):
        list(client.stream_generate({"input_ids": [1]}))


def test_nan_logits_are_seen_on_the_openai_route(script: Script, client: Client) -> None:
    script.say("/v1/completions", {"choices": [{"text": "", "matched_stop": "NaN happened"}]})
    with pytest.raises(ServerError, match="NaN logits"):
        client.openai("/v1/completions", {})


def test_an_aborted_request_is_never_an_answer(script: Script, client: Client) -> None:
    script.say("/generate", native([], 0, "", {"type": "abort", "message": "queue full"}))
    with pytest.raises(ServerError, match="aborted the request: queue full"):
        client.generate({"input_ids": [1]})


def test_an_answer_of_another_server_is_named(script: Script, client: Client) -> None:
    script.say("/generate", {"generated_text": "x"})
    with pytest.raises(ServerError, match=r"without meta_info \(keys found: \['generated_text'\]\)"):
        client.generate({"input_ids": [1]})


END = {"type": "length", "length": 3}


def test_cumulative_events_come_out_as_deltas(script: Script, client: Client) -> None:
    script.say(
        "/generate",
        sse(native([5], 1, "a"), native([5, 6], 2, "a b"), native([5, 6, 7], 3, "a b c", END), b"[DONE]"),
    )
    events = list(client.stream_generate({"input_ids": [1]}))
    assert [event.output_ids for event in events] == [[5], [6], [7]]
    assert "".join(event.text_delta for event in events) == "a b c"
    assert [event.completion_tokens for event in events] == [1, 2, 3]


def test_incremental_events_come_out_as_they_are(script: Script, client: Client) -> None:
    script.say(
        "/generate",
        sse(native([5], 1, "a"), native([6], 2, " b"), native([7], 3, " c", END), b"[DONE]"),
    )
    events = list(client.stream_generate({"input_ids": [1]}))
    assert [event.output_ids for event in events] == [[5], [6], [7]]
    assert "".join(event.text_delta for event in events) == "a b c"


def test_arrival_times_are_those_of_the_clock(script: Script) -> None:
    ticks = iter(range(100))
    script.say("/generate", sse(native([5], 1, "a"), native([5, 6], 2, "ab", END), b"[DONE]"))
    with Client(script.base_url, clock=lambda: float(next(ticks))) as client:
        times = [event.t_monotonic for event in client.stream_generate({"input_ids": [1]})]
    assert times == sorted(times)
    assert times[0] < times[1]


def test_reasoning_text_counts_as_text(script: Script, client: Client) -> None:
    chunks = [{"choices": [{"delta": {"reasoning_content": "hm"}}]}, {"choices": [{"delta": {"content": "yes"}}]}]
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    script.say("/v1/chat/completions", sse(*chunks, usage, b"[DONE]"))
    events = list(client.openai_stream("/v1/chat/completions", {}))
    assert [event.text_delta for event in events] == ["hm", "yes", ""]
    assert [event.completion_tokens for event in events] == [None, None, 2]


def test_a_stream_without_its_end_is_a_fault(script: Script, client: Client) -> None:
    script.say("/generate", sse(native([5], 1, "a")))
    with pytest.raises(ServerError, match=r"ended without \[DONE\]"):
        list(client.stream_generate({"input_ids": [1]}))


def test_a_connection_cut_inside_the_stream_is_a_fault(script: Script, client: Client) -> None:
    script.cut = True
    script.say("/generate", sse(native([5], 1, "a")))
    with pytest.raises(ServerError, match="/generate: "):
        list(client.stream_generate({"input_ids": [1]}))


def test_an_error_event_inside_the_stream_is_a_fault(script: Script, client: Client) -> None:
    script.say("/generate", sse(native([5], 1, "a"), {"error": {"message": "out of memory"}}, b"[DONE]"))
    with pytest.raises(ServerError, match="error inside the stream: out of memory"):
        list(client.stream_generate({"input_ids": [1]}))


def test_a_silent_server_times_out_by_name() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"no byte for 0\.2 s"):
            Client(url, timeout_s=0.2).health()


def test_tokenize_asks_for_no_special_tokens(script: Script, client: Client) -> None:
    script.say("/tokenize", {"tokens": [3, 4], "count": 2})
    assert client.tokenize("hi") == [3, 4]
    assert script.seen[-1][2] == {"prompt": "hi", "add_special_tokens": False}


def test_a_tokenize_answer_without_ids_is_refused(script: Script, client: Client) -> None:
    script.say("/tokenize", {"tokens": "none"})
    with pytest.raises(ServerError, match="no list of token ids"):
        client.tokenize("hi")


def test_the_proxy_of_the_shell_is_ignored(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    script.say("/health", b"")
    assert Client(script.base_url).health()


def test_a_key_is_shown_from_the_argument_or_the_environment(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.say("/health", {})
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    Client(script.base_url).health()
    monkeypatch.setenv(API_KEY_VARIABLE, "of the shell")
    Client(script.base_url).health()
    Client(script.base_url, api_key="given").health()
    assert script.keys == [None, "Bearer of the shell", "Bearer given"]


def test_a_refused_key_names_the_variable(script: Script, client: Client) -> None:
    script.say("/health", {"error": "Unauthorized"}, status=401)
    with pytest.raises(ServerError, match="401") as caught:
        client.health()
    assert API_KEY_VARIABLE in caught.value.remedy


def test_greedy_leaves_no_sampling_parameter_to_the_model() -> None:
    stated = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    assert stated <= GREEDY.keys()
