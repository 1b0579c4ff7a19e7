"""fp32 serving of a model that hard-codes bf16 in places, so that it can be compared with a reference to
1e-5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def follow_float32(model: nn.Module) -> None:
    """With `--dtype float32`, let the hard-coded bf16 parts of Qwen4-Exp compute in fp32; otherwise do
    nothing.

    These are the projections of the hyper-connections and the output of the n-gram embedding. No value
    changes: the weights were loaded as bf16 and are only widened. What still rounds is the QSA index cache,
    which is bf16 by design.
    """
    embedding = next(p for name, p in model.named_parameters() if "embed_tokens" in name)
    if embedding.dtype != torch.float32:
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind == "GatedResidual":
            module.params_dtype = torch.float32  # type: ignore[assignment]
            for child in module.children():
                if isinstance(child, nn.Linear):
                    child.float()
        elif kind == "Qwen4ExpNGramEmbedding":
            module.register_forward_hook(_widen)


def _widen(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()
