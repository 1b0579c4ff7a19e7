"""Flat tables: export, comparison, checksums, and what is left behind when the disk says no."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.ple import flat


@dataclass(frozen=True)
class File:
    path: str


@dataclass(frozen=True)
class Span:
    row_begin: int
    rows: int
    file: int
    offset: int


@dataclass(frozen=True)
class Source:
    """The public fields of a row source."""

    rows: int
    dim: int
    files: tuple[File, ...]
    extents: tuple[Span, ...]
    kind: str = "safetensors"
    name: str = "source"
    dtype: str = "float8_e4m3fn"
    weight_scale: float = 0.0123

    @property
    def row_bytes(self) -> int:
        return self.dim

    @property
    def nbytes(self) -> int:
        return self.rows * self.dim


def scattered(folder: Path, data: bytes, dim: int, cuts: list[int]) -> Source:
    """Write rows of ``dim`` bytes into one file per piece, each at an odd offset."""
    rows = len(data) // dim
    bounds = [0, *sorted({c for c in cuts if 0 < c < rows}), rows]
    files, spans = [], []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        path = folder / f"part{i}"
        path.write_bytes(b"\xff" * (i * 7 + 1) + data[a * dim : b * dim] + b"\xfe" * 3)
        files.append(File(str(path)))
        spans.append(Span(a, b - a, i, i * 7 + 1))
    return Source(rows, dim, tuple(files), tuple(spans))


def flat_source(folder: Path) -> Source:
    d = json.loads((folder / flat.DESCRIPTION).read_text())
    path = folder / d["file"]
    assert path.stat().st_size == d["rows"] * d["dim"]
    return Source(
        d["rows"],
        d["dim"],
        (File(str(path)),),
        (Span(0, d["rows"], 0, 0),),
        "flat",
        str(path),
        d["dtype"],
        d["weight_scale"],
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 50), dim=st.integers(1, 40), cuts=st.lists(st.integers(1, 50), max_size=4), seed=st.randoms()
)
def test_export_keeps_every_byte_in_row_order(
    tmp_path_factory: pytest.TempPathFactory, rows: int, dim: int, cuts: list[int], seed: object
) -> None:
    folder = tmp_path_factory.mktemp("export")
    data = os.urandom(rows * dim)
    source = scattered(folder, data, dim, cuts)
    seen: list[tuple[int, int]] = []
    flat.export(source, folder / "out", progress=lambda done, total: seen.append((done, total)))
    copy = flat_source(folder / "out")
    assert Path(copy.files[0].path).read_bytes() == data
    assert (copy.rows, copy.dim, copy.weight_scale) == (rows, dim, 0.0123)
    assert seen[-1] == (len(data), len(data))
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert flat.compare(source, copy).equal
    assert flat.check_stored(copy).equal
    assert sorted(p.name for p in (folder / "out").iterdir()) == [flat.DESCRIPTION, flat.DATA]


def test_checksums_are_blake2b_of_64_mib_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "BLOCK_BYTES", 100)
    monkeypatch.setattr(flat, "_READ_BYTES", 33)
    data = os.urandom(250)
    flat.export(scattered(tmp_path, data, 10, [3, 11]), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / flat.DESCRIPTION).read_text())["checksum"]
    expected = [hashlib.blake2b(data[i : i + 100], digest_size=32).hexdigest() for i in (0, 100, 200)]
    assert stored == {"algorithm": "blake2b-256", "block_bytes": 100, "blocks": expected}


@pytest.mark.parametrize("at", [0, 99, 100, 249])
def test_one_changed_bit_is_found_and_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(flat, "BLOCK_BYTES", 100)
    source = scattered(tmp_path, os.urandom(250), 10, [7])
    flat.export(source, tmp_path / "out")
    copy = flat_source(tmp_path / "out")
    raw = bytearray(Path(copy.files[0].path).read_bytes())
    raw[at] ^= 1
    Path(copy.files[0].path).write_bytes(raw)
    by_bytes, by_sum = flat.compare(source, copy), flat.check_stored(copy)
    assert not by_bytes.equal
    assert f"row {at // 10}, byte {at % 10} " in by_bytes.evidence
    assert not by_sum.equal
    assert f"block {at // 100} (from row {at // 100 * 10} on)" in by_sum.evidence


def test_geometry_and_scale_are_compared_before_bytes(tmp_path: Path) -> None:
    source = scattered(tmp_path, bytes(100), 10, [])
    for change in ({"rows": 9}, {"dim": 5}, {"dtype": "bfloat16"}, {"weight_scale": 0.5}):
        name = next(iter(change))
        outcome = flat.compare(source, Source(**(source.__dict__ | change)))
        assert not outcome.equal
        assert outcome.evidence.startswith(f"{name} differs")


def test_export_does_not_overwrite_unless_told(tmp_path: Path) -> None:
    source = scattered(tmp_path, b"a" * 100, 10, [])
    flat.export(source, tmp_path / "out")
    (tmp_path / "part0").write_bytes(b"\xff" + b"b" * 100 + b"\xfe" * 3)
    with pytest.raises(UsageError, match="exists") as caught:
        flat.export(source, tmp_path / "out")
    assert "--force" in caught.value.remedy
    assert (tmp_path / "out" / flat.DATA).read_bytes() == b"a" * 100
    flat.export(source, tmp_path / "out", force=True)
    assert flat.check_stored(flat_source(tmp_path / "out")).equal
    assert (tmp_path / "out" / flat.DATA).read_bytes() == b"b" * 100


def test_export_into_its_own_folder_is_refused(tmp_path: Path) -> None:
    flat.export(scattered(tmp_path, bytes(100), 10, []), tmp_path / "out")
    with pytest.raises(UsageError, match="holds the table itself"):
        flat.export(flat_source(tmp_path / "out"), tmp_path / "out", force=True)
    assert flat.check_stored(flat_source(tmp_path / "out")).equal


@pytest.mark.parametrize("old", [False, True])
def test_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    source = scattered(tmp_path, os.urandom(100), 10, [])
    if old:
        flat.export(source, tmp_path / "out")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EnvironmentFault, match="writing 100 bytes failed: No space left") as caught:
        flat.export(source, tmp_path / "out", force=True)
    assert caught.value.remedy == "free disk space"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ([flat.DESCRIPTION, flat.DATA] if old else [])
    if old:
        assert flat.check_stored(flat_source(tmp_path / "out")).equal


def test_full_disk_for_real(tmp_path: Path) -> None:
    """A 1 MiB filesystem cannot take a 4 MiB table."""
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        source = scattered(tmp_path, bytes(4 << 20), 1 << 10, [])
        with pytest.raises(EnvironmentFault, match="No space left"):
            flat.export(source, mount / "out")
        assert list((mount / "out").iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_source_that_ends_early_is_named(tmp_path: Path) -> None:
    source = scattered(tmp_path, bytes(100), 10, [])
    os.truncate(tmp_path / "part0", 51)
    with pytest.raises(EnvironmentFault, match="part0: ends at byte 51, 50 bytes short"):
        flat.export(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(EnvironmentFault, match="part0"):
        flat.compare(source, source)


def test_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flat.export(scattered(tmp_path, bytes(100), 10, []), tmp_path / "out", progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("checksum", [None, {}, {"algorithm": "md5", "block_bytes": flat.BLOCK_BYTES, "blocks": []}, 7])
def test_table_without_usable_checksums(tmp_path: Path, checksum: object) -> None:
    flat.export(scattered(tmp_path, bytes(100), 10, []), tmp_path / "out")
    path = tmp_path / "out" / flat.DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checksum": checksum}))
    with pytest.raises(UsageError, match="no blake2b-256 checksums"):
        flat.check_stored(flat_source(tmp_path / "out"))
