"""Speculation with the model's own prediction head says what the model says without it, its PLE table held or on disk.

The disk half needs the patched SGLang (Q4_PYTHONPATH): the stock pin has no `--ple-offload-backend nvme`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from failing_disk import Disk, compile_shim
from serving import Launcher, cached_model, require_nvme

from q4kit.errors import ServerError
from q4kit.server.client import Client
from q4kit.tinymodel import PRESETS

CHUNK = 128
TRACK = 256
"""Tokens between the states that the radix cache keeps of a text that is being generated (SGLang's default)."""
TURNS = 4
DRAFTS, VERIFIED = 3, 4
EOS = 2
MODEL = replace(
    PRESETS["mini"],
    dtype="float32",
    ple_dtype="float8_e4m3fn",
    table_rows=20_000,
    mtp_layers=1,
    embedding_std=2.0,
    # QSA verifies at most as many tokens as one of its blocks has.
    indexer_budget=2048,
    indexer_compress_ratio=4,
)
FLAGS = ("--json-model-override-args", '{"language_model_only": true}', "--chunked-prefill-size", str(CHUNK))
SPECULATION = (
    "--speculative-algorithm=NEXTN",
    f"--speculative-num-steps={DRAFTS}",
    "--speculative-eagle-topk=1",
    f"--speculative-num-draft-tokens={VERIFIED}",
)
NVME = ("--ple-offload-backend=nvme", "--ple-offload-reader=pread")


def tokens(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 500, length)]


