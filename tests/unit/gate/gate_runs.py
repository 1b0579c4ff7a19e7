"""Synthetic records and recordings of the gate's unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from q4kit.gate.store import Record
from q4kit.oracle.plan import Options, make_plan
from q4kit.oracle.recording import ItemResult, Position, Recording


def recording(run: int, *, shift: float = 0.0) -> Recording:
    """Return a run that repeats to the bit but for `shift`, nats, on every position."""
    options = Options(scored=60, decode_tokens=7, top=2)
    prompts = {"a": list(range(300)), "b": list(range(400))}
    block = {
        "model": {"config_sha256": "c", "weights": "w", "dtype": "d"},
        "device": {"kind": "k", "name": "n"},
        "time": f"t{run}",
        "server_started": f"s{run}",
    }
    header: dict[str, Any] = {
        "backend": "sglang",
        "prompt_set": {"name": "synthetic", "sha256": "0"},
        "tokenizer": "t",
        "options": {name: getattr(options, name) for name in Options.__dataclass_fields__},
        "provenance": block,
    }
    made = Recording(header, prompts)
    random = np.random.default_rng(0)
    for item in make_plan(prompts, options):
        sequence = prompts[item.prompt][: item.length] + [2000] * item.generate
        positions = []
        for pos in range(item.first, len(sequence)):
            value = float(-1.0 - random.random() + shift)
            positions.append(Position(pos, sequence[pos], value, [(sequence[pos], value), (1, value - 1)], value))
        made.results.append(ItemResult(item, positions, 0))
    return made


def served(prefix: int) -> Record:
    """Return the record of a prefix that served."""
    speed = {"context": 101, "decode_tok_s": 5.0, "prefill_tok_s": 90.0}
    return Record(prefix, "tree", "", "served", boot_s=20.0, rss_gib=1.5, peak_rss_gib=2.0, speed=(speed,))


def failed(prefix: int, reason: str = "ValueError: no", stage: str = "boot") -> Record:
    """Return the record of a prefix that did not."""
    return Record(prefix, "tree", "", "failed", stage=stage, reason=reason)
