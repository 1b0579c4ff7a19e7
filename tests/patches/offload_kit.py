"""Watch OffloaderV1 on real modules and fake devices: which parameters it moves, which bytes its hook copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fake_cuda import CUDA, HOST, fake_cuda
from qwen4_modules import Runtime
from sglang.srt.models import qwen4_exp
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def model_on_device(runtime: Runtime, monkeypatch: Any, *, ple_on_host: bool = False) -> Iterator[Any]:
    """Yield the real model with its weights on the fake device, its n-gram table on the host if asked."""

    def host_table(*, shape: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=HOST)

    monkeypatch.setattr(qwen4_exp, "allocate_ple_host_table", host_table)  # pinned memory needs a real GPU
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    runtime.model_config.hf_text_config.ple_offload_embedding = ple_on_host  # as the model runner hands it over
    with fake_cuda():
        model = runtime.build_model(CUDA)
        for module in model.modules():
            if isinstance(module, qwen4_exp.Qwen4ExpPinnedHostEmbedding):
                # It copies vars() of a meta weight to the table's, and a fake tensor's device is among them.
                module.weight.fake_device = HOST
        yield model


def on_host(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that are on the host now."""
    return {name for name, parameter in module.named_parameters() if parameter.device == HOST}


def nbytes(module: torch.nn.Module, names: set[str] | None = None) -> int:
    """Return the size of the named parameters (default: all) in bytes, tied ones once."""
    return sum(p.numel() * p.element_size() for n, p in module.named_parameters() if names is None or n in names)


class CopyMeter(TorchDispatchMode):
    """Add up the bytes of host-to-device copies, and note the addresses they read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.sources: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device == HOST and out.device == CUDA:
            self.bytes += out.numel() * out.element_size()
            self.sources.add(args[0].untyped_storage().data_ptr())
        return out
