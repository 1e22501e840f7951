"""The plan of block attention: which tile of query blocks touches which keys, made once a pass for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_TOKENS = 128  # queries a tile; measured on CPU: smaller pays calls, larger pays masked pairs


@dataclass(frozen=True)
class Tile:
    """Query blocks [first, last) against keys [low, high).

    `mask` (Bt or 1, 1, m*G, keys) is added to the scores, None if all blocks see all these keys; `empty` (Bt or 1, 1, m)
    marks the blocks that see none of them, None if there is no such block.
    """

    first: int
    last: int
    low: int
    high: int
    mask: Tensor | None
    empty: Tensor | None


def plan_tiles(lo: Tensor, hi: Tensor, *, block_length: int, device: torch.device, dtype: torch.dtype) -> list[Tile]:
    """Tiles for blocks that see keys [lo, hi); lo, hi (Bt, M) on the CPU; masks in `dtype` on `device`."""
    per_tile = max(1, TILE_TOKENS // block_length)
    return [
        _tile(lo[:, first : first + per_tile], hi[:, first : first + per_tile], first, block_length, device, dtype)
        for first in range(0, lo.shape[1], per_tile)
    ]


def _tile(lo: Tensor, hi: Tensor, first: int, block_length: int, device: torch.device, dtype: torch.dtype) -> Tile:
    last, some = first + lo.shape[1], hi > lo
    if not bool(some.any()):
        return Tile(first, last, 0, 0, None, None)
    low, high = int(lo[some].min()), int(hi[some].max())
    if bool((lo == low).all()) and bool((hi == high).all()):
        return Tile(first, last, low, high, None, None)
    if bool((lo == lo[:1]).all()) and bool((hi == hi[:1]).all()):
        lo, hi, some = lo[:1], hi[:1], some[:1]  # rows alike share one mask
    keys = torch.arange(low, high)
    seen = (keys >= lo[..., None]) & (keys < hi[..., None])  # (Bt or 1, m, keys)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    mask = mask.repeat_interleave(block_length, dim=1)[:, None]
    empty = None if bool(some.all()) else ~some[:, None].to(device)
    return Tile(first, last, low, high, mask.to(device), empty)
