"""The sigmoid gate of the shared expert. Contract: `sglang.kernels.ops.elementwise.elementwise`."""

from __future__ import annotations

import torch


def fused_gate_sigmoid_mul(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor
) -> torch.Tensor:
    """Return sigmoid(hidden_states @ gate_weight) * shared_output [T, hidden]; gate_weight [hidden]."""
    return _gated(hidden_states, gate_weight, shared_output).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the gated shared expert to `final_hidden_states` [T, hidden] in place, rounding once."""
    total = _gated(hidden_states, gate_weight, shared_output) + final_hidden_states.float()
    final_hidden_states.copy_(total.to(final_hidden_states.dtype))


def _gated(hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float()).unsqueeze(-1)
    return gate * shared_output.float()
