"""A random table to measure on, made once and kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from q4kit.errors import EnvironmentFault
from q4kit.ple.flat import DATA, DESCRIPTION, Progress, silent

ROW_BYTES = 160
_CHUNK = 16 << 20


def cache_folder() -> Path:
    """Return where measurement tables are kept: $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "q4kit" / "ple_bench"


def random_table(folder: Path, nbytes: int, progress: Progress = silent) -> Path:
    """Return the folder of a flat fp8 table of about `nbytes` of random rows, making it if it is not there.

    Random bytes: a drive or filesystem that compresses or deduplicates must not look fast.
    """
    rows = nbytes // ROW_BYTES
    place = folder / f"random-{nbytes >> 20}mib"
    data, description = place / DATA, place / DESCRIPTION
    if description.exists() and data.exists() and data.stat().st_size == rows * ROW_BYTES:
        return place
    rng = np.random.default_rng(0)
    try:
        place.mkdir(parents=True, exist_ok=True)
        description.unlink(missing_ok=True)
        with data.open("wb") as out:
            os.posix_fallocate(out.fileno(), 0, rows * ROW_BYTES)
            for done in range(0, rows * ROW_BYTES, _CHUNK):
                size = min(_CHUNK, rows * ROW_BYTES - done)
                out.write(rng.bytes(size))
                progress(done + size, rows * ROW_BYTES)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        data.unlink(missing_ok=True)
        raise EnvironmentFault(
            f"{place}: a table of {nbytes >> 20} MiB cannot be made: {error.strerror}",
            remedy="free disk space, or name another folder with --cache",
        ) from error
    description.write_text(
        json.dumps(
            {
                "format": "ple-flat",
                "version": 1,
                "file": DATA,
                "rows": rows,
                "dim": ROW_BYTES,
                "dtype": "float8_e4m3fn",
                "weight_scale": 1.0,
            }
        )
    )
    return place
