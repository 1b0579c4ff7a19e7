"""The parts that the breakdown times are the patched SGLang's own and do the real work, here on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from tests.gpu.ple_step_breakdown import CRITICAL_PATH, Parts, sample, total  # noqa: E402
from tests.gpu.step_chain import HEADS, write_table  # noqa: E402
from tests.needs import needs_series  # noqa: E402

ROWS = 20_000


def test_total_is_the_sum_of_the_critical_path_or_nothing() -> None:
    parts = {name: {"p50": 10.0, "p95": 99.0} for name in CRITICAL_PATH}
    parts["ids_host"] = {"p50": 1000.0}
    assert total(parts) == 10.0 * len(CRITICAL_PATH)
    del parts["fill"]["p50"]
    assert total(parts) is None
    assert total({}) is None


def test_sample_drops_the_first_tenth_and_leaves_the_preparation_out() -> None:
    calls = []
    times = sample(lambda: calls.append("call"), 20, lambda: calls.append("prepare"))
    assert len(times) == 18
    assert calls[:4] == ["prepare", "call", "prepare", "call"]
    assert all(time >= 0 for time in times)


@needs_series
def test_parts_hash_as_the_host_does_and_fill_the_rows_of_the_table(tmp_path: Path) -> None:
    table = write_table(tmp_path, ROWS)
    parts = Parts(tmp_path, ROWS, "auto", device="cpu")
    for token in (77, 5, parts.ple.eos_token_id):
        parts.token.fill_(token)
        ids = parts.read_back(parts.hash())[0]
        context = torch.cat([parts.history[3], parts.token]).unsqueeze(0)
        assert torch.equal(ids, parts.ple.hash_contexts_on_host(context))
        assert ids.shape == (1, HEADS)
        parts.fill(ids)
        assert (parts.nvme._graph_rows[1][0].numpy() == table[ids[0].numpy()]).all()


@needs_series
def test_a_table_too_small_for_the_heads_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path, 600)
    with pytest.raises(ValueError, match="do not fit the table's 600"):
        Parts(tmp_path, 600, "auto", device="cpu")
