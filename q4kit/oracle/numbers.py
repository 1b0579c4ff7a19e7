"""Log-probabilities as text: the shortest form that reads back to the same number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def kind(values: Iterable[float]) -> str:
    """Return "float32" when every value is one (SGLang computes logprobs in float32), else "float64"."""
    return "float32" if all(float(np.float32(value)) == value for value in values) else "float64"


def text(value: float, number: str) -> str:
    """Return the shortest text that `parse` reads back to exactly `value`; `ValueError` when not finite."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not finite")
    return str(np.float32(value)) if number == "float32" else repr(float(value))


def parse(value: Any, number: str) -> float:
    """Return the number; raise `ValueError` when it is not finite."""
    result = float(np.float32(value)) if number == "float32" else float(value)
    if not math.isfinite(result):
        raise ValueError(f"{value!r} is not finite")
    return result
