"""Text-only serving: --language-model-only answers text exactly like the server that also has the vision tower.

Needs the patched SGLang (Q4_PYTHONPATH): the stock pin refuses the flag for this model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from scoring import Scored, prompts, score
from serving import Launcher

from q4kit.errors import ServerError
from q4kit.server.client import Client

CHECK_LOAD = {"SGLANG_CPU_REF_CHECK_LOAD": "1"}
LENGTHS = (17, 700)
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")


@pytest.fixture(scope="module")
def text_only(start_server: Launcher, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Return a client of a text-only server whose checkpoint has no image processor files."""
    checkpoint = tmp_path_factory.mktemp("text-only") / "model"
    shutil.copytree(tiny_model, checkpoint, ignore=shutil.ignore_patterns(*PROCESSOR_FILES))
    with (
        start_server(checkpoint, "--language-model-only", env=CHECK_LOAD) as running,
        Client(running.base_url) as client,
    ):
        reports = re.findall(r"cpu_ref CHECK_LOAD (\{.*\})", running.log_path.read_text())
        assert [json.loads(report)["unfilled"] for report in reports] == [[]]
        yield client


def answers(client: Client) -> dict[int, Scored]:
    client.flush_cache()
    return {length: score(client, prompts()[length]) for length in LENGTHS}


def test_text_is_answered_as_with_the_vision_tower(client: Client, text_only: Client) -> None:
    assert answers(text_only) == answers(client)


def test_an_image_is_refused_and_the_server_goes_on(text_only: Client) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    with pytest.raises(ServerError):
        text_only.generate({"text": "hello", "image_data": pixel, "sampling_params": {"max_new_tokens": 1}})
    assert answers(text_only)[17].token_ids[:17] == prompts()[17]
