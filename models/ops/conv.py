"""Causal depthwise convolution with SiLU, block by block: every block brings its own left context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import causal_conv1d_backend
from .slabs import slabs


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


def _sums(u: Tensor, left: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """The convolution before its SiLU, (F, G, Ch); u (F, G, Ch), left (F, W-1, Ch), taps (W, Ch) in one type."""
    y = torch.addcmul(bias, u, taps[-1])
    for shift, tap, reach in _shifts(u.shape[1], len(taps)):
        if shift < u.shape[1]:
            y[:, shift:].addcmul_(u[:, :-shift], taps[tap])
        y[:, :reach].addcmul_(left[:, tap : tap + reach], taps[tap])
    return y


class _BlockConv(torch.autograd.Function):
    """Hand-written so that neither an unfolded copy nor a padded one exists; products accumulate in float32 or wider.

    Nothing but the inputs is kept; sums are made again in the backward pass, slab by slab.
    """

    @staticmethod
    def forward(ctx, u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(u, left, weight, bias)
        wide = torch.promote_types(u.dtype, torch.float32)
        taps, bias = weight.to(wide).t().contiguous(), bias.to(wide)
        out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        flat, body, context = out.flatten(0, 1), u.flatten(0, 1), left.flatten(0, 1)
        for slab in slabs(flat):
            flat[slab] = F.silu(_sums(body[slab].to(wide), context[slab].to(wide), taps, bias))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        u, left, weight, bias = ctx.saved_tensors
        wide = torch.promote_types(u.dtype, torch.float32)
        taps, wide_bias = weight.to(wide).t().contiguous(), bias.to(wide)
        du, dleft = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (u, left))
        dtaps, dbias = torch.zeros_like(taps), torch.zeros_like(wide_bias)
        parts = [t.flatten(0, 1) for t in (grad, u, left, du, dleft)]
        for slab in slabs(parts[0]):
            grad_part, body, context, into, into_left = (t[slab] for t in parts)
            _slab_backward(
                grad_part.to(wide), body.to(wide), context.to(wide), taps, wide_bias, into, into_left, dtaps, dbias
            )
        return du, dleft, dtaps.t().to(weight.dtype), dbias.to(bias.dtype)


def _slab_backward(grad, u, left, taps, bias, du, dleft, dtaps, dbias) -> None:
    """Writes du and dleft of a slab, and adds to dtaps and dbias."""
    dy = torch.ops.aten.silu_backward(grad, _sums(u, left, taps, bias))
    into, into_left = dy * taps[-1], torch.zeros_like(left)
    dtaps[-1] += (dy * u).sum((0, 1))
    for shift, tap, reach in _shifts(u.shape[1], len(taps)):
        dtaps[tap] += (dy[:, :reach] * left[:, tap : tap + reach]).sum((0, 1))
        into_left[:, tap : tap + reach].addcmul_(dy[:, :reach], taps[tap])
        if shift < u.shape[1]:
            into[:, :-shift].addcmul_(dy[:, shift:], taps[tap])
            dtaps[tap] += (dy[:, shift:] * u[:, :-shift]).sum((0, 1))
    dbias += dy.sum((0, 1))
    du.copy_(into)
    dleft.copy_(into_left)
