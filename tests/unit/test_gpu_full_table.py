"""The full-size row geometry as a sparse file, read by the patched SGLang's own readers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from q4kit.errors import EnvironmentFault
from tests.gpu import full_table
from tests.gpu.full_table import FAR, ROW_BYTES, ROWS, declare_full_table, far_rows, judge, write_sparse_table
from tests.needs import needs_series

os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")

CHOSEN = (0, 26_843_545, 26_843_546, 134_217_728, 160_000_768, ROWS - 2, ROWS - 1)
"""Both sides of 4 GiB, an offset past 2**34, the middle, the end."""


def rows_of(ids: tuple[int, ...]) -> dict[int, bytes]:
    rng = np.random.default_rng(3)
    return {row: rng.integers(1, 256, ROW_BYTES, dtype=np.uint8).tobytes() for row in ids}


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, dict[int, bytes]]:
    planted = rows_of(CHOSEN)
    try:
        write_sparse_table(tmp_path, planted)
    except EnvironmentFault as error:
        pytest.skip(str(error))
    return tmp_path, planted


def test_the_file_has_its_full_size_and_takes_little_space(table: tuple[Path, dict[int, bytes]]) -> None:
    stat = (table[0] / "table.bin").stat()
    assert stat.st_size == 51_200_245_760
    assert stat.st_blocks * 512 < 4 << 20


@needs_series
@pytest.mark.parametrize("name", ["auto", "io_uring", "pread", "mmap"])
def test_readers_give_planted_rows_zeros_between_them_and_nothing_past_the_end(
    table: tuple[Path, dict[int, bytes]], name: str
) -> None:
    from sglang.srt.layers.ple_rows import open_flat_source, open_row_reader

    folder, planted = table
    source = open_flat_source(str(folder))
    assert (source.rows, source.row_bytes, source.nbytes) == (ROWS, ROW_BYTES, 51_200_245_760)
    try:
        reader = open_row_reader(source, name)
    except RuntimeError as error:
        pytest.skip(str(error))
    with reader:
        # What an offset cut to 32 bits would read instead of the far rows.
        wrapped = {(row * ROW_BYTES % FAR) // ROW_BYTES for row in CHOSEN[2:]} - planted.keys()
        assert len(wrapped) >= 3
        holes = [1, 26_843_547, 300_000_000, *wrapped]
        ids = np.array([*planted, *holes], np.int64)
        out = np.full((len(ids), ROW_BYTES), 0xAA, np.uint8)
        reader.read_rows(ids, out)
        for row, found in zip(planted, out, strict=False):
            assert found.tobytes() == planted[row], row
        assert not out[len(planted) :].any()
        for past in (ROWS, ROWS + 1, 1 << 40, -1):
            with pytest.raises(IndexError, match=f"{past} .*{ROWS} rows"):
                reader.read_rows(np.array([past], np.int64), np.empty((1, ROW_BYTES), np.uint8))


@needs_series
def test_a_file_one_byte_short_is_refused(table: tuple[Path, dict[int, bytes]]) -> None:
    from sglang.srt.layers.ple_rows import PleTableError, open_flat_source

    data = table[0] / "table.bin"
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(PleTableError, match="truncated: 51200245759 bytes, expected 51200245760"):
        open_flat_source(str(table[0]))


@pytest.mark.parametrize(("row", "content"), [(ROWS, bytes(160)), (-1, bytes(160)), (0, bytes(159))])
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, row: int, content: bytes) -> None:
    with pytest.raises(ValueError, match=f"row {row} of {len(content)} bytes"):
        write_sparse_table(tmp_path, {row: content})


def test_a_file_system_without_holes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    class Full:
        st_blocks = 1 << 30

    monkeypatch.setattr(full_table.os, "fstat", lambda fd: Full() if real(fd).st_size > FAR else real(fd))
    with pytest.raises(EnvironmentFault, match="keeps no holes"):
        write_sparse_table(tmp_path, {})
    assert not (tmp_path / "table.bin").exists()


def test_planted_rows_are_all_far_and_finite() -> None:
    ids = np.array([[0, 26_843_545, 26_843_546], [300_000_000, 26_843_546, 5]])
    rows = far_rows(ids)
    assert set(rows) == {26_843_546, 300_000_000}
    assert all(len(row) == ROW_BYTES and not any(byte & 0x7F == 0x7F for byte in row) for row in rows.values())


def test_the_checkpoint_keeps_everything_but_its_small_table(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    names = ["a.ngram_embedding.shard_0.weight", "a.ngram_heads_offsets", "a.ngram_heads_vocab_sizes",
             "a.layer_multipliers", "b.weight"]  # fmt: skip
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model-1.safetensors")
    save_file({"c.ngram_embedding.shard_1.weight": torch.ones(2)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"ngram_vocab_size_base": 500, "other": 1}}))
    declare_full_table(tmp_path)
    assert set(load_file(tmp_path / "model-1.safetensors")) == {"a.layer_multipliers", "b.weight"}
    assert not (tmp_path / "model-2.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"a.layer_multipliers": "model-1.safetensors", "b.weight": "model-1.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text())["text_config"] == {
        "ngram_vocab_size_base": 20_000_000, "other": 1,
    }  # fmt: skip


def record(planted: float, other: float, noise: float = 0.0, rss: float = 3000.0) -> dict[str, Any]:
    def twice(value: float) -> list[dict[str, Any]]:
        return [
            {"prompt": [value], "output": [-1.0], "ids": [1]},
            {"prompt": [value + noise], "output": [-1.0], "ids": [1]},
        ]

    return {"planted": twice(planted), "other": twice(other), "rss_mib": rss}


@pytest.mark.parametrize(
    ("holes", "again", "rows", "bad"),
    [
        (record(-1, -2), record(-1, -2), record(-1.5, -2), []),
        (record(-1, -2), record(-1, -2), record(-1, -2), ["planted prompt"]),
        (record(-1, -2), record(-1, -2), record(-1.5, -2.1), ["other prompt"]),
        (record(-1, -2, 0.05), record(-1, -2), record(-1.5, -2.08, 0.05), []),
        (record(-1, -2, 0.05), record(-1, -2), record(-1.08, -2, 0.05), ["planted prompt"]),
        (record(-1, -2), record(-1, -2.05), record(-1.5, -2.08), []),
        (record(-1, -2), record(-1, -2.05), record(-1.5, -2.12), ["other prompt"]),
        (record(-1, -2), record(-1.3, -2), record(-1.5, -2), ["planted prompt"]),
        (record(-1, -2), record(-1, -2), record(-1.5, -2, rss=20_000), ["planted server"]),
        (record(float("nan"), -2), record(-1, -2), record(-1.5, -2), ["planted prompt", "holes server"]),
    ],
)
def test_judge(holes: dict[str, Any], again: dict[str, Any], rows: dict[str, Any], bad: list[str]) -> None:
    assert [case["case"] for case in judge(holes, again, rows) if not case["ok"]] == bad
