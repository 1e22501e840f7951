"""RMSNorm and its gated form with hand-written backward passes: few passes over memory, sums in float32 or wider."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slabs import ELEMENTS, rows_of, slabs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the type of x (Zhang and Sennrich 2019)."""
    if x.dtype.itemsize >= 4 and x.numel() <= ELEMENTS and not torch.is_grad_enabled():
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)  # a decoding step: fewer calls count for more
    return _RMSNorm.apply(x, weight, eps)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(y * silu(z)), the norm before Mamba-2's out_proj; y, z (..., D), in the type of y."""
    return _GatedRMSNorm.apply(y, z, weight, eps)


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., 1), of x in float32 or wider."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, dweight: Tensor) -> Tensor:
    """Gradient of x, dx = inverse (g w - x inverse^2 mean(g w x)); adds to that of the weight. All (rows, D)."""
    grad_x = grad * x
    dweight.addmv_(grad_x.t(), inverse[:, 0])
    mean = torch.matmul(grad_x, weight[:, None]).mul_(inverse.pow(3)).div_(-x.shape[-1])
    dx = torch.mul(grad, weight, out=grad_x).mul_(inverse)
    return dx.addcmul_(x, mean)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse, rows, flat, scale = (
            x.new_empty(*x.shape[:-1], 1, dtype=wide),
            rows_of(x),
            rows_of(out),
            weight.to(wide),
        )
        for slab in slabs(rows):
            part = rows[slab].to(wide)
            rows_of(inverse)[slab] = found = _inverse(part, eps)
            flat[slab] = (part * found).mul_(scale)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        scale, dx = weight.to(wide), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dweight = torch.zeros_like(scale)
        parts = [rows_of(t) for t in (grad, x, inverse, dx)]
        for slab in slabs(parts[1]):
            grad_part, x_part, inverse_part, into = (t[slab] for t in parts)
            into.copy_(_norm_backward(grad_part.to(wide), x_part.to(wide), scale, inverse_part, dweight))
        return dx, dweight.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    """Keeps y and z alone and makes the gated product again in the backward pass."""

    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        out, scale = torch.empty(y.shape, dtype=y.dtype, device=y.device), weight.to(wide)
        inverse = y.new_empty(*y.shape[:-1], 1, dtype=wide)
        parts = [rows_of(t) for t in (y, z, inverse, out)]
        for slab in slabs(parts[0]):
            y_part, z_part, inverse_part, into = (t[slab] for t in parts)
            gated = F.silu(z_part.to(wide)).mul_(y_part)
            inverse_part.copy_(_inverse(gated, eps))
            into.copy_(gated.mul_(inverse_part).mul_(scale))
        ctx.save_for_backward(y, z, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        y, z, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        scale = weight.to(wide)
        dweight = torch.zeros_like(scale)
        dy, dz = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, z))
        parts = [rows_of(t) for t in (grad, y, z, inverse, dy, dz)]
        for slab in slabs(parts[1]):
            grad_part, y_part, z_part, inverse_part, into_y, into_z = (t[slab] for t in parts)
            wide_y, wide_z = y_part.to(wide), z_part.to(wide)
            gate = F.silu(wide_z)
            dgated = _norm_backward(grad_part.to(wide), gate * wide_y, scale, inverse_part, dweight)
            into_y.copy_(gate.mul_(dgated))
            into_z.copy_(torch.ops.aten.silu_backward(dgated.mul_(wide_y), wide_z))
        return dy, dz, dweight.to(weight.dtype), None
