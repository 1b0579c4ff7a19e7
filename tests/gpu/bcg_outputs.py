"""A LogitsProcessorOutput through real breakable graphs: captured, replayed with new inputs, equal to the eager body.

``python tests/gpu/bcg_outputs.py`` prints one JSON line a case and exits 1 if one of them does not hold.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.base_cuda_graph_runner import BaseCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from sglang.srt.model_executor.runner_utils.pool import GraphPoolPrecarve

HIDDEN, VOCAB, MAX_REQUESTS = 64, 1000, 8


def make_backend(debug_eager: bool) -> BreakableCudaGraphBackend:
    """The real backend; ``__init__`` wants a model runner and a published configuration, capture does not."""
    backend = BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend)
    backend._cuda_graph_runner = SimpleNamespace(
        cuda_graph_output_rows=lambda output: BaseCudaGraphRunner.cuda_graph_output_rows(None, output),
        cuda_graph_output_capacity_rows=lambda output: BaseCudaGraphRunner.cuda_graph_output_capacity_rows(
            None, output
        ),
    )
    backend._graphs, backend._outputs, backend._capture_inputs = {}, {}, {}
    backend._pool = torch.cuda.graph_pool_handle()
    backend._capture_stream = torch.cuda.Stream()
    backend._device_module = torch.cuda
    backend._tp_group = SimpleNamespace(barrier=lambda: None)
    backend._debug_eager = debug_eager
    backend._shared_output_buffer = None
    backend._precarve = GraphPoolPrecarve()
    return backend


class Model:
    """Two graph segments around an eager break, and the outputs of a draft verify.

    Under ``debug_eager`` the whole body is one break already, and breaks do not nest.
    """

    def __init__(self, tokens_per_request: int, pruned: bool, own_break: bool) -> None:
        self.tokens, self.pruned = tokens_per_request, pruned
        self.middle = eager_on_graph(self._middle) if own_break else self._middle
        self.inputs = torch.randn(MAX_REQUESTS * tokens_per_request, HIDDEN, device="cuda")
        self.head = torch.randn(HIDDEN, VOCAB, device="cuda")
        self.eager_calls = 0

    def _middle(self, hidden: torch.Tensor) -> torch.Tensor:
        self.eager_calls += 1
        return torch.tanh(hidden)

    def body(self, requests: int) -> LogitsProcessorOutput:
        hidden = self.middle(self.inputs[: requests * self.tokens] * 2) + 1
        selected = hidden[:: self.tokens] if self.pruned else hidden
        return LogitsProcessorOutput(next_token_logits=selected @ self.head, hidden_states=hidden)


def case(tokens: int, pruned: bool, debug_eager: bool) -> dict[str, Any]:
    named = {"case": "bcg", "tokens_per_request": tokens, "pruned_logits": pruned, "debug_eager": debug_eager}
    backend, model = make_backend(debug_eager), Model(tokens, pruned, own_break=not debug_eager)
    try:
        for requests in (MAX_REQUESTS, 3, 1):
            backend.capture_one(ShapeKey(size=requests), lambda requests=requests: model.body(requests))
    except TypeError as error:
        return {**named, "error": str(error), "ok": False}
    equal, rows = True, []
    for requests in (1, 3, MAX_REQUESTS, 3):
        model.inputs.normal_()
        eager = model.body(requests)
        model.eager_calls = 0
        replayed = backend.replay(ShapeKey(size=requests), None)
        torch.cuda.synchronize()
        equal &= model.eager_calls == 1
        rows.append(replayed.next_token_logits.shape[0])
        for name in ("next_token_logits", "hidden_states"):
            equal &= torch.equal(getattr(replayed, name), getattr(eager, name))
    return {**named, "logit_rows": rows, "ok": equal}


def main() -> int:
    results = [
        case(tokens, pruned, debug_eager)
        for tokens, pruned in ((1, False), (4, False), (4, True))
        for debug_eager in (False, True)
    ]
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
