"""Gated RMSNorm behind the gated delta net's output."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)


def _layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
    quant_heads: int = 0,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Return RMSNorm(x) * weight * act(z), None, and 1 / rms [rows]; x and the result [rows, size], z the
    same elements.

    Contract: `sglang.kernels.ops.attention.fla.layernorm_gated._layer_norm_fwd`, RMS only, one group a row.
    With `norm_before_gate=False` the gate multiplies x before the norm.
    """
    if quant_heads or not is_rms_norm or group_size not in (None, x.shape[-1]):
        raise NotImplementedError("cpu_ref: _layer_norm_fwd serves the gated RMSNorm of GDN only")
    gate = None
    if z is not None:
        z = z.reshape(-1, z.shape[-1]).float()
        gate = torch.sigmoid(z) if activation == "sigmoid" else F.silu(z)
    wide = x.float()
    if gate is not None and not norm_before_gate:
        wide = wide * gate
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * rstd * weight.float()
    if bias is not None:
        y = y + bias.float()
    if gate is not None and norm_before_gate:
        y = y * gate
    y = y.to(x.dtype)
    return (out.copy_(y) if out is not None else y), None, rstd.squeeze(-1)
