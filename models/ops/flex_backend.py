"""FlexAttention behind the training pass's attention: both streams in one kernel that touches only visible tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .probe import Pair, failure

try:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    MISSING = None
except ImportError as error:
    MISSING = f"this torch has no FlexAttention ({error})"

STREAMS = slice(0, 4), slice(4, 8)  # of the check below
TILE = 128  # queries and keys of a tile of the mask, the size that FlexAttention's kernels are built for


@dataclass(frozen=True)
class FlexPlan:
    """What all attention layers of a training pass share; tokens are the clean ones and then those of the noisy blocks."""

    mask: BlockMask
    compiled: bool


def declined(device: torch.device) -> str | None:
    """None if this backend serves `device`, else the reason in a sentence."""
    if device.type != "cuda":
        return f"on {device.type} FlexAttention has no backward pass and is slower than tiles"
    return MISSING or _checked(device)


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

    def visible(b, h, query, key):
        low, high, mine, behind = (table[b, query] for table in tables)
        return ((key >= low) & (key < high)) | ((key >= mine) & (key < behind))

    some, whole = _tiles(tables, blocks * block_length)
    partly = some & ~whole
    mask = BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=visible,
        seq_lengths=(blocks * block_length, blocks * block_length),
    )  # fmt: skip
    return FlexPlan(mask, compiled)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: FlexPlan) -> Tensor:
    """q (Bt, Hq, L, P), k, v (Bt, Hkv, L, P) of all tokens of the pass -> like q. A token that sees nothing gets zeros."""
    kernel = _compiled() if plan.compiled else flex_attention
    return kernel(q, k, v, block_mask=plan.mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=False)


def _tiles(tables: list[Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """(Bt, tiles, tiles) bool: does any query of a tile see any key of another, and does every one see all of them?

    Queries and keys behind the last token are seen by nobody and see nothing, so that the last tiles are never whole.
    """
    count = -(-tokens // TILE)
    start = torch.arange(count, device=tables[0].device) * TILE
    low, high, mine, behind = (t[..., None] for t in tables)  # (Bt, L, 1)
    touches = (torch.maximum(low, start) < torch.minimum(high, start + TILE)) | (
        torch.maximum(mine, start) < torch.minimum(behind, start + TILE)
    )
    covers = (low <= start) & (high >= start + TILE)
    missing = count * TILE - tokens
    touches, covers = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (touches, covers))
    touches, covers = (t.unflatten(1, (count, TILE)) for t in (touches, covers))
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
