"""The rows of a PLE table are found in a checkpoint's shards or a flat file, and a table that is not whole is refused.

Stock SGLang copies every shard into host memory or into a file of its own; it has no way to say where a row lies.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import ple_rows_kit as kit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

pytestmark = pytest.mark.red_on_stock

ROWS, ROW_BYTES = 1003, 160
SCALE_NAME = f"{kit.PREFIX}.ngram_embedding.weight_scale"


def refused(path: Path, **kwargs: object) -> str:
    """Open a table that must be refused and return the message."""
    api = kit.api()
    with pytest.raises(api.PleTableError) as caught:
        api.open_source(str(path), **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
@pytest.mark.parametrize(("shards", "files", "pad"), [(1, 1, 0), (3, 2, 1), (7, 3, 13), (128, 4, 7)])
def test_extents_are_where_safetensors_finds_the_rows(
    tmp_path: Path, dtype: str, shards: int, files: int, pad: int
) -> None:
    table = kit.random_rows(ROWS, ROW_BYTES)
    weight_map = kit.write_checkpoint(tmp_path, table, shards=shards, files=files, pad=pad, dtype=dtype)
    source = kit.api().open_source(str(tmp_path))

    assert (source.rows, source.row_bytes, source.dim) == (ROWS, ROW_BYTES, ROW_BYTES // kit.ITEM[dtype])
    row = 0
    for extent, name in zip(source.extents, sorted_shards(weight_map), strict=True):
        with safe_open(tmp_path / weight_map[name], "pt") as f:
            stored = f.get_tensor(name).view(torch_uint8()).numpy()
        path = source.files[extent.file].path
        raw = Path(path).read_bytes()[extent.offset : extent.offset + extent.rows * ROW_BYTES]
        assert raw == stored.tobytes()
        assert extent.row_begin == row
        row += extent.rows
    assert row == ROWS
    files_of, offsets = source.locate(np.array([0, ROWS - 1]))
    assert Path(source.files[files_of[1]].path).read_bytes()[offsets[1] :][:ROW_BYTES] == table[-1].tobytes()


def sorted_shards(weight_map: dict[str, str]) -> list[str]:
    return sorted((n for n in weight_map if ".shard_" in n), key=lambda n: int(n.split(".shard_")[1].split(".")[0]))


def torch_uint8() -> object:
    import torch

    return torch.uint8


@pytest.mark.parametrize("where", ["last", "alone"])
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("blob", "value"),
    [
        (kit.Blob("BF16", [1], kit.bf16(0.01171875)), 0.01171875),
        (kit.Blob("F32", [], struct.pack("<f", 0.1)), float(np.float32(0.1))),
        (kit.Blob("F16", [1, 1], struct.pack("<e", 0.1)), float(np.float16(0.1))),
    ],
)
def test_scale_is_exact_wherever_it_lives(
    tmp_path: Path, where: str, index: bool, blob: kit.Blob, value: float
) -> None:
    kit.write_checkpoint(tmp_path, kit.random_rows(9, 16), scale_blob=blob, scale_file=where, index=index)
    assert kit.api().open_source(str(tmp_path)).weight_scale == value


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
def test_scale_that_cannot_be_right_is_refused_by_name(tmp_path: Path, value: float) -> None:
    kit.write_checkpoint(tmp_path, kit.random_rows(9, 16), scale_blob=kit.scale(value))
    message = refused(tmp_path)
    assert SCALE_NAME in message
    assert repr(value) in message
    assert "above zero" in message


def test_missing_scale_is_refused_for_fp8_and_one_for_bf16(tmp_path: Path) -> None:
    kit.write_checkpoint(tmp_path / "fp8", kit.random_rows(9, 16), scale_file=None)
    assert f"{SCALE_NAME} is missing" in refused(tmp_path / "fp8")
    kit.write_checkpoint(tmp_path / "bf16", kit.random_rows(9, 16), scale_file=None, dtype="BF16")
    assert kit.api().open_source(str(tmp_path / "bf16")).weight_scale == 1.0


def test_unregistered_scale_is_refused_with_the_file_that_holds_it(tmp_path: Path) -> None:
    weight_map = kit.write_checkpoint(tmp_path, kit.random_rows(9, 16), scale_file="alone")
    file = weight_map.pop(SCALE_NAME)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = refused(tmp_path)
    assert SCALE_NAME in message
    assert file in message
    assert "does not register" in message


def test_scale_listed_but_not_stored_is_refused(tmp_path: Path) -> None:
    weight_map = kit.write_checkpoint(tmp_path, kit.random_rows(9, 16), scale_file=None)
    weight_map[SCALE_NAME] = next(iter(weight_map.values()))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert f"{SCALE_NAME} is listed" in refused(tmp_path)


@pytest.mark.parametrize("cut", [1, ROW_BYTES, 4096])
def test_truncated_shard_is_refused_with_both_sizes(tmp_path: Path, cut: int) -> None:
    weight_map = kit.write_checkpoint(tmp_path, kit.random_rows(ROWS, ROW_BYTES))
    path = tmp_path / max(weight_map.values())
    size = path.stat().st_size
    os.truncate(path, size - cut)
    message = refused(tmp_path)
    assert str(path) in message
    assert str(size) in message
    assert str(size - cut) in message
    assert "truncated" in message


def test_missing_shard_and_missing_file_are_named(tmp_path: Path) -> None:
    weight_map = kit.write_checkpoint(tmp_path, kit.random_rows(30, 16), shards=3, files=3)
    gone = f"{kit.PREFIX}.ngram_embedding.shard_1.weight"
    (tmp_path / weight_map[gone]).unlink()
    assert weight_map[gone] in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    message = refused(tmp_path)
    assert "shard_1" in message
    assert "download" in message


@pytest.mark.parametrize(
    ("shard", "blob", "words"),
    [
        (1, kit.Blob("F8_E4M3", [9, 16], b"\0" * 144), ["9 rows", "expected 10"]),
        (1, kit.Blob("F8_E4M3", [10, 8], b"\0" * 80), ["8 columns", "16"]),
        (1, kit.Blob("BF16", [10, 16], b"\0" * 320), ["BF16", "F8_E4M3"]),
        (1, kit.Blob("I8", [10, 16], b"\0" * 160), ["I8", "F8_E4M3, BF16"]),
        (2, kit.Blob("F8_E4M3", [160], b"\0" * 160), ["[160]", "[rows, dim]"]),
        (2, kit.Blob("F8_E4M3", [0, 16], b""), ["[0, 16]", "positive"]),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(
    tmp_path: Path, shard: int, blob: kit.Blob, words: list[str]
) -> None:
    kit.write_checkpoint(tmp_path, kit.random_rows(30, 16), shards=3, files=1, index=False)
    tensors = {
        f"{kit.PREFIX}.ngram_embedding.shard_{i}.weight": kit.Blob("F8_E4M3", [10, 16], b"\0" * 160) for i in range(3)
    }
    name = f"{kit.PREFIX}.ngram_embedding.shard_{shard}.weight"
    tensors[name] = blob
    kit.write_safetensors(tmp_path / "model-00001-of-00001.safetensors", tensors | {SCALE_NAME: kit.scale()})
    message = refused(tmp_path)
    assert name in message
    for word in words:
        assert word in message


def test_only_the_last_shard_may_be_short(tmp_path: Path) -> None:
    kit.write_checkpoint(tmp_path, kit.random_rows(25, 16), shards=3)
    source = kit.api().open_source(str(tmp_path))
    assert [e.rows for e in source.extents] == [9, 9, 7]
    source.require(rows=25, dim=16, dtype="float8_e4m3fn")
    for expected in ({"rows": 26}, {"dim": 8}, {"dtype": "bfloat16"}):
        with pytest.raises(kit.api().PleTableError, match=str(next(iter(expected.values())))):
            source.require(**expected)


def test_two_tables_need_a_choice(tmp_path: Path) -> None:
    other = kit.PREFIX.replace("layers.1", "layers.2")
    kit.write_checkpoint(tmp_path, kit.random_rows(9, 16, 1), index=False, files=1)
    os.rename(tmp_path / "model-00001-of-00001.safetensors", tmp_path / "first.safetensors")
    kit.write_checkpoint(tmp_path, kit.random_rows(9, 16, 2), index=False, files=1, prefix=other)
    message = refused(tmp_path)
    assert kit.PREFIX in message
    assert other in message
    assert kit.api().open_source(str(tmp_path), prefix=other).name.endswith(f"{other}.ngram_embedding")
    assert "layers.7" in refused(tmp_path, prefix=kit.PREFIX.replace("layers.1", "layers.7"))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", "", 7, "a/b.safetensors"])
def test_index_may_not_lead_out_of_the_checkpoint(tmp_path: Path, file: object) -> None:
    weight_map: dict[str, object] = dict(kit.write_checkpoint(tmp_path, kit.random_rows(9, 16)))
    weight_map[SCALE_NAME] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert repr(file) in refused(tmp_path)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_flat_table(tmp_path: Path, dtype: str) -> None:
    kit.write_flat(tmp_path, kit.random_rows(ROWS, ROW_BYTES), dtype=dtype)
    for path in (tmp_path, tmp_path / "ple.json"):
        source = kit.api().open_source(str(path))
        assert (source.kind, source.rows, source.row_bytes, source.dtype) == ("flat", ROWS, ROW_BYTES, dtype)
        assert source.weight_scale == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": ROWS + 1}, ["truncated", str(ROWS * ROW_BYTES), str((ROWS + 1) * ROW_BYTES)]),
        ({"rows": ROWS - 1}, ["too long"]),
        ({"rows": True}, ["rows", "True"]),
        ({"rows": 0}, ["rows", "positive"]),
        ({"rows": float(ROWS)}, ["rows", "positive"]),
        ({"dim": ...}, ["dim", "None"]),
        ({"dtype": "float16"}, ["dtype", "float16"]),
        ({"dtype": ["bfloat16"]}, ["dtype"]),
        ({"weight_scale": 0}, ["weight_scale", "above zero"]),
        ({"weight_scale": math.nan}, ["weight_scale"]),
        ({"weight_scale": ...}, ["weight_scale", "None"]),
        ({"weight_scale": "0.5"}, ["weight_scale"]),
        ({"file": "../table.bin"}, ["file", "../table.bin"]),
        ({"file": "gone.bin"}, ["gone.bin"]),
        ({"file": "a\0b"}, ["file"]),
        ({"format": "other"}, ["format", "ple-flat"]),
        ({"version": 2}, ["version", "2"]),
    ],
)
def test_flat_description_that_is_wrong_is_refused(tmp_path: Path, changes: dict, words: list[str]) -> None:
    kit.write_flat(tmp_path, kit.random_rows(ROWS, ROW_BYTES), **changes)
    message = refused(tmp_path)
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", "[" * 100_000])
def test_flat_description_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ple.json").write_text(text)
    assert "ple.json" in refused(tmp_path)


# --- header ------------------------------------------------------------------


def accepted_by_library(path: Path) -> bool:
    try:
        with safe_open(path, "np") as f:
            f.keys()
    except (SafetensorError, OSError, ValueError):
        return False
    return True


def headers() -> st.SearchStrategy[bytes]:
    """Valid headers, their byte-level mutations, and JSON that only looks like one."""
    size = st.one_of(st.integers(-1, 40), st.integers(), st.booleans(), st.floats(), st.text(max_size=2))
    entry = st.one_of(
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F8_E4M3", "BF16", "F32", "F4", "I64", "BOOL", "X9", ""]),
                "shape": st.lists(size, max_size=3),
                "data_offsets": st.lists(size, max_size=3),
                "more": st.none(),
            },
        ),
        st.none(),
        st.integers(),
    )
    loose = st.dictionaries(st.text(max_size=4), entry, max_size=3).map(lambda d: json.dumps(d).encode())
    valid = st.lists(st.tuples(st.sampled_from(["F8_E4M3", "BF16"]), st.integers(0, 4), st.integers(0, 4)), max_size=4)
    return st.one_of(loose, valid.flatmap(_mutated), st.binary(max_size=64))


def _mutated(tensors: list[tuple[str, int, int]]) -> st.SearchStrategy[bytes]:
    header, at = {}, 0
    for i, (dtype, rows, dim) in enumerate(tensors):
        end = at + rows * dim * kit.ITEM[dtype]
        header[f"t{i}"] = {"dtype": dtype, "shape": [rows, dim], "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()

    def replace(edits: list[tuple[int, int]]) -> bytes:
        changed = bytearray(raw)
        for where, value in edits:
            changed[where % len(changed)] = value
        return bytes(changed)

    return st.lists(st.tuples(st.integers(0, 4096), st.integers(32, 126)), max_size=3).map(replace)


# Long runs: PLE_ROWS_FUZZ_EXAMPLES=200000 takes some ten minutes.
FUZZ_EXAMPLES = int(os.environ.get("PLE_ROWS_FUZZ_EXAMPLES", "300"))


@settings(max_examples=FUZZ_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=headers(), payload=st.integers(0, 64), lie=st.sampled_from([0, 0, 0, 0, 1, -1, 1 << 40]))
def test_header_parser_never_accepts_what_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, payload: int, lie: int
) -> None:
    """Any bytes: either a named refusal, or spans that tile the payload and that safetensors agrees to."""
    header = kit.part("safetensors_header")
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", max(0, len(raw) + lie)) + raw + b"\0" * payload)
    refusal, entries = "", {}
    try:
        entries = header.read_header(str(path))
    except kit.api().PleTableError as e:
        refusal = str(e)
    if refusal:
        assert str(path) in refusal
        return
    assert accepted_by_library(path)
    at = 8 + len(raw)
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        assert entry.begin == at
        at = entry.end
    assert at == path.stat().st_size


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(["F8_E4M3", "BF16", "F32"]), st.lists(st.integers(0, 5), max_size=3)), max_size=5
    ),
    pad=st.integers(0, 9),
)
def test_header_parser_accepts_what_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]], pad: int
) -> None:
    size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    blobs = {f"t{i}": kit.Blob(d, s, b"\7" * (math.prod(s) * size[d])) for i, (d, s) in enumerate(shapes)}
    path = tmp_path_factory.mktemp("header") / "x.safetensors"
    kit.write_safetensors(path, blobs, pad=pad)
    assert accepted_by_library(path)
    entries = kit.part("safetensors_header").read_header(str(path))
    assert {n: (e.dtype, list(e.shape), e.end - e.begin) for n, e in entries.items()} == {
        n: (b.dtype, list(b.shape), len(b.data)) for n, b in blobs.items()
    }


def test_duplicate_tensor_names_are_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = f'{{"a":{entry},"a":{entry}}}'.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")
    with pytest.raises(kit.api().PleTableError, match="duplicate key 'a'"):
        kit.part("safetensors_header").read_header(str(path))
