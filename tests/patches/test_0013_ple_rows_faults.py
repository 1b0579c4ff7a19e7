"""A read that cannot be right raises and names file, offset and errno; it never returns zeros, never kills the process.

Also: where io_uring, O_DIRECT or a compiler is missing, the reader falls back, says so once, and gives equal bytes.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import ple_rows_kit as kit
import pytest
from dying_disk import NoDiskError, mounted

pytestmark = pytest.mark.red_on_stock

ROW_BYTES, ROWS = 160, 5000
READERS = sorted(kit.READERS)


def table_in(folder: Path) -> tuple[np.ndarray, Path, Any]:
    table = kit.random_rows(ROWS, ROW_BYTES, seed=6)
    data = kit.write_flat(folder, table)
    return table, data, kit.api().open_source(str(folder))


def failure(reader: Any, ids: Any) -> Any:
    with pytest.raises(kit.api().PleRowReadError) as caught:
        kit.read(reader, ids)
    assert reader.stats.errors > 0
    return caught.value


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("count", [16, 600])
def test_truncated_while_open(tmp_path: Path, name: str, count: int) -> None:
    """Rows before the cut are refused as well: the table is no longer the one that was opened."""
    table, data, source = table_in(tmp_path)
    with kit.READERS[name](source) as reader:
        assert (kit.read(reader, [0, ROWS - 1]) == table[[0, -1]]).all()
        os.truncate(data, 4096 * 30)
        for ids in (np.arange(ROWS - count, ROWS), np.arange(16)):
            error = failure(reader, ids)
            assert error.filename == str(data)
            assert error.errno in (errno.ESTALE, errno.EIO)
            assert error.offset >= 0
            assert str(error.offset) in str(error)


def test_truncated_while_threads_copy(tmp_path: Path) -> None:
    """What is beyond the cut faults in several threads at once; each finds its own way out."""
    table = kit.random_rows(200_000, ROW_BYTES, seed=8)
    data = kit.write_flat(tmp_path, table)
    source = kit.api().open_source(str(tmp_path))
    ids = np.random.default_rng(8).permutation(len(table))
    with kit.api().open_row_reader(source, options=kit.api().RowReaderOptions(threads=8)) as reader:
        assert (kit.read(reader, ids) == table[ids]).all()
        os.truncate(data, data.stat().st_size - 16 * 4096)
        for _ in range(5):
            reader.release_resident()
            assert failure(reader, ids).filename == str(data)


@pytest.mark.parametrize("name", READERS)
def test_truncated_within_the_page_of_a_row(tmp_path: Path, name: str) -> None:
    """A mapping shows zeros there instead of a fault: the case that only the size tells."""
    table, data, source = table_in(tmp_path)
    with kit.READERS[name](source) as reader:
        assert (kit.read(reader, [ROWS - 1]) == table[-1]).all()
        os.truncate(data, ROWS * ROW_BYTES - 1)
        failure(reader, [ROWS - 1])


@pytest.mark.parametrize("name", READERS)
def test_rewritten_while_open(tmp_path: Path, name: str) -> None:
    table, data, source = table_in(tmp_path)
    with kit.READERS[name](source) as reader:
        assert (kit.read(reader, [3]) == table[3]).all()
        with open(data, "r+b") as f:
            f.seek(3 * ROW_BYTES)
            f.write(b"\0" * ROW_BYTES)
        os.utime(data, ns=(0, source.files[0].mtime_ns + 1))
        error = failure(reader, [3])
        assert error.errno == errno.ESTALE
        assert "rewritten" in str(error)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("how", ["rename", "unlink"])
def test_replaced_while_open(tmp_path: Path, name: str, how: str) -> None:
    table, data, source = table_in(tmp_path)
    with kit.READERS[name](source) as reader:
        assert (kit.read(reader, [3]) == table[3]).all()
        if how == "rename":
            (tmp_path / "new").write_bytes(kit.random_rows(ROWS, ROW_BYTES, seed=7).tobytes())
            os.replace(tmp_path / "new", data)
        else:
            data.unlink()
        error = failure(reader, [3])
        assert error.errno == errno.ESTALE
        assert {"rename": "replaced", "unlink": "removed"}[how] in str(error)


@pytest.mark.parametrize("name", ["auto", "python-pread"])
def test_link_pointed_elsewhere_is_noticed(tmp_path: Path, name: str) -> None:
    """A model cache links to blobs; a new link leaves no trace on the open file, so paths are looked up in time."""
    table, data, _ = table_in(tmp_path)
    os.rename(data, tmp_path / "blob")
    data.symlink_to(tmp_path / "blob")
    with kit.READERS[name](kit.api().open_source(str(tmp_path))) as reader:
        assert (kit.read(reader, [3]) == table[3]).all()
        (tmp_path / "blob2").write_bytes(table[::-1].tobytes())
        data.unlink()
        data.symlink_to(tmp_path / "blob2")
        time.sleep(1.1)
        assert "replaced" in str(failure(reader, [3]))


@pytest.mark.parametrize("name", READERS)
def test_changes_that_leave_the_rows_alone_are_no_error(tmp_path: Path, name: str) -> None:
    """chmod and hard links move ctime, as a replacement does."""
    table, data, source = table_in(tmp_path)
    with kit.READERS[name](source) as reader:
        for change in (lambda: os.chmod(data, 0o600), lambda: os.link(data, tmp_path / "backup")):
            change()
            assert (kit.read(reader, np.arange(700)) == table[:700]).all()
        assert reader.stats.errors == 0


def test_changed_between_source_and_reader(tmp_path: Path) -> None:
    _, data, source = table_in(tmp_path)
    os.truncate(data, 100)
    for name in READERS:
        with pytest.raises(kit.api().PleTableError, match="changed while the table was being opened"):
            kit.READERS[name](source)


@pytest.mark.parametrize("name", READERS)
def test_media_error(tmp_path: Path, name: str) -> None:
    """A disk that stops answering: EIO from the block layer (SIGBUS in a mapping), the process lives on."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(tmp_path))
        except NoDiskError as e:
            pytest.skip(f"no disk that can die: {e}")
        table, data, source = table_in(disk.mount)
        with kit.READERS[name](source) as reader:
            ids = np.arange(0, ROWS, 7)
            assert (kit.read(reader, ids) == table[ids]).all()
            disk.lose(data, 0)
            kit.drop_cache(reader)
            for count in (16, len(ids)):
                error = failure(reader, ids[:count])
                assert error.errno == errno.EIO
                assert error.filename == str(data)
                assert 0 <= error.offset < ROWS * ROW_BYTES


