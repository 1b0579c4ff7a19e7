"""A server whose PLE table stays on disk answers exactly like one that holds it, and survives a disk that fails.

Needs the patched SGLang (Q4_PYTHONPATH): the stock pin has no `--ple-offload-backend nvme`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import requests
from failing_disk import Disk, compile_shim
from serving import Launcher, cached_model, require_nvme

from q4kit.errors import ServerError
from q4kit.server.client import Client
from q4kit.tinymodel import PRESETS

CHUNK = 128
HEADS, PLE_LAYERS = 16, len(PRESETS["mini"].ple_layers)
"""Hash heads of a token (two n-gram sizes of eight), and the layers that have a table each."""
EOS = 2
NVME = ("--ple-offload-backend", "nvme")
FLAGS = ("--json-model-override-args", '{"language_model_only": true}', "--chunked-prefill-size", str(CHUNK))
MODELS = {
    "bf16": replace(PRESETS["mini"], dtype="bfloat16", table_rows=20_000),
    "fp8": replace(PRESETS["mini"], dtype="float32", ple_dtype="float8_e4m3fn", table_rows=20_000),
}
"""fp32 weights around the fp8 table: there, and only there, a cached prefix changes no bit of the answer."""
SERVED = {
    "bf16": ("--ple-offload-reader", "auto", "--disable-overlap-schedule"),
    "fp8": ("--ple-offload-reader", "pread"),
}


def tokens(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 500, length)]


def payload(ids: list[int], new: int = 4, start: int = -1) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start,
    }


@dataclass(frozen=True)
class Answer:
    """What a request returned, exactly."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float | None, ...]
    cached: int


def ask(client: Client, request: dict[str, Any]) -> Answer:
    answer = client.generate(request)
    meta = answer["meta_info"]
    return Answer(
        tuple(answer["output_ids"]),
        tuple(entry[0] for entry in meta["output_token_logprobs"]),
        tuple(entry[0] for entry in meta["input_token_logprobs"]),
        meta["cached_tokens"],
    )


PROMPTS = {
    "one token": tokens(1, 1),
    "two tokens": tokens(2, 2),
    "one below a chunk": tokens(3, CHUNK - 1),
    "a chunk": tokens(4, CHUNK),
    "one above a chunk": tokens(5, CHUNK + 1),
    "three chunks": tokens(6, 3 * CHUNK),
    "end of text inside": [*tokens(7, 20), EOS, *tokens(8, 1), EOS, EOS, *tokens(9, CHUNK)],
    "end of text at a chunk edge": [*tokens(10, CHUNK - 1), EOS, *tokens(11, 9)],
    "end of text last": [*tokens(12, 9), EOS],
}


DOOMED = tokens(31, 3 * CHUNK - 5)
"""The prompt whose rows become unreadable."""


def everything(client: Client) -> dict[str, Any]:
    """Return every answer the two servers are compared by."""
    got: dict[str, Any] = {name: ask(client, payload(ids, start=0)) for name, ids in PROMPTS.items()}
    with ThreadPoolExecutor(2) as pool:  # two requests at once, of unequal length
        pair = [payload(tokens(20, 300), 12), payload(tokens(21, 7), 12)]
        got["two at once"] = [answer.output_ids for answer in pool.map(lambda request: ask(client, request), pair)]
    stream = client.stream_generate(payload(tokens(22, 40), 400))
    first = [next(stream) for _ in range(3)]
    stream.close()  # the client hangs up: the request is aborted in mid-stream
    assert first[-1].completion_tokens
    got["after an abort"] = ask(client, payload(tokens(22, 40)))
    client.flush_cache()
    prompt = tokens(23, CHUNK + 1)
    got["uncached"] = ask(client, payload(prompt))
    client.flush_cache()
    ask(client, payload(prompt[:-1]))
    got["prefix hit leaves one token"] = ask(client, payload(prompt))
    client.flush_cache()
    said = tokens(24, 2 * CHUNK + 5)
    for turn in range(3):  # a conversation: every turn after the first hits the prefix of the one before
        got[f"turn {turn}"] = ask(client, payload(said, 6))
        said = [*said, *got[f"turn {turn}"].output_ids, *tokens(25 + turn, 70)]
    for chunks in range(3):
        client.flush_cache()
        if chunks:
            ask(client, payload(DOOMED[: chunks * CHUNK]))
        got[f"{chunks} chunks cached"] = ask(client, payload(DOOMED))
    return got


@pytest.fixture(scope="module")
def patched() -> None:
    """Skip on the stock pin."""
    require_nvme()


@pytest.fixture(scope="module", params=sorted(MODELS))
def kind(request: pytest.FixtureRequest, patched: None) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resident(kind: str, start_server: Launcher) -> dict[str, Any]:
    """Return the answers of a server that holds the table."""
    with (
        start_server(cached_model(MODELS[kind]), *FLAGS, *SERVED[kind][2:]) as server,
        Client(server.base_url) as client,
    ):
        return everything(client)


