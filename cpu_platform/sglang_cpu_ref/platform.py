"""The platform: device "cpu", no kernel library, every kernel without a portable version replaced by plain
torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_cpu_ref import install, precision, shims
from sglang_cpu_ref.kernels import speculation

logger = logging.getLogger(__name__)


class CpuRefPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on torch's CPU device.

    Out of tree on purpose. With `SGLANG_USE_CPU_ENGINE=1` instead, `is_cpu()` becomes true and dozens of
    modules import `sgl_kernel`, whose only wheel is built for CUDA. As an out-of-tree platform all of
    `is_cuda()`, `is_cpu()`, ... are false, so fused operators dispatch to `forward_native`, attention to
    `torch_native`, and allocators to torch.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the attention backend that needs no kernel library."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Return the key under which fused operators are looked up."""
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Return False: page-locking needs a CUDA driver."""
        return False

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Return True: pages of 64 tokens, which QSA forces, need the ping-pong buffer of GDN states."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether it is speculation with a model's own prediction head (NEXTN and EAGLE are one by now)."""
        return algorithm == "EAGLE"

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the function that finds the KV slots of the tokens to verify."""
        return speculation.extend_cache_locs

    def init_backend(self) -> None:
        """Install the torch shims. SGLang calls this while it imports the model runner, before any model
        module.
        """
        shims.install()

    def post_load_model(self, model: Any) -> None:
        """Replace the kernels that this model's modules launch; leave other models alone."""
        modules = {type(module).__name__ for module in model.modules()}
        if modules & {"RadixLinearAttention", "Qwen2MoeSparseMoeBlock"}:
            replaced = install.functions()
            install.speculative_sampling()
            logger.info("cpu_ref: replaced by torch: %s", ", ".join(replaced))
        if "QSAIndexer" in modules:
            install.qsa_indexer()
        if "Qwen4ExpNGramEmbedding" in modules:
            install.ple_gather()
        if "GatedResidual" in modules:
            precision.follow_float32(model)
