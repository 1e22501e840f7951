"""Causal depthwise convolution with SiLU, block by block: every block brings its own left context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import causal_conv1d_backend


def block_conv(u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """silu(causal conv) of blocks `u` (B, M, G, Ch) behind `left` (B, M, W-1, Ch); weight (Ch, W), bias (Ch).

    Token `i` sums taps `k` of `weight[:, k] * input[i - (W-1) + k]`, where inputs before the block come from `left`.
    """
    if causal_conv1d_backend.takes(u, weight):
        return causal_conv1d_backend.block_conv(u, left, weight, bias)
    return _BlockConv.apply(u, left, weight, bias)


def _shifts(size: int, width: int):
    """(shift, tap, tokens of the block that reach into `left`) for every tap but the last."""
    for shift in range(1, width):
        yield shift, width - 1 - shift, min(shift, size)


class _BlockConv(torch.autograd.Function):
    """Hand-written so that neither an unfolded copy nor a padded one exists; products accumulate in float32 or wider."""

    @staticmethod
    def forward(ctx, u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = torch.promote_types(u.dtype, torch.float32)
        taps, size = weight.to(wide).t().contiguous(), u.shape[2]
        body, context = u.to(wide), left.to(wide)
        y = torch.addcmul(bias.to(wide), body, taps[-1])
        for shift, tap, reach in _shifts(size, len(taps)):
            if shift < size:
                y[:, :, shift:].addcmul_(body[:, :, : size - shift], taps[tap])
            y[:, :, :reach].addcmul_(context[:, :, tap : tap + reach], taps[tap])
        ctx.save_for_backward(u, left, weight, y)
        ctx.bias_dtype = bias.dtype
        return F.silu(y).to(u.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        u, left, weight, y = ctx.saved_tensors
        taps, size = weight.to(y.dtype).t().contiguous(), u.shape[2]
        body, context = u.to(y.dtype), left.to(y.dtype)
        dy = torch.ops.aten.silu_backward(grad.to(y.dtype), y)
        du, dleft, dtaps = dy * taps[-1], torch.zeros_like(context), torch.empty_like(taps)
        dtaps[-1] = (dy * body).flatten(0, 2).sum(0)
        for shift, tap, reach in _shifts(size, len(taps)):
            dtaps[tap] = (dy[:, :, :reach] * context[:, :, tap : tap + reach]).flatten(0, 2).sum(0)
            dleft[:, :, tap : tap + reach].addcmul_(dy[:, :, :reach], taps[tap])
            if shift < size:
                du[:, :, : size - shift].addcmul_(dy[:, :, shift:], taps[tap])
                dtaps[tap] += (dy[:, :, shift:] * body[:, :, : size - shift]).flatten(0, 2).sum(0)
        dbias = dy.flatten(0, 2).sum(0).to(ctx.bias_dtype)
        return du.to(u.dtype), dleft.to(left.dtype), dtaps.t().to(weight.dtype), dbias
