"""The gate of an MLP, silu(gate) * up, with a backward pass that keeps its two inputs alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slabs import rows_of, slabs


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), (..., D) in the type of `up`; computed in float32 or wider."""
    return _Gated.apply(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        wide = torch.promote_types(up.dtype, torch.float32)
        out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        parts = [rows_of(t) for t in (gate, up, out)]
        for slab in slabs(parts[1]):
            gate_part, up_part, into = (t[slab] for t in parts)
            into.copy_(F.silu(gate_part.to(wide)).mul_(up_part))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        wide = torch.promote_types(up.dtype, torch.float32)
        dgate, dup = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        parts = [rows_of(t) for t in (grad, gate, up, dgate, dup)]
        for slab in slabs(parts[2]):
            grad_part, gate_part, up_part, into_gate, into_up = (t[slab] for t in parts)
            grad_part, gate_part = grad_part.to(wide), gate_part.to(wide)
            into_up.copy_(F.silu(gate_part).mul_(grad_part))
            into_gate.copy_(torch.ops.aten.silu_backward(grad_part * up_part, gate_part))
        return dgate, dup
