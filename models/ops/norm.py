"""RMSNorm and its gated form with hand-written backward passes: few passes over memory, sums in float32 or wider."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the type of x (Zhang and Sennrich 2019)."""
    return _RMSNorm.apply(x, weight, eps)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(y * silu(z)), the norm before Mamba-2's out_proj; y, z (..., D), in the type of y."""
    return _GatedRMSNorm.apply(y, z, weight, eps)


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., 1)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight: dx = inverse (g w - x inverse^2 mean(g w x))."""
    grad_x = grad * x
    dweight = torch.mv(grad_x.flatten(0, -2).t(), inverse.flatten())
    mean = torch.matmul(grad_x, weight[:, None]).mul_(inverse.pow(3)).div_(-x.shape[-1])
    dx = torch.mul(grad, weight, out=grad_x).mul_(inverse)
    return dx.addcmul_(x, mean), dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        wide = inverse.dtype
        return (x.to(wide) * inverse).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        dx, dweight = _norm_backward(grad.to(wide), x.to(wide), weight.to(wide), inverse)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    """Keeps y and z alone and makes the gated product again in the backward pass."""

    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        gated = F.silu(z.to(wide)).mul_(y.to(wide))
        inverse = _inverse(gated, eps)
        ctx.save_for_backward(y, z, weight, inverse)
        return gated.mul_(inverse).mul_(weight.to(wide)).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        y, z, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        wide_y, wide_z = y.to(wide), z.to(wide)
        gate = F.silu(wide_z)
        dgated, dweight = _norm_backward(grad.to(wide), gate * wide_y, weight.to(wide), inverse)
        dz = torch.ops.aten.silu_backward(dgated * wide_y, wide_z)
        return gate.mul_(dgated).to(y.dtype), dz.to(z.dtype), dweight.to(weight.dtype), None
