"""Every row reader gives the stored bytes, reads a row once a batch, and keeps its memory bounded.

Stock SGLang can hold the PLE table in pinned memory or map it for a GPU that reads pageable memory; it cannot read
single rows from storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import ple_rows_kit as kit
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

pytestmark = pytest.mark.red_on_stock

ROW_BYTES = 160
READERS = sorted(kit.READERS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A checkpoint whose payloads start at odd offsets; rows straddle pages and the last one ends its file."""
    folder = tmp_path_factory.mktemp("checkpoint")
    table = kit.random_rows(20_011, ROW_BYTES, seed=3)
    weight_map = kit.write_checkpoint(folder, table, shards=8, files=3, pad=3)
    assert weight_map
    return folder, table


def edges(rows: int, shards: int = 8) -> list[int]:
    per = -(-rows // shards)
    return sorted({0, 1, rows - 2, rows - 1} | {i * per + d for i in range(1, shards) for d in (-1, 0, 1)})


@pytest.mark.parametrize("name", READERS)
def test_bytes_equal_safetensors(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = checkpoint
    source = kit.api().open_source(str(folder))
    stored = []
    for extent, index in zip(source.extents, range(8), strict=True):
        with safe_open(source.files[extent.file].path, "pt") as f:
            stored.append(f.get_tensor(f"{kit.PREFIX}.ngram_embedding.shard_{index}.weight").view(torch.uint8).numpy())
    truth = np.concatenate(stored)
    assert (truth == table).all()
    rng = np.random.default_rng(5)
    with kit.READERS[name](source) as reader:
        for count in (0, 1, 16, 64, 65, 300, 5000):
            ids = rng.integers(0, len(table), count)
            for state in ("cold", "warm"):
                if state == "cold":
                    kit.drop_cache(reader)
                assert (kit.read(reader, ids) == truth[ids]).all(), (count, state)
        kit.drop_cache(reader)
        assert (kit.read(reader, edges(len(table))) == truth[edges(len(table))]).all()
        assert (kit.read(reader, np.arange(len(table))) == truth).all()


def skip_if_cached(path: str) -> None:
    """Skip where a file that was dropped from the page cache is still there, as on tmpfs."""
    with open(path, "rb") as stream, contextlib.suppress(BlockingIOError):
        os.preadv(stream.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        pytest.skip("files in the temporary folder do not leave the page cache")


@pytest.mark.parametrize("warm", [1, 2, 3])
def test_large_batches_of_which_a_part_is_resident(checkpoint: tuple[Path, np.ndarray], warm: int) -> None:
    """Blocks are copied on several threads and leave what is missing to the disk, each row once."""
    folder, table = checkpoint
    source = kit.api().open_source(str(folder))
    rng = np.random.default_rng(9)
    with kit.READERS["auto"](source) as reader:
        kit.drop_cache(reader)
        skip_if_cached(source.files[-1].path)
        for file in source.files[:warm]:  # whole files: the kernel reads ahead within one as it likes
            Path(file.path).read_bytes()
        for count in (257, 1024, 1025, 10_000):
            ids = rng.permutation(len(table))[:count]
            before = dataclasses.replace(reader.stats)
            assert (kit.read(reader, ids) == table[ids]).all(), count
            resident = reader.stats.resident_rows - before.resident_rows
            assert reader.stats.unique_rows - before.unique_rows == count
            if warm == len(source.files):
                assert resident == count
            elif reader.info()["direct"]:  # else what was read is resident from then on
                assert 0 < resident < count


@pytest.mark.parametrize("name", READERS)
def test_torch_buffers_of_the_table_dtype(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = checkpoint
    ids = torch.tensor([5, 20_010, 5, 9_000])
    out = torch.zeros((4, ROW_BYTES), dtype=torch.float8_e4m3fn)
    with kit.READERS[name](kit.api().open_source(str(folder))) as reader:
        reader.read_rows(ids, out)
    assert (out.view(torch.uint8).numpy() == table[ids.numpy()]).all()


@pytest.mark.parametrize("name", READERS)
def test_duplicates_are_read_once(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = checkpoint
    ids = np.random.default_rng(1).integers(0, 40, 2000) * 500
    distinct = len(np.unique(ids))
    with kit.READERS[name](kit.api().open_source(str(folder))) as reader:
        kit.drop_cache(reader)
        before = reader.stats.as_dict()
        assert (kit.read(reader, ids) == table[ids]).all()
        after = reader.stats.as_dict()
    delta = {k: after[k] - before[k] for k in after}
    assert (delta["batches"], delta["rows"], delta["unique_rows"]) == (1, 2000, distinct)
    assert delta["requests"] + delta["resident_rows"] <= distinct


def test_rows_that_share_a_page_are_one_direct_read(checkpoint: tuple[Path, np.ndarray]) -> None:
    folder, table = checkpoint
    with kit.READERS["io_uring-direct"](kit.api().open_source(str(folder))) as reader:
        assert (kit.read(reader, np.arange(2000)) == table[:2000]).all()
        pages = 2000 * ROW_BYTES // 4096
        # A row across a boundary needs a two-page read of its own.
        assert reader.stats.requests <= 2 * pages + 4


@pytest.mark.parametrize("name", READERS)
def test_other_ranks_rows_are_zero(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = checkpoint
    ids = np.array([0, 99, 100, 101, 101, 7_999, 8_000, 20_010])
    inside = (ids >= 100) & (ids < 8_000)
    with kit.READERS[name](kit.api().open_source(str(folder)), (100, 8_000)) as reader:
        got = kit.read(reader, ids)
        assert (got[inside] == table[ids[inside]]).all()
        assert not got[~inside].any()
        assert reader.stats.unique_rows == 3
        assert not kit.read(reader, [0, 20_010]).any()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bad", [-1, 20_011, 1 << 40, -(1 << 62)])
def test_ids_outside_the_table_are_errors(checkpoint: tuple[Path, np.ndarray], name: str, bad: int) -> None:
    folder, table = checkpoint
    with kit.READERS[name](kit.api().open_source(str(folder)), (0, 10)) as reader:
        with pytest.raises(IndexError, match=f"{bad} at position 2 .*20011 rows"):
            kit.read(reader, [1, 2, bad, 3])
        assert (kit.read(reader, [1, 2, 3]) == table[1:4]).all()


@pytest.mark.parametrize("name", READERS)
def test_wrong_buffers_are_errors(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, _ = checkpoint
    ids, out = np.arange(4), np.zeros((4, ROW_BYTES), dtype=np.uint8)
    reader = kit.READERS[name](kit.api().open_source(str(folder)))
    with reader:
        with pytest.raises(ValueError, match="480 bytes, 4 rows of 160 bytes need 640"):
            reader.read_rows(ids, out[:3])
        for wrong in (ids.astype(np.int32), ids[::2], [1, 2], torch.arange(4, dtype=torch.int32)):
            with pytest.raises(TypeError, match="int64"):
                reader.read_rows(wrong, out)
        frozen = out.copy()
        frozen.flags.writeable = False
        for target in (
            frozen,
            np.zeros((4, 2 * ROW_BYTES), np.uint8)[:, ::2],
            torch.zeros(ROW_BYTES, 4, dtype=torch.uint8).t(),
        ):
            with pytest.raises(TypeError, match="contiguous"):
                reader.read_rows(ids, target)
    with pytest.raises(ValueError, match="closed"):
        reader.read_rows(ids, out)
    reader.close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_layout_any_ids(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Shard counts, file splits, odd payload offsets, row sizes below and above a page, duplicates, rank ranges."""
    dtype = data.draw(st.sampled_from(["F8_E4M3", "BF16"]))
    dim = data.draw(st.sampled_from([1, 3, 16, 160, 2048, 5000]))
    rows = data.draw(st.integers(1, 60 if dim > 1000 else 700))
    table = kit.random_rows(rows, dim * kit.ITEM[dtype], seed=data.draw(st.integers(0, 99)))
    folder = tmp_path_factory.mktemp("layout")
    kit.write_checkpoint(
        folder,
        table,
        dtype=dtype,
        shards=data.draw(st.integers(1, min(rows, 9))),
        files=data.draw(st.integers(1, 3)),
        pad=data.draw(st.integers(0, 4100)),
        index=data.draw(st.booleans()),
    )
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    batches = data.draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=300), min_size=1, max_size=3))
    source = kit.api().open_source(str(folder))
    for name in READERS:
        with kit.READERS[name](source, (begin, end)) as reader:
            for batch in batches:
                ids = np.array(batch, dtype=np.int64)
                expected = np.where(((ids >= begin) & (ids < end))[:, None], table[ids], 0)
                assert (kit.read(reader, ids) == expected).all(), name


@pytest.mark.parametrize("depth", [1, 2, 3, 17, 256, 4096])
def test_any_queue_depth(checkpoint: tuple[Path, np.ndarray], depth: int) -> None:
    folder, table = checkpoint
    ids = np.random.default_rng(depth).integers(0, len(table), 3000)
    for name in ("io_uring-direct", "io_uring-cached"):
        with kit.READERS[name](kit.api().open_source(str(folder)), queue_depth=depth) as reader:
            assert 1 <= reader.info()["queue_depth"] <= min(depth, 256)
            kit.drop_cache(reader)
            assert (kit.read(reader, ids) == table[ids]).all()


def test_queue_depth_is_measured(tmp_path: Path) -> None:
    """On a table too large to be a toy the depth comes from a probe; it is one of those that were tried."""
    data = kit.write_flat(tmp_path, kit.random_rows(1, ROW_BYTES))
    rows = (260 << 20) // ROW_BYTES
    os.truncate(data, rows * ROW_BYTES)
    kit.write_flat(tmp_path / "x", kit.random_rows(1, ROW_BYTES))  # ple.json needs the row count of the sparse file
    (tmp_path / "ple.json").write_text((tmp_path / "ple.json").read_text().replace('"rows": 1', f'"rows": {rows}'))
    with kit.READERS["io_uring-direct"](kit.api().open_source(str(tmp_path))) as reader:
        assert reader.info()["queue_depth"] in (16, 32, 64, 128, 256)
        assert reader.stats.batches == 0
        assert not kit.read(reader, [1, rows - 1]).any()


def test_offsets_beyond_four_gib(tmp_path: Path) -> None:
    """The published table's geometry: 320,001,536 rows, 51.2 GB, as a sparse file with rows at both ends."""
    rows = 320_001_536
    data = kit.write_flat(tmp_path, kit.random_rows(1, ROW_BYTES))
    (tmp_path / "ple.json").write_text((tmp_path / "ple.json").read_text().replace('"rows": 1', f'"rows": {rows}'))
    os.truncate(data, rows * ROW_BYTES)
    ids = [0, 26_843_546, 160_000_768, rows - 1]
    marks = kit.random_rows(len(ids), ROW_BYTES, seed=8)
    with open(data, "r+b") as f:
        for row, mark in zip(ids, marks, strict=True):
            f.seek(row * ROW_BYTES)
            f.write(mark.tobytes())
        os.fsync(f.fileno())
    source = kit.api().open_source(str(tmp_path))
    assert source.nbytes == 51_200_245_760
    for name in READERS:
        with kit.READERS[name](source, queue_depth=16) as reader:
            assert (kit.read(reader, ids) == marks).all(), name


@pytest.mark.parametrize("name", READERS)
def test_threads_share_a_reader(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = checkpoint
    wrong: list[str] = []
    with kit.READERS[name](kit.api().open_source(str(folder))) as reader:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for count in rng.choice([1, 16, 16, 400], 40):
                ids = rng.integers(0, len(table), count)
                if not (kit.read(reader, ids) == table[ids]).all():
                    wrong.append(f"thread {seed}")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(t.is_alive() for t in threads)
        assert reader.stats.batches == 160
    assert not wrong


@pytest.mark.parametrize("name", READERS)
def test_forked_child_reads_too(checkpoint: tuple[Path, np.ndarray], name: str) -> None:
    """The child has neither the parent's threads nor its ring; both keep reading the right bytes."""
    folder, table = checkpoint
    ids = np.random.default_rng(2).integers(0, len(table), 700)
    with kit.READERS[name](kit.api().open_source(str(folder))) as reader:
        assert (kit.read(reader, ids) == table[ids]).all()
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = 0 if (kit.read(reader, ids) == table[ids]).all() else 1
            finally:
                os._exit(code)
        assert (kit.read(reader, ids[::-1].copy()) == table[ids[::-1]]).all()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A 256 MiB flat table."""
    folder = tmp_path_factory.mktemp("big")
    table = kit.random_rows((256 << 20) // ROW_BYTES, ROW_BYTES, seed=4)
    kit.write_flat(folder, table)
    return folder, table


# --- speed -------------------------------------------------------------------
# omlx 3287: a pool of pread threads won where the rows were on the disk, and took 447 times as long a row as a mapping
# where the page cache held them. Here `auto` is held to a mapping where rows are cached and to such a pool on the disk.


class Mapping:
    """A gather from numpy's mapping without readahead: one page fault at a time where the page is not cached."""

    def __init__(self, path: str) -> None:
        whole = np.memmap(path, dtype=np.uint8, mode="r")
        self._mmap = whole._mmap
        self._mmap.madvise(mmap.MADV_RANDOM)
        self._rows = whole.reshape(-1, ROW_BYTES)

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        np.take(self._rows, ids, axis=0, out=out, mode="clip")  # the other modes buffer the output

    def close(self) -> None:
        """Let the pages go, which the page cache cannot drop before."""
        self._mmap.madvise(mmap.MADV_DONTNEED)


def seconds(read: Callable[[np.ndarray, np.ndarray], object], table: np.ndarray, ids: np.ndarray) -> float:
    out = np.full((len(ids), ROW_BYTES), 0xA5, dtype=np.uint8)
    begin = time.perf_counter()
    read(ids, out)
    end = time.perf_counter()
    assert (out == table[ids]).all()
    return end - begin


def test_cached_rows_are_not_read_and_cost_at_most_five_gathers_from_a_mapping(big: tuple[Path, np.ndarray]) -> None:
    """Five: the bounds leave room for a busy machine. One read a row costs ten and more."""
    folder, table = big
    source = kit.api().open_source(str(folder))
    path, rng = source.files[0].path, np.random.default_rng(6)
    Path(path).read_bytes()
    reader_s, mapping_s = [], []
    with kit.READERS["auto"](source) as reader, contextlib.closing(Mapping(path)) as mapping:
        for _ in range(25):
            ids = rng.integers(0, len(table), 4096)
            reader_s.append(seconds(reader.read_rows, table, ids))
            mapping_s.append(seconds(mapping.read, table, ids))
        assert (reader.stats.requests, reader.stats.resident_rows) == (0, reader.stats.unique_rows)
    assert min(reader_s) < 5 * min(mapping_s)


class Pool:
    """One pread a row on 16 threads: as many reads in flight as the disk of a small machine gains from."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._threads = ThreadPoolExecutor(16)

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        def part(first: int) -> None:
            for i in range(first, len(ids), 16):
                os.preadv(self._file, [out[i]], int(ids[i]) * ROW_BYTES)

        list(self._threads.map(part, range(16)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)


def test_rows_on_the_disk_take_at_most_twice_as_long_as_a_pool_of_preads(big: tuple[Path, np.ndarray]) -> None:
    """Not than a mapping: a disk that is throttled to a rate makes both alike, and one read at a time is no goal."""
    folder, table = big
    source = kit.api().open_source(str(folder))
    path, rng = source.files[0].path, np.random.default_rng(7)
    reader_s, pool_s = [], []
    with kit.READERS["auto"](source) as reader, contextlib.closing(Pool(path)) as pool:
        kit.drop_cache(reader)
        skip_if_cached(path)
        for _ in range(5):
            ids = rng.integers(0, len(table), 4096)
            for read, measured in ((reader.read_rows, reader_s), (pool.read, pool_s)):
                kit.drop_cache(reader)
                measured.append(seconds(read, table, ids))
        assert reader.stats.requests
    assert min(reader_s) < 2 * min(pool_s)


# --- memory ------------------------------------------------------------------


def mapped_rss(path: str) -> int:
    """Resident bytes of this process's mappings of ``path``, from smaps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(path)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def process_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_what_releases_mapped_pages(big: tuple[Path, np.ndarray]) -> None:
    """MADV_RANDOM and FADV_DONTNEED leave mapped pages resident; release_resident does not, and rows stay readable."""
    folder, table = big
    source = kit.api().open_source(str(folder))
    path = source.files[0].path
    ids = np.random.default_rng(0).integers(0, len(table), 40_000)
    with kit.READERS["mmap"](source, rss_budget_bytes=0) as reader:
        assert (kit.read(reader, ids) == table[ids]).all()
        touched = mapped_rss(path)
        assert touched > 100 << 20
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        assert mapped_rss(path) > 0.9 * touched
        reader.release_resident()
        assert mapped_rss(path) == 0
        assert (kit.read(reader, ids[:16]) == table[ids[:16]]).all()


@pytest.mark.parametrize("name", ["auto", "mmap", "python-mmap"])
def test_mapped_pages_return_under_the_budget(big: tuple[Path, np.ndarray], name: str) -> None:
    """The trimmer looks at intervals: after each burst the mapping comes back under the budget, rows unharmed."""
    folder, table = big
    source = kit.api().open_source(str(folder))
    path, budget = source.files[0].path, 64 << 20
    rng = np.random.default_rng(0)
    Path(path).read_bytes()  # warm, so that auto copies from the mapping
    exceeded = 0
    with kit.READERS[name](source, rss_budget_bytes=budget, rss_interval_s=0.05) as reader:
        for _ in range(6):
            ids = rng.integers(0, len(table), 20_000)
            assert (kit.read(reader, ids) == table[ids]).all()
            exceeded += mapped_rss(path) > budget
            deadline = time.monotonic() + 30
            while mapped_rss(path) > budget:
                assert time.monotonic() < deadline, f"{mapped_rss(path)} bytes stay mapped, budget {budget}"
                time.sleep(0.02)
    # The Python reader trims within the batch; the others must have had something to trim.
    assert exceeded or name == "python-mmap"


@pytest.mark.parametrize("name", READERS)
def test_stays_inside_a_memory_cgroup(big: tuple[Path, np.ndarray], name: str) -> None:
    """A child limited to 96 MiB reads a 256 MiB table at random: reclaim keeps it alive, the bytes stay right."""
    folder, table = big
    limit = 96 << 20
    with memory_cgroup(limit) as join:
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                join()
                rng = np.random.default_rng(0)
                with kit.READERS[name](kit.api().open_source(str(folder)), queue_depth=32) as reader:
                    kit.drop_cache(reader)
                    out = np.empty((4096, ROW_BYTES), dtype=np.uint8)
                    code = 0
                    for _ in range(12):
                        ids = rng.integers(0, len(table), 4096)
                        reader.read_rows(ids, out)
                        code = code if (out == table[ids]).all() else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Callable[[], object]]:
    """A memory cgroup (v1 or v2) of ``limit`` bytes and a function that moves the calling process into it."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"ple-rows-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    try:
        cap = group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
        if not cap.exists():
            pytest.skip("the memory controller is not available here")
        cap.write_text(str(limit))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


@pytest.mark.parametrize("name", READERS)
def test_memory_is_flat_over_a_long_mixed_run(big: tuple[Path, np.ndarray], name: str) -> None:
    folder, table = big
    rng = np.random.default_rng(0)
    source = kit.api().open_source(str(folder))
    descriptors = len(os.listdir("/proc/self/fd"))
    with kit.READERS[name](source, rss_budget_bytes=1 << 20, rss_interval_s=0.05) as reader:
        out = np.empty((4096, ROW_BYTES), dtype=np.uint8)
        samples = []
        for step in range(400):
            count = 4096 if step % 40 == 0 else 16
            ids = rng.integers(0, len(table), count)
            reader.read_rows(ids, out[:count])
            assert (out[:count] == table[ids]).all()
            if step % 100 == 99:
                reader.release_resident()
                samples.append(process_rss())
    assert samples[-1] - samples[0] < 16 << 20
    assert len(os.listdir("/proc/self/fd")) == descriptors
