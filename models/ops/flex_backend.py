"""FlexAttention behind the training pass's attention: both streams in one kernel that touches only visible tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .probe import Pair, failure

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

STREAMS = slice(0, 4), slice(4, 8)  # of the check below
TILE = 128  # queries and keys of a tile of the mask, the size that FlexAttention's kernels are built for


@dataclass(frozen=True)
class FlexPlan:
    """What all attention layers of a training pass share; tokens are the clean ones and then those of the noisy blocks."""

    mask: BlockMask | None  # every token asks; None in a plan of memory alone
    noisy: BlockMask | None  # noisy tokens alone ask, as in a last layer
    compiled: bool


def declined(device: torch.device) -> str | None:
    """None if this backend serves `device`, else the reason in a sentence."""
    if device.type != "cuda":
        return f"on {device.type} FlexAttention has no backward pass and is slower than tiles"
    return _checked(device)


@functools.cache
def _checked(device: torch.device) -> str | None:
    return failure(lambda: _probe(device), 3e-2)


def plan_flex(
    lo: Tensor, hi: Tensor, *, clean_blocks: int, block_length: int, device, compiled: bool = True
) -> FlexPlan:
    """The mask of a pass of M blocks, clean ones first: block m sees clean tokens [lo, hi), a noisy one its own too.

    lo, hi (Bt, M) on the CPU.
    """
    blocks = lo.shape[1]
    first = torch.arange(blocks) * block_length
    noisy = torch.arange(blocks) >= clean_blocks
    own_lo, own_hi = torch.where(noisy, first, 0), torch.where(noisy, first + block_length, 0)
    ranges = [lo, hi, own_lo.expand_as(lo), own_hi.expand_as(lo)]
    tables = [t.to(torch.int32).repeat_interleave(block_length, dim=1).to(device) for t in ranges]
    later = [t[:, clean_blocks * block_length :].contiguous() for t in tables]
    tokens = blocks * block_length
    return FlexPlan(_mask(tables, tokens), _mask(later, tokens) if clean_blocks < blocks else None, compiled)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: FlexPlan) -> Tensor:
    """q (Bt, Hq, L, P), k, v (Bt, Hkv, L, P) of all tokens of the pass -> like q. A token that sees nothing gets zeros.

    q may be that of the noisy tokens alone.
    """
    kernel = _compiled() if plan.compiled else _uncompiled()
    mask = plan.mask if q.shape[2] == k.shape[2] else plan.noisy
    return kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _mask(tables: list[Tensor], keys: int) -> BlockMask:
    """tables (Bt, L): keys [low, high) and [mine, behind) that each query sees, of `keys` in all."""
    from torch.nn.attention.flex_attention import BlockMask

    low, high, mine, behind = tables
    some, whole = _tiles(tables, keys)

    def visible(b, h, query, key):
        cached = (key >= low[b, query]) & (key < high[b, query])
        return cached | ((key >= mine[b, query]) & (key < behind[b, query]))

    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(low.shape[1], keys)
    )


def _uncompiled():
    from torch.nn.attention.flex_attention import flex_attention  # half a second to import: only where it is used

    return flex_attention


@functools.cache
def _compiled():
    return torch.compile(_uncompiled())  # lengths become symbols when a second one comes


def _tiles(tables: list[Tensor], keys: int) -> tuple[Tensor, Tensor]:
    """(Bt, tiles, tiles) bool: does any query of a tile see any key of another, and does every one see all of them?

    Queries and keys behind the last token are seen by nobody and see nothing, so that the last tiles are never whole.
    """
    start = torch.arange(-(-keys // TILE), device=tables[0].device) * TILE
    low, high, mine, behind = (t[..., None] for t in tables)  # (Bt, L, 1)
    touches = (torch.maximum(low, start) < torch.minimum(high, start + TILE)) | (
        torch.maximum(mine, start) < torch.minimum(behind, start + TILE)
    )
    covers = (low <= start) & (high >= start + TILE)
    missing = -low.shape[1] % TILE
    touches, covers = (F.pad(t, (0, 0, 0, missing)).unflatten(1, (-1, TILE)) for t in (touches, covers))
    return touches.any(2), covers.all(2)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each tile of queries takes, and which, first: (Bt, 1, tiles), (Bt, 1, tiles, tiles)."""
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _probe(device: torch.device) -> list[Pair]:
    """Two rows, two documents, grouped heads of 64, with gradients, against tiles of plain softmax."""
    from .attention import softmax_tiles
    from .tiles import plan_tiles

    lo = torch.tensor([[0, 0, 64, 64, 0, 0, 64, 64], [0, 0, 0, 96, 0, 0, 0, 96]])
    hi = torch.tensor([[32, 64, 96, 128, 0, 32, 64, 96], [32, 64, 96, 128, 0, 32, 64, 96]])
    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
    leaves = [torch.randn(shape, generator=draws).to(device) for shape in shapes]
    plan = plan_flex(lo, hi, clean_blocks=4, block_length=32, device=device)
    tiles = [plan_tiles(lo[:, s], hi[:, s], block_length=32, device=device, dtype=torch.float32) for s in STREAMS]

    def by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, *own = (t.unflatten(2, (8, 32)) for t in (q, k, v))
        keys, values = k[:, :, :128], v[:, :, :128]
        clean = softmax_tiles(q[:, :, :4], keys, values, None, tiles[0])
        noisy = softmax_tiles(q[:, :, 4:], keys, values, (own[0][:, :, 4:], own[1][:, :, 4:]), tiles[1])
        return torch.cat([clean, noisy], dim=2).flatten(2, 3)

    results = []
    for function in (lambda q, k, v: attend(q, k, v, plan), by_tiles):
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        y = function(*own)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), own)])
    return list(zip(results[0], results[1]))
