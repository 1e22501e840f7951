"""Attention of a pass on CUDA: FlexAttention in training, flash-attn or our Triton kernels on a cache.

One plan a pass, made where the tiles of other devices are planned; ranges of keys stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import flash_attn_backend, flex_backend, triton_checks

NARROW = (torch.float32, torch.bfloat16, torch.float16)  # float64 goes the plain way, whose sums are as exact
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RangePlan:
    """What each block of a pass sees: keys [lo, hi), (Bt, M) on the device, clean blocks first. flex: of a training pass."""

    lo: Tensor
    hi: Tensor
    clean_blocks: int
    block_length: int
    longest: int  # at least the longest range
    from_start: bool  # every lo is 0
    flex: flex_backend.FlexPlan | None = None


def plan_ranges(
    lo: Tensor, hi: Tensor, *, clean_blocks: int, block_length: int, cached: bool, device, dtype: torch.dtype
) -> RangePlan | None:
    """A plan for blocks that see keys [lo, hi), (Bt, M) on the CPU; None where tiles of plain torch are to be used."""
    if not serves(torch.device(device), dtype, cached=cached):
        return None
    flex = None
    if not cached:
        flex = flex_backend.plan_flex(lo, hi, clean_blocks=clean_blocks, block_length=block_length, device=device)
    ranges = [t.to(torch.int32).to(device) for t in (lo, hi)]
    longest, from_start = int((hi - lo).max()), not bool(lo.any())
    return RangePlan(ranges[0], ranges[1], clean_blocks, block_length, longest, from_start, flex)


def serves(device: torch.device, dtype: torch.dtype, *, cached: bool) -> bool:
    """Whether passes on `device` go this way: FlexAttention, or on a cache our kernels, passed their check there."""
    if device.type != "cuda" or dtype not in NARROW or (cached and torch.is_grad_enabled()):
        return False
    return (triton_checks.attend_declined if cached else flex_backend.declined)(device) is None


def attend_ranges(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: RangePlan) -> Tensor:
    """q (Bt, Hq, L', P) of the tokens that ask, all or the noisy ones; k, v (Bt, Hkv, L, P) of the pass -> like q.

    keys, values (Bt, Hkv, S, P): the cache, into which the clean tokens of the pass have been written already.
    """
    if plan.flex is not None:
        return flex_backend.attend(q, k, v, plan.flex)
    size, clean = plan.block_length, plan.clean_blocks
    asked = q.shape[2] // size
    noisy = plan.lo.shape[1] - clean
    blocks = q.unflatten(2, (asked, size))
    parts = []
    if asked > noisy:
        parts.append(_cached(blocks[:, :, :clean], keys, values, plan, slice(0, clean), None))
    if noisy:
        own = tuple(t[:, :, clean * size :].unflatten(2, (noisy, size)) for t in (k, v))
        parts.append(_cached(blocks[:, :, asked - noisy :], keys, values, plan, slice(clean, None), (own[0], own[1])))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return y.flatten(2, 3)


def _cached(q: Tensor, keys: Tensor, values: Tensor, plan: RangePlan, blocks: slice, own: Pair | None) -> Tensor:
    """Blocks q (Bt, Hq, m, G, P) over the cache and their own keys."""
    lo, hi = plan.lo[:, blocks], plan.hi[:, blocks]
    if plan.from_start and flash_attn_backend.takes(q):
        seen = flash_attn_backend.attend_prefix(q, keys, values, hi)
        return seen[0] if own is None else _join(q, seen, own)
    from .triton_attend import attend_cache

    return attend_cache(q, keys, values, lo.contiguous(), hi.contiguous(), own, longest=plan.longest)


def _join(q: Tensor, seen: Pair, own: Pair) -> Tensor:
    """One softmax out of what was seen (out, log-sum-exp) and a block's own keys, which are few."""
    own_k, own_v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in own)
    scores = torch.matmul(q, own_k.transpose(-1, -2)).to(seen[1].dtype) * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    both = torch.logaddexp(seen[1], lse)
    mine = torch.matmul((scores - both[..., None]).exp().to(q.dtype), own_v)
    return (seen[0] * (seen[1] - both).exp()[..., None] + mine).to(q.dtype)
