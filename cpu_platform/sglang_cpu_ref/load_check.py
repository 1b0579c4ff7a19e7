"""`SGLANG_CPU_REF_CHECK_LOAD=1`: is every parameter filled from the checkpoint, and every checkpoint
tensor used?
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

MARK = "cpu_ref CHECK_LOAD "
"""Start of the log line; a JSON object follows."""
_TARGETS = (
    "sglang.srt.models.qwen4_exp.Qwen4ExpForConditionalGeneration.load_weights",
    "sglang.srt.models.qwen4_exp_mtp.Qwen4ExpForCausalLMMTP.load_weights",
)


def register() -> None:
    """Wrap the weight loaders of Qwen4-Exp and of its prediction head, which shares the model's output head."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in _TARGETS:
        HookRegistry.register(target, checked_load, HookType.AROUND)


def checked_load(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Load into parameters that hold NaN, then log what stayed NaN and what the loader said it did not
    know.
    """
    for _, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data.copy_(torch.full((), float("nan")))
    read = 0
    unknown: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not found" in record.getMessage():
                unknown.append(record.getMessage())

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal read
        for name, tensor in weights:
            read += 1
            yield name, tensor

    listener = Listener()
    loggers = [logging.getLogger(name) for name in ("sglang", "sglang.srt.utils.common")]
    for each in loggers:
        each.addHandler(listener)
    try:
        loaded = original(model, counted())
    finally:
        for each in loggers:
            each.removeHandler(listener)
    parameters = list(model.named_parameters())
    unfilled = [n for n, p in parameters if p.is_floating_point() and bool(torch.isnan(p.data.float()).any())]
    report = {
        "read": read,
        "parameters": len(parameters),
        "unfilled": unfilled,
        "unknown": sorted(set(unknown)),
    }
    logger.warning("%s%s", MARK, json.dumps(report))
    return loaded
