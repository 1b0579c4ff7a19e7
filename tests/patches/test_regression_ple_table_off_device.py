"""With --ple-offload-embedding the n-gram table is never on the device, not even while the model is built and loaded.

SGLang 39841 (fixed by 39928): the table was built on the device first and moved to the host after, so a GPU smaller
than the table ran out of memory and the flag was of no use. The modules, the weight loader and what it does after the
load are the real ones; the device is fake, and every allocation on it is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ple_checkpoints
import pytest
import qwen4_modules
import torch
from fake_cuda import CUDA, HOST, fake_cuda
from sglang.srt.layers.rotary_embedding import factory as rope
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.qwen4_exp import Qwen4ExpNGramEmbedding
from torch.utils._python_dispatch import TorchDispatchMode

SMALL, LARGE = 20_000, 80_000
"""Rows a head of the n-gram table, 16 heads of 4 values: also the small one is larger than any other tensor."""


class DeviceAllocations(TorchDispatchMode):
    """Count the tensors that operators allocate on the fake device, by size in bytes; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = result if isinstance(result, (tuple, list)) else (result,)
        for value, declared in zip(returned, func._schema.returns, strict=False):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.device == CUDA and declared.alias_info is None:
                    self.count[tensor.untyped_storage().nbytes()] += 1
        return result


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two checkpoints that differ in the rows of their tables alone."""
    return {
        rows: ple_checkpoints.write(tmp_path_factory.mktemp("model"), request.param, ngram_vocab_size_base=rows)
        for rows in (SMALL, LARGE)
    }


def without_values(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield fake tensors on the host in the place of `weights`."""
    for name, tensor in weights:
        yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)


def build_and_load(directory: Path, *, offload: bool) -> tuple[Counter[int], int]:
    """Build and load as the server does; return the device allocations and the size of the largest table, bytes."""
    stored = list(ple_checkpoints.tensors(directory))
    with (
        pytest.MonkeyPatch.context() as patch,
        qwen4_modules.runtime(directory, *qwen4_modules.TEXT_ONLY) as runtime,
    ):
        patch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
        patch.setattr(rope, "_ROPE_DICT", {})  # else the first model alone allocates what all of them share
        runtime.model_config.hf_text_config.ple_offload_embedding = offload  # as the model runner hands it over
        with fake_cuda(), DeviceAllocations() as seen:
            model = runtime.build_model(CUDA)
            tables = [m.ngram_embedding.weight for m in model.modules() if isinstance(m, Qwen4ExpNGramEmbedding)]
            if offload:
                for table in tables:
                    # The module copies vars() of a meta weight to the table's; a fake tensor's device is among them.
                    table.fake_device = HOST
            DefaultModelLoader.load_weights_and_postprocess(model, without_values(stored), CUDA)
    assert len(tables) == 2
    assert {table.device for table in tables} == {HOST if offload else CUDA}
    return seen.count, max(table.untyped_storage().nbytes() for table in tables)


def test_device_allocations_do_not_depend_on_the_rows(checkpoints: dict[int, Path]) -> None:
    small, small_table = build_and_load(checkpoints[SMALL], offload=True)
    large, large_table = build_and_load(checkpoints[LARGE], offload=True)
    assert large_table > 3 * small_table
    assert sum(large.values()) > 100, "the other weights are on the device: the recorder sees them"
    assert large == small
    assert max(large) < small_table, "nothing on the device is as large as a table"


def test_a_table_on_the_device_is_seen(checkpoints: dict[int, Path]) -> None:
    """Guards the method: without offload each of the two tables is a device allocation."""
    seen, table = build_and_load(checkpoints[LARGE], offload=False)
    assert max(seen) == table