@dataclass(frozen=True)
class Answer:
    """What a request returned; with speculation also how often 0, 1, 2, ... drafts were right, and the mean number of
    tokens that a verification gave.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    right: tuple[int, ...]
    length: float | None


def payload(ids: list[int], new: int, temperature: float = 0.0) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
    }


def ask(client: Client, ids: list[int], new: int, temperature: float = 0.0) -> Answer:
    answer = client.generate(payload(ids, new, temperature))
    meta = answer["meta_info"]
    return Answer(
        tuple(answer["output_ids"]),
        tuple(entry[0] for entry in meta["output_token_logprobs"]),
        meta["cached_tokens"],
        tuple(meta.get("spec_correct_drafts_histogram", ())),
        meta.get("spec_accept_length"),
    )


PROMPTS = {
    "one token": (tokens(1, 1), 12),
    "a short prompt": (tokens(2, 12), 120),
    "end of text inside": ([*tokens(3, 20), EOS, *tokens(4, 1), EOS, EOS, *tokens(5, 9)], 24),
    "three chunks": (tokens(6, 2 * CHUNK + 70), 24),
}


def everything(client: Client) -> dict[str, Answer]:
    """Return every answer the servers are compared by."""
    client.flush_cache()
    got = {name: ask(client, ids, new) for name, (ids, new) in PROMPTS.items()}
    with ThreadPoolExecutor(2) as pool:  # two requests at once, of unequal length
        pair = [(tokens(20, 150), 40), (tokens(21, 7), 40)]
        got |= zip(("beside", "another"), pool.map(lambda request: ask(client, *request), pair), strict=True)
    for turn in range(TURNS):
        # The second request continues from a state that was kept while the first one's answer was generated, in some
        # turns between two tokens of one verification.
        said = tokens(22 + turn, TRACK - 30)
        got[f"turn {turn}"] = ask(client, said, 40)
        said = [*said, *got[f"turn {turn}"].output_ids, *tokens(40 + turn, 10)]
        got[f"after turn {turn}"] = ask(client, said, 12)
    client.flush_cache()
    got["after the last turn, uncached"] = ask(client, said, 12)
    return got


@pytest.fixture(scope="module")
def plain(start_server: Launcher) -> dict[str, Answer]:
    """Return the answers without speculation."""
    with start_server(cached_model(MODEL), *FLAGS) as server, Client(server.base_url) as client:
        return everything(client)


@dataclass(frozen=True)
class Speculated:
    """What a speculating server said, and what it said about its weights: of the model, then of its head."""

    answers: dict[str, Answer]
    sampled: Answer
    loaded: list[dict[str, Any]]


@pytest.fixture(scope="module")
def resident(start_server: Launcher) -> Speculated:
    """Return what a speculating server that holds the table says."""
    check = {"SGLANG_CPU_REF_CHECK_LOAD": "1"}
    with (
        start_server(cached_model(MODEL), *FLAGS, *SPECULATION, env=check) as server,
        Client(server.base_url) as client,
    ):
        answers, sampled = everything(client), ask(client, tokens(30, 12), 40, temperature=1.0)
        reports = re.findall(r"cpu_ref CHECK_LOAD (\{.*\})", server.log_path.read_text())
    return Speculated(answers, sampled, [json.loads(report) for report in reports])


def test_the_head_is_loaded_whole(resident: Speculated) -> None:
    model, head = resident.loaded
    assert (model["unfilled"], model["unknown"]) == ([], [])
    # The model's own output head takes the place of this one.
    assert (head["unfilled"], head["unknown"]) == (["lm_head.weight"], [])


def test_drafts_are_accepted_and_rejected(resident: Speculated) -> None:
    right = np.sum([np.pad(a.right, (0, VERIFIED - len(a.right))) for a in resident.answers.values()], axis=0)
    assert right.shape == (VERIFIED,)
    assert (right > 0).all(), right  # none, one, two and three of three
    length = resident.answers["a short prompt"].length
    assert length is not None
    assert 1 < length < VERIFIED


def test_speculation_changes_no_token(plain: dict[str, Answer], resident: Speculated) -> None:
    speculated = resident.answers
    assert {name: a.output_ids for name, a in speculated.items()} == {name: a.output_ids for name, a in plain.items()}
    assert sum(len(a.output_ids) for a in plain.values()) > 300
    for name, answer in speculated.items():
        assert np.allclose(answer.logprobs, plain[name].logprobs, rtol=0, atol=1e-4), name


def test_a_state_kept_between_accepted_drafts_is_that_of_the_whole_text(resident: Speculated) -> None:
    answers = resident.answers
    assert [answers[f"after turn {turn}"].cached for turn in range(TURNS)] == [TRACK] * TURNS
    cached, uncached = answers[f"after turn {TURNS - 1}"], answers["after the last turn, uncached"]
    assert uncached.cached == 0
    assert cached.output_ids == uncached.output_ids
    assert np.allclose(cached.logprobs, uncached.logprobs, rtol=0, atol=1e-4)


def test_sampled_requests_are_served(resident: Speculated) -> None:
    sampled = resident.sampled
    assert len(sampled.output_ids) == 40
    assert sum(sampled.right) > 0


@pytest.fixture(scope="module")
def disk(start_server: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """Serve with speculation from a table on disk whose reads can be made to fail, where there is a C compiler."""
    require_nvme()
    folder, model = tmp_path_factory.mktemp("disk"), cached_model(MODEL)
    control, env = folder / "poison", {}
    if shutil.which("gcc"):
        env = {"Q4_EIO_CONTROL": str(control), "LD_PRELOAD": str(compile_shim(folder))}
    with start_server(model, *FLAGS, *SPECULATION, *NVME, env=env) as server, Client(server.base_url) as client:
        yield Disk(client, model, control)


def test_a_table_on_disk_changes_no_bit(resident: Speculated, disk: Disk) -> None:
    """Two requests at once share forwards as their arrival has it, so of them the tokens alone are compared."""
    expected, found = (
        {name: a.output_ids if name in ("beside", "another") else a for name, a in answers.items()}
        for answers in (resident.answers, everything(disk.client))
    )
    assert found == expected


@pytest.mark.parametrize("at", [9, 11, 12])
def test_a_failed_read_ends_its_text_and_no_other(resident: Speculated, disk: Disk, at: int) -> None:
    """With the token whose row it is, or before: with the tokens verified beside it, or where a draft that is refused
    reads the same row.
    """
    if not shutil.which("gcc"):
        pytest.skip("needs gcc to build the EIO shim")
    prompt, new = PROMPTS["a short prompt"]
    full, beside = resident.answers["a short prompt"].output_ids, resident.answers["another"].output_ids
    disk.client.flush_cache()
    got: list[int] = []
    try:
        disk.poison([*prompt, *full], len(prompt) + at - 1)
        with ThreadPoolExecutor(1) as pool:
            another = pool.submit(ask, disk.client, tokens(21, 7), len(beside))
            stream = disk.client.stream_generate(payload(prompt, new))
            with pytest.raises(ServerError, match="errno 5"):
                got.extend(token for event in stream for token in event.output_ids)
            assert another.result().output_ids == beside
    finally:
        disk.heal()
    assert got == list(full[: len(got)])
    assert 0 < len(got) <= at
    assert ask(disk.client, prompt, new).output_ids == full
