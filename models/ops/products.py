"""Attention of one tile as plain products and a softmax, on any device; the backward pass makes the weights again.

On a CPU with bfloat16 products this is several times faster than the fused kernel, whose own products are slow there;
elsewhere it serves where no fused kernel does. Work goes slab by slab, so that scores stay in a core's cache, or in bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # scores that exist at one time: 4 MB and 512 MB in float32
MATRIX_PRODUCTS = 1 << 24  # multiplications of a matrix that is worth a call of its own (measured)
BLIND = -1e30  # log-sum-exp of a query that sees no key: finite, and far below any score

Slab = tuple[slice, slice, slice]  # batch rows, heads, keys


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, blind: bool) -> tuple[Tensor, Tensor]:
    """Outputs (Bt, H, L, P) and log-sum-exps (Bt, H, L, 1) of q (Bt, H, L, P) over k, v (Bt, H, S, P).

    mask (Bt or 1, 1, L, S) is added to the scores; blind: some queries may see no key, and get zeros.
    """
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(*q.shape[:-1], 1, dtype=_wide(q))
    for batch, heads, keys in _slabs(q, k):
        whole = keys.stop - keys.start == k.shape[2]
        new = _part(q, k, v, mask, (batch, heads, keys), blind or not (whole or mask is None))
        here = batch, heads
        out[here], lse[here] = new if keys.start == 0 else join((out[here], lse[here]), new)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `lse` may be that of a larger softmax, of which these keys are a part, and `out` its."""
    scale, wide = q.shape[-1] ** -0.5, _wide(q)
    delta = torch.mul(grad, out).sum(-1, keepdim=True, dtype=wide)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for slab in _slabs(q, k):
        batch, heads, keys = slab
        rows, held = (batch, heads), (batch, heads, keys)
        weights = _scores(q, k, mask, slab).sub_(lse[rows]).exp_()
        dv[held] = _product(weights.to(q.dtype).transpose(-1, -2), grad[rows])
        dscores = _product(grad[rows], v[held].transpose(-1, -2)).to(wide).sub_(delta[rows])
        dscores = dscores.mul_(weights).mul_(scale).to(q.dtype)
        dk[held] = _product(dscores.transpose(-1, -2), q[rows])
        asked = _product(dscores, k[held])
        dq[rows] = asked if keys.start == 0 else dq[rows] + asked
    return dq, dk, dv


def join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One softmax out of two parts: outputs (..., P) and log-sum-exps (..., 1) over all their keys."""
    both = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - both).exp() + other[0] * (other[1] - both).exp(), both


def _part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slab: Slab, blind: bool) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, slab)
    top = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1, out=scores)  # each row is read before it is written
    # the largest weight is exp(top - lse): no second exponential
    lse = top - weights.amax(-1, keepdim=True).log_()
    if blind:  # 0/0 where no key is seen
        weights.nan_to_num_(0.0)
        lse = lse.nan_to_num_(BLIND)
    return _product(weights.to(q.dtype), v[slab]), lse


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, slab: Slab) -> Tensor:
    """q k^T / sqrt(P) + mask of a slab, in float32 or wider."""
    batch, heads, keys = slab
    scores = _product(q[batch, heads], k[slab].transpose(-1, -2)).to(_wide(q)).mul_(q.shape[-1] ** -0.5)
    if mask is not None:
        scores += mask[batch if len(mask) > 1 else slice(None), :, :, keys]
    return scores


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(Bt, H, L, X) by (Bt, H, X, Y). Large ones on a CPU go matrix by matrix, where a batched product would copy keys that
    are a part of longer ones."""
    size = a.shape[-2] * a.shape[-1] * b.shape[-1]
    if a.device.type != "cpu" or a.dtype.itemsize > 2 or size < MATRIX_PRODUCTS:
        return torch.matmul(a, b)
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for row in range(len(a)):
        for head in range(a.shape[1]):
            torch.mm(a[row, head], b[row, head], out=out[row, head])
    return out


def _slabs(q: Tensor, k: Tensor) -> Iterator[Slab]:
    """Whole batch rows, else heads, else runs of keys, so that a slab holds about SLAB_ELEMENTS scores."""
    batch, heads, queries, _ = q.shape
    keys, most = k.shape[2], SLAB_ELEMENTS["cpu" if q.device.type == "cpu" else "cuda"]
    run = min(keys, max(1, most // queries))
    group = min(heads, max(2, most // (queries * run)))  # a single bfloat16 matrix takes twice the time of one of two
    rows = max(1, most // (queries * run * heads)) if group == heads else 1
    for b in range(0, batch, rows):
        for h in range(0, heads, group):
            for s in range(0, keys, run):
                yield slice(b, b + rows), slice(h, h + group), slice(s, min(s + run, keys))


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
