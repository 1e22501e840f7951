"""Rotary positions as one operation that writes each half once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """First half paired with second half (Su et al. 2021); x (B, L, H, P), tables cos and sin (B or 1, L, 1, P/2)."""
    return _Rotate.apply(x, *tables)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    low, high = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, sign=-1.0), None, None