def test_error_survives_pickling() -> None:
    """The scheduler and its workers are processes."""
    error = kit.api().PleRowReadError(errno.EIO, "reading 160 bytes failed", "/t.bin", 4096, 160, 80)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.filename, copy.errno, copy.offset, copy.expected, copy.actual) == (
        str(error),
        "/t.bin",
        errno.EIO,
        4096,
        160,
        80,
    )
    assert "4096" in str(error)
    assert "EIO" in str(error)


# --- falling back ------------------------------------------------------------

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_IO_URING_SETUP = 425


def forbid(syscall: int, error: int) -> None:
    """Make one system call fail with ``error`` for the calling thread, as a container's seccomp profile does."""
    load, equal, answer = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *op)
        for op in (
            (load, 0, 0, 0),
            (equal, 0, 1, syscall),
            (answer, 0, 0, 0x00050000 | error),
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in a thread of its own: a seccomp filter belongs to a thread and ends with it."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as e:
            result.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert result, "the thread hangs"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EACCES, errno.ENOMEM])
def test_without_io_uring(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int) -> None:
    table, _, source = table_in(tmp_path)
    api = kit.api()

    def work() -> tuple[str, np.ndarray]:
        forbid(_IO_URING_SETUP, error)
        with pytest.raises(RuntimeError, match=f"io_uring cannot be used: .*{errno.errorcode[error]}.*auto or pread"):
            api.open_row_reader(source, "io_uring")
        caplog.clear()
        with api.open_row_reader(source, "auto") as reader:
            kit.drop_cache(reader)
            return reader.name, kit.read(reader, np.arange(ROWS))

    with caplog.at_level(logging.INFO, logger="sglang.srt.layers.ple_rows"):
        name, rows = in_thread(work)
    assert name == "pread"
    assert (rows == table).all()
    lines = [r.getMessage() for r in caplog.records if "PLE rows" in r.getMessage()]
    assert len(lines) == 1
    assert errno.errorcode[error] in lines[0]
    assert "pread" in lines[0]


def test_without_o_direct(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _, source = table_in(tmp_path)
    real = os.open

    def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with (
        caplog.at_level(logging.INFO, logger="sglang.srt.layers.ple_rows"),
        kit.api().open_row_reader(source, "auto") as reader,
    ):
        assert reader.name == "io_uring"
        assert not reader.info()["direct"]
        kit.drop_cache(reader)
        assert (kit.read(reader, np.arange(ROWS)) == table).all()
    assert sum("O_DIRECT refused (EINVAL)" in r.getMessage() for r in caplog.records) == 1


def test_on_tmpfs(tmp_path: Path) -> None:
    """No page cache to miss and, on most kernels, no O_DIRECT."""
    folder = Path("/dev/shm") / f"ple-rows-test-{os.getpid()}"
    try:
        table, _, source = table_in(folder)
        with kit.api().open_row_reader(source, "auto") as reader:
            assert (kit.read(reader, np.arange(ROWS)) == table).all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_NO_COMPILER = """
import logging, sys
import numpy as np
from sglang.srt.layers import ple_rows
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
source = ple_rows.open_source(sys.argv[1])
ids = np.arange(source.rows)
for asked in ("auto", "pread", "mmap"):
    with ple_rows.open_row_reader(source, asked) as reader:
        out = np.empty((source.rows, source.row_bytes), dtype=np.uint8)
        reader.read_rows(ids, out)
        print(asked, type(reader).__name__, (out.tobytes() == open(source.files[0].path, "rb").read()))
try:
    ple_rows.open_row_reader(source, "io_uring")
except RuntimeError as e:
    print("refused:", e)
"""


def test_without_a_compiler(tmp_path: Path) -> None:
    kit.api()
    table_in(tmp_path / "table")
    env = os.environ | {"CXX": "/nonexistent/c++", "SGLANG_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _NO_COMPILER, str(tmp_path / "table")],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("auto PythonPreadReader True", "pread PythonPreadReader True", "mmap PythonMmapReader True"):
        assert line in done.stdout
    assert done.stdout.count("without native code") == 3
    assert "refused: PLE row reader io_uring cannot be used: the native code cannot be built" in done.stdout


def test_unknown_reader(tmp_path: Path) -> None:
    _, _, source = table_in(tmp_path)
    with pytest.raises(ValueError, match=r"'fast'.*'auto', 'io_uring', 'pread', 'mmap'"):
        kit.api().open_row_reader(source, "fast")
