"""Reproducible random tensors that can be drawn from any offset, in any order, at about a gigabyte a second.

A tensor is a stream named by (seed, tensor name): 16-bit words of a PCG64-DXSM generator, whose raw output
numpy keeps stable, each mapped through a table of 65536 normal quantiles. So a value depends only on seed,
name and position: not on shard size, expert layout, split of a table, thread count or torch's own generators.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 20
"""Elements per step: words, indices and results stay in the cache."""
_WORDS_PER_DRAW = 4
"""16-bit words in one 64-bit output of the generator."""


def words(seed: int, name: str, offset: int, count: int) -> npt.NDArray[np.uint16]:
    """Return words [offset, offset + count) of the stream of tensor `name`, shape [count]."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.PCG64DXSM(int.from_bytes(digest[:16], "little"))
    first_draw, skip = divmod(offset, _WORDS_PER_DRAW)
    generator.advance(first_draw)
    raw = np.asarray(generator.random_raw(-(-(skip + count) // _WORDS_PER_DRAW)), dtype="<u8")
    return raw.view("<u2")[skip : skip + count]


@lru_cache(maxsize=64)
def normal_quantiles(mean: float, std: float, dtype: str, scale: float = 1.0) -> torch.Tensor:
    """Return the 65536 equally likely values of N(mean, std) / scale in `dtype`, shape [65536].

    For float32 the values are rounded to bf16 first: SGLang keeps hyper-connections and n-gram tables in bf16
    whatever --dtype says, so only bf16-representable weights are the same weights in every dtype.
    """
    import torch

    probability = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    values = (mean + std * torch.special.ndtri(probability)) / scale
    return _rounded(values, dtype)


@lru_cache(maxsize=8)
def log_uniform_quantiles(low: float, high: float, dtype: str) -> torch.Tensor:
    """Return the 65536 equally likely values of log(U(low, high)) in `dtype`, shape [65536]."""
    import torch

    values = (low + (high - low) * (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536).log()
    return _rounded(values, dtype)


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    import torch

    rounded = values.to(torch.bfloat16 if dtype == "float32" else getattr(torch, dtype))
    return rounded.float() if dtype == "float32" else rounded


def draw(quantiles: torch.Tensor, seed: int, name: str, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return elements [offset, offset + prod(shape)) of tensor `name`, in the quantiles' dtype, reshaped
    to `shape`.
    """
    import torch

    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[quantiles.element_size()]
    table = quantiles.view(torch.uint8).numpy().view(unsigned)
    count = int(np.prod(shape))
    out = np.empty(count, dtype=unsigned)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        # mode="clip" skips the bounds check (a 16-bit index is always in range) and the buffering it costs
        np.take(table, words(seed, name, offset + start, stop - start), out=out[start:stop], mode="clip")
    return torch.from_numpy(out.view(np.uint8)).view(quantiles.dtype).reshape(shape)
