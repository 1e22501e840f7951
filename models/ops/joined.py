"""Block attention out of tiles and own blocks, joined through their log-sum-exp; the backward pass recomputes each part."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .products import join
from .tiles import Tile

Pair = tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], own: Pair | None, kernel: ModuleType) -> Tensor:
    """See `attention.block_attention`; q (Bt, Hq, M, G, P), k, v (Bt, Hkv, S, P), own (Bt, Hkv, M, G, P) twice.

    kernel: a module with `forward` and `backward` of one tile, `flash_cpu` or `products`.
    """
    own_k, own_v = own if own is not None else (None, None)
    return _Tiles.apply(q, k, v, own_k, own_v, tiles, kernel)


class _Heads:
    """Two foldings of (Bt, Hq, M, G, X): heads that share keys stand behind each other as rows of one query matrix."""

    def __init__(self, q: Tensor, kv_heads: int) -> None:
        self.kv, self.rep, self.M, self.G = kv_heads, q.shape[1] // kv_heads, q.shape[2], q.shape[3]

    def part(self, t: Tensor, tile: Tile) -> Tensor:
        """-> (Bt, Hkv, rep*m*G, X)."""
        return t[:, :, tile.first : tile.last].unflatten(1, (self.kv, self.rep)).flatten(2, 4)

    def unpart(self, t: Tensor) -> Tensor:
        return t.unflatten(2, (self.rep, -1, self.G)).flatten(1, 2)

    def own(self, t: Tensor) -> Tensor:
        """-> (Bt, Hkv*M, rep*G, X): every block a matrix of its own."""
        return t.unflatten(1, (self.kv, self.rep)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def unown(self, t: Tensor) -> Tensor:
        return t.unflatten(1, (self.kv, self.M)).unflatten(3, (self.rep, self.G)).transpose(2, 3).flatten(1, 2)

    def mask(self, tile: Tile) -> Tensor | None:
        return tile.mask if tile.mask is None or self.rep == 1 else tile.mask.repeat(1, 1, self.rep, 1)


def _keys(k: Tensor, v: Tensor, tile: Tile) -> Pair:
    return k[:, :, tile.low : tile.high], v[:, :, tile.low : tile.high]


def _join(seen: Pair, own: Pair | None, empty: Tensor | None) -> Pair:
    """One softmax out of two parts (out, lse): (Bt, Hq, m, G, P) and (Bt, Hq, m, G, 1); `empty` parts count nothing."""
    out, lse = seen
    if own is None:
        return out, lse  # queries without a key: zeros, and a finite lse, which the kernel's backward needs
    if empty is not None:
        lse = lse.masked_fill(empty[..., None, None], -torch.inf)
    return join((out, lse), own)


class _Tiles(torch.autograd.Function):
    """A kernel's backward needs only the joined output and log-sum-exp, so every part is recomputed by itself."""

    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, tiles: list[Tile], kernel: ModuleType) -> Tensor:
        heads = _Heads(q, k.shape[1])
        own: Pair | None = None
        if own_k is not None:
            alone = kernel.forward(heads.own(q), own_k.flatten(1, 2), own_v.flatten(1, 2), None, blind=False)
            own = heads.unown(alone[0]), heads.unown(alone[1])
        outs, lses = [], []
        for tile in tiles:
            part = slice(tile.first, tile.last)
            mine = None if own is None else (own[0][:, :, part], own[1][:, :, part])
            if tile.high > tile.low:
                queries, mask, blind = heads.part(q, tile), heads.mask(tile), tile.empty is not None
                seen = kernel.forward(queries, *_keys(k, v, tile), mask, blind=blind)
                out, lse = _join((heads.unpart(seen[0]), heads.unpart(seen[1])), mine, tile.empty)
            elif mine is not None:
                out, lse = mine
            else:
                out = torch.zeros_like(q[:, :, part])
                lse = out.new_zeros(*out.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32))
            outs.append(out.to(q.dtype))
            lses.append(lse)
        out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        ctx.tiles, ctx.kernel = tiles, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        heads = _Heads(q, k.shape[1])
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        down_k = down_v = None
        if own_k is not None:
            grad_own, q_own, out_own, lse_own = (heads.own(t) for t in (grad, q, out, lse))
            keys, values = own_k.flatten(1, 2), own_v.flatten(1, 2)
            mine, down_k, down_v = ctx.kernel.backward(grad_own, q_own, keys, values, out_own, lse_own, None)
            dq += heads.unown(mine)
            down_k, down_v = down_k.view_as(own_k), down_v.view_as(own_v)
        for tile in ctx.tiles:
            if tile.high == tile.low:
                continue
            grad_part, q_part, out_part, lse_part = (heads.part(t, tile) for t in (grad, q, out, lse))
            keys, values = _keys(k, v, tile)
            seen, tile_dk, tile_dv = ctx.kernel.backward(
                grad_part, q_part, keys, values, out_part, lse_part, heads.mask(tile)
            )
            dq[:, :, tile.first : tile.last] += heads.unpart(seen)
            dk[:, :, tile.low : tile.high] += tile_dk
            dv[:, :, tile.low : tile.high] += tile_dv
        return dq, dk, dv, down_k, down_v, None, None
