"""Block attention: every block of queries sees one range of keys, and a noisy block its own keys too.

Block-causal training, prefill and denoising are all this one case. Work is cut into tiles of query blocks; a tile touches
only the keys between its lowest and its highest bound, so the part that nobody sees is never computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import flash_cpu, products
from .joined import attend
from .tiles import Tile, plan_tiles


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, own: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(P)) v over what each block sees -> (Bt, Hq, M, G, P).

    q (Bt, Hq, M, G, P); k, v (Bt, Hkv, S, P); lo, hi (Bt, M) on the CPU; own: keys and values (Bt, Hkv, M, G, P) that only
    their own block sees. Query head h uses key head h // (Hq / Hkv). A block that sees nothing gets zeros.
    """
    tiles = plan_tiles(lo, hi, block_length=q.shape[3], device=q.device, dtype=q.dtype)
    return attend_tiles(q, k, v, tiles, own)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], own: tuple[Tensor, Tensor] | None) -> Tensor:
    """block_attention for a plan of tiles, on the fastest kernel that takes these tensors."""
    if not tiles:
        return q.new_zeros(q.shape)
    return attend(q, k, v, tiles, own, products if flash_cpu.declined(q.device, q.dtype) else flash_cpu)


def softmax_tiles(q, k, v, own, tiles: list[Tile]) -> Tensor:
    """The readable form: one product, softmax and product a tile; scores and their softmax in float32 or wider."""
    size, kv_heads, scale = q.shape[3], k.shape[1], q.shape[-1] ** -0.5
    out = []
    for tile in tiles:
        queries = q[:, :, tile.first : tile.last]
        folded = queries.flatten(2, 3).unflatten(1, (kv_heads, -1))  # (Bt, Hkv, rep, m*G, P)
        wide = torch.promote_types(q.dtype, torch.float32)
        keys, values = k[:, :, None, tile.low : tile.high], v[:, :, None, tile.low : tile.high]
        scores = torch.matmul(folded, keys.transpose(-1, -2)).to(wide) * scale
        scores = scores if tile.mask is None else scores + tile.mask[:, None].to(wide)
        if own is not None:
            blocks = folded.unflatten(3, (-1, size))  # (Bt, Hkv, rep, m, G, P)
            own_k, own_v = (t[:, :, None, tile.first : tile.last] for t in own)
            own_scores = torch.matmul(blocks, own_k.transpose(-1, -2)).to(wide) * scale
            scores = torch.cat([scores, own_scores.flatten(3, 4)], dim=-1)
        if own is None and tile.empty is not None:  # some blocks see no key: weights 0, not 0/0
            blind = scores.isneginf().all(-1, keepdim=True)
            weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0).to(q.dtype)
        else:
            weights = scores.softmax(-1).to(q.dtype)
        seen = tile.high - tile.low
        result = torch.matmul(weights[..., :seen], values)
        if own is not None:
            mine = weights[..., seen:].unflatten(3, (-1, size))
            result = result + torch.matmul(mine, own_v).flatten(3, 4)
        out.append(result.flatten(1, 2).unflatten(2, (-1, size)))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)
