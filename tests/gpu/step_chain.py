"""A decode step in miniature for the step benchmarks of this folder: every token depends on 16 rows of a table.

A step hashes its token to row ids, reads the rows, and mixes their bytes into the next token. One wrong, late or stale
row changes every token after it, so a benchmark that ends on the reference's tokens read the right rows at the right
time in every step. Pure: numpy only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HEADS, ROW_BYTES, VOCAB = 16, 160, 248_320
READY, FAILED = 1, 2
"""Values of the flag that a waiting graph looks at: the rows are there, or will not come. 0: not yet."""


@dataclass(frozen=True)
class Chain:
    """The constants of the hash and of the mix; all arithmetic stays below 2**63."""

    multipliers: np.ndarray
    """int64 [HEADS], odd, below 2**40."""
    offsets: np.ndarray
    """int64 [HEADS], below 2**40."""
    weights: np.ndarray
    """int64 [HEADS, ROW_BYTES], 1 to 2**20."""

    @classmethod
    def make(cls, seed: int = 0) -> Chain:
        rng = np.random.default_rng(seed)
        return cls(
            rng.integers(0, 2**39, HEADS) * 2 + 1,
            rng.integers(0, 2**40, HEADS),
            rng.integers(1, 2**20, (HEADS, ROW_BYTES)),
        )

    def ids(self, token: int, rows: int) -> np.ndarray:
        """Return the row ids of a token, int64 [HEADS]."""
        return (token * self.multipliers + self.offsets) % rows

    def next_token(self, token: int, rows: np.ndarray) -> int:
        """Return the token after `token`, whose rows (uint8 [HEADS, ROW_BYTES]) are given."""
        return int((token * 31 + int((rows.astype(np.int64) * self.weights).sum()) + 1) % VOCAB)

    def run(self, table: np.ndarray, steps: int, token: int = 1) -> np.ndarray:
        """Return the tokens after each of `steps` steps, int64 [steps]."""
        out = np.empty(steps, np.int64)
        for step in range(steps):
            token = self.next_token(token, table[self.ids(token, len(table))])
            out[step] = token
        return out


def write_table(folder: Path, rows: int, seed: int = 0) -> np.ndarray:
    """Write a flat table of random rows, no two blocks of 1 MiB alike; return it mapped, uint8 [rows, ROW_BYTES]."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.bin"
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 256, ((1 << 20) // ROW_BYTES, ROW_BYTES), dtype=np.uint8)
    left = rows
    with path.open("wb") as out:
        while left:
            take = min(left, len(block))
            np.bitwise_xor(block, rng.integers(0, 256, ROW_BYTES, dtype=np.uint8), out=block)
            out.write(block[:take].tobytes())
            left -= take
    (folder / "ple.json").write_text(
        json.dumps(
            {"format": "ple-flat", "version": 1, "file": path.name, "rows": rows, "dim": ROW_BYTES,
             "dtype": "float8_e4m3fn", "weight_scale": 1.0}
        )
    )  # fmt: skip
    return np.memmap(path, np.uint8, "r", shape=(rows, ROW_BYTES))


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    if not values or not 0 < share <= 1:
        raise ValueError(f"quantile {share} of {len(values)} values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def spread(values: list[float]) -> dict[str, Any]:
    """Return the figures kept of a sample, rounded to 0.1."""
    return {
        "p50": round(quantile(values, 0.5), 1),
        "p95": round(quantile(values, 0.95), 1),
        "samples": len(values),
    }


def first_difference(expected: np.ndarray, found: np.ndarray) -> int | None:
    """Return the first step whose token differs, None where all are equal; a missing step differs."""
    shared = min(len(expected), len(found))
    unequal = np.flatnonzero(expected[:shared] != found[:shared])
    if len(unequal):
        return int(unequal[0])
    return None if len(expected) == len(found) else shared


class FlagGate:
    """Who may release a waiting step: the reader with its rows, or a timeout; never both.

    The late one of the two is told so and must not touch the flag, or the next step would start on stale rows.
    `claim` of a step is true once.
    """

    def __init__(self) -> None:
        self._released = -1

    def claim(self, step: int) -> bool:
        """Return whether the caller is the one to release `step`; steps are released in order."""
        if step <= self._released:
            return False
        if step != self._released + 1:
            raise ValueError(f"step {step} is to be released before step {self._released + 1}")
        self._released = step
        return True
