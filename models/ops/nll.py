"""Cross-entropy of rows of logits that keeps the logits and one float a row, no matter how many tokens there are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .slabs import slabs


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target], (M,) nats in float32 or wider; logits (M, V) in any type, targets (M,).

    Sums go over float32 or wider; logits of -inf are tokens that cannot be. The gradient comes in the type of the logits.
    """
    return _NLL.apply(logits, targets)


class _NLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        lse = logits.new_empty(len(logits), dtype=wide)
        for slab in slabs(logits):
            lse[slab] = torch.logsumexp(logits[slab].to(wide), dim=-1)
        ctx.save_for_backward(logits, targets, lse)
        return lse - logits.gather(1, targets[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        logits, targets, lse = ctx.saved_tensors
        down = torch.empty_like(logits)
        for slab in slabs(logits):
            part = logits[slab].to(lse.dtype, copy=True).sub_(lse[slab, None]).exp_()
            part.scatter_add_(1, targets[slab, None], part.new_full((len(part), 1), -1.0))
            down[slab] = part.mul_(grad[slab, None])
        return down, None