@pytest.fixture(scope="module")
def disk(kind: str, start_server: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """Serve the table from disk; for fp8 with reads that can be made to fail."""
    folder = tmp_path_factory.mktemp("disk")
    control, model = folder / "poison", cached_model(MODELS[kind])
    env = {"Q4_EIO_CONTROL": str(control), "LD_PRELOAD": str(compile_shim(folder))} if kind == "fp8" else {}
    with (
        start_server(model, *FLAGS, *NVME, *SERVED[kind], "--enable-metrics", env=env) as server,
        Client(server.base_url) as client,
    ):
        yield Disk(client, model, control)


def test_every_answer_equals_the_resident_tables(resident: dict[str, Any], disk: Disk) -> None:
    served = everything(disk.client)
    assert served["prefix hit leaves one token"].cached == CHUNK
    assert [served[f"{chunks} chunks cached"].cached for chunks in range(3)] == [0, CHUNK, 2 * CHUNK]
    cached = [served[f"turn {turn}"].cached for turn in range(3)]
    assert cached[0] == 0 < cached[1] < cached[2]
    assert served == resident


def test_a_prefix_hit_that_leaves_one_token_gives_the_uncached_answer(disk: Disk, kind: str) -> None:
    prompt = tokens(23, CHUNK + 1)
    disk.client.flush_cache()
    uncached = ask(disk.client, payload(prompt))
    disk.client.flush_cache()
    ask(disk.client, payload(prompt[:-1]))
    hit = ask(disk.client, payload(prompt))
    assert (uncached.cached, hit.cached) == (0, CHUNK)
    assert hit.output_ids == uncached.output_ids
    if kind == "fp8":
        assert hit.logprobs == uncached.logprobs


def test_a_failed_prefill_read_ends_its_request_only(disk: Disk, kind: str) -> None:
    if kind != "fp8":
        pytest.skip("the shim is in the fp8 server: io_uring reads do not pass libc")
    healthy = tokens(30, 30)
    disk.client.flush_cache()
    expected = ask(disk.client, payload(healthy, 24)), ask(disk.client, payload(DOOMED))
    disk.client.flush_cache()
    try:
        for position in (3, CHUNK + 1, len(DOOMED) - 1):  # first, middle and last chunk
            path = disk.poison(DOOMED, position)
            with ThreadPoolExecutor(2) as pool:
                beside = pool.submit(ask, disk.client, payload(healthy, 24))
                with pytest.raises(ServerError) as error:
                    disk.client.generate(payload(DOOMED))
                assert beside.result().output_ids == expected[0].output_ids
            for named in ("500", path.name, "errno 5"):
                assert named in str(error.value)
    finally:
        disk.heal()
    assert ask(disk.client, payload(DOOMED)).output_ids == expected[1].output_ids


@pytest.mark.parametrize("chunks", range(3))
def test_a_failed_prefill_leaves_only_its_healthy_chunks(
    resident: dict[str, Any], disk: Disk, kind: str, chunks: int
) -> None:
    """After chunk `chunks` failed the cache is that of a server which was asked for the chunks before it, to the bit:
    the same chunks are computed, so no matrix product has another number of rows.
    """
    if kind != "fp8":
        pytest.skip("the shim is in the fp8 server: io_uring reads do not pass libc")
    disk.client.flush_cache()
    try:
        disk.poison(DOOMED, chunks * CHUNK + 3)
        with pytest.raises(ServerError, match="errno 5"):
            disk.client.generate(payload(DOOMED))
    finally:
        disk.heal()
    assert ask(disk.client, payload(DOOMED)) == resident[f"{chunks} chunks cached"]


def test_a_failed_decode_read_ends_the_stream_with_an_error(disk: Disk, kind: str) -> None:
    if kind != "fp8":
        pytest.skip("the shim is in the fp8 server: io_uring reads do not pass libc")
    prompt = tokens(40, 12)
    full = ask(disk.client, payload(prompt, 16)).output_ids
    at = 8
    got: list[int] = []
    try:
        # Step `at` reads the rows of the token generated before it.
        disk.poison([*prompt, *full], len(prompt) + at - 1)
        stream = disk.client.stream_generate(payload(prompt, 16))
        with pytest.raises(ServerError, match="errno 5"):
            got.extend(token for event in stream for token in event.output_ids)
    finally:
        disk.heal()
    # The overlap scheduler launches the step that fails before it commits the one before: that token is good.
    assert got == list(full[:at])
    assert ask(disk.client, payload(prompt, 16)).output_ids == full


def rows_read(client: Client) -> float:
    """Return the rows that the server says it read, as a scraper sees it."""
    text = requests.get(f"{client.base_url}/metrics", timeout=60).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("sglang:ple_rows_total"))


def test_the_rows_of_the_last_request_are_counted_while_the_server_idles(disk: Disk) -> None:
    prompt = tokens(60, 37)
    disk.client.flush_cache()
    time.sleep(2.5)  # the rows of the tests before: exported within a second, by a scheduler that wakes every second
    before = rows_read(disk.client)
    # One token: only the prompt is computed, and no later batch comes along to export what it read.
    ask(disk.client, payload(prompt, 1))
    expected = before + len(prompt) * HEADS * PLE_LAYERS
    deadline = time.monotonic() + 30
    while (counted := rows_read(disk.client)) < expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert counted == expected


def test_a_weight_update_is_refused_and_serving_goes_on(disk: Disk) -> None:
    prompt = payload(tokens(50, 20), 8)
    disk.client.flush_cache()
    expected = ask(disk.client, prompt)
    answer = requests.post(
        f"{disk.client.base_url}/update_weights_from_disk", json={"model_path": str(disk.model)}, timeout=120
    )
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "not supported with --ple-offload-backend nvme" in answer.json()["message"]
    disk.client.flush_cache()
    assert ask(disk.client, prompt) == expected
