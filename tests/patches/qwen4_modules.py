"""SGLang's real Qwen4-Exp modules in this process, built through the real argument resolution, without a server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.server_args import ServerArgs, prepare_server_args

CPU_FLAGS = (
    "--device=cpu",
    "--mem-fraction-static=0.3",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
)
# Text only without --language-model-only, which the stock pin refuses for Qwen4-Exp.
TEXT_ONLY = ("--json-model-override-args", '{"language_model_only": true}')


@dataclass
class Runtime:
    """A published configuration; modules built inside `runtime` read it."""

    server_args: ServerArgs
    model_config: ModelConfig

    def build_model(self, device: torch.device | None = None) -> Any:
        """Return the model as the loader builds it on `device` (default: the host), weights not loaded."""
        load_config = LoadConfig()
        with set_default_torch_dtype(self.model_config.dtype), device or nullcontext():
            return _initialize_model(
                self.model_config, load_config, _get_quantization_config(self.model_config, load_config)
            )


@contextmanager
def runtime(model_path: Path, *flags: str) -> Iterator[Runtime]:
    """Resolve and publish the server arguments, with process groups of one rank; restore the context afterwards."""
    state = runtime_context.snapshot_context()
    try:
        server_args = prepare_server_args(["--model-path", str(model_path), *CPU_FLAGS, *flags])
        runtime_context.publish(server_args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
        _init_process_groups()
        yield Runtime(server_args, model_config_of(server_args))
    finally:
        runtime_context.restore_context(state)


def _init_process_groups() -> None:
    if not torch.distributed.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(backend="gloo")
