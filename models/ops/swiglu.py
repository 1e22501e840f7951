"""The gate of an MLP, silu(gate) * up, with a backward pass that keeps its two inputs alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slabs import ELEMENTS, rows_of, slabs


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020), (..., D) in the type of `up`.

    On a CPU computed in float32 or wider, slab by slab; elsewhere in the type that comes, by kernels that are wide inside.
    """
    if up.dtype.itemsize >= 4 and up.numel() <= ELEMENTS and not torch.is_grad_enabled():
        return _product(gate, up)  # a decoding step: fewer calls count for more
    return _Gated.apply(gate, up)


def plain(t: Tensor) -> bool:
    """Whether two kernels do it all: every cast would be another one."""
    return t.device.type != "cpu"


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dup = F.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad * up, gate), dup


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if plain(up):
            return _product(gate, up)
        wide = torch.promote_types(up.dtype, torch.float32)
        out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        parts = [rows_of(t) for t in (gate, up, out)]
        for slab in slabs(parts[1]):
            gate_part, up_part, into = (t[slab] for t in parts)
            into.copy_(_product(gate_part.to(wide), up_part))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        if plain(up):
            return _gradients(grad, gate, up)
        wide = torch.promote_types(up.dtype, torch.float32)
        dgate, dup = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        parts = [rows_of(t) for t in (grad, gate, up, dgate, dup)]
        for slab in slabs(parts[2]):
            grad_part, gate_part, up_part, into_gate, into_up = (t[slab] for t in parts)
            found = _gradients(grad_part.to(wide), gate_part.to(wide), up_part)
            into_gate.copy_(found[0])
            into_up.copy_(found[1])
        return dgate, dup
