"""A layer's own modules run on any of its tokens: projections, rotation, attention over segments, and the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import Attention
from ..denoiser import Denoiser, Layer
from ..layers import noise_level_features, rope_tables
from ..ops.rope import rotate
from .memory import Segment

Tables = tuple[Tensor, Tensor]


def layers_of(model: Denoiser) -> list[Layer]:
    return cast(list[Layer], list(model.layers))


def is_attention(layer: Layer) -> bool:
    return isinstance(layer.mixer, Attention)


def attention_of(layer: Layer) -> Attention:
    return cast(Attention, layer.mixer)


def embed(model: Denoiser, tokens: Tensor, levels: Tensor | None) -> Tensor:
    """(B, Q) -> (B, Q, D); levels (B,) is the noise level of the canvas, None for clean tokens."""
    h = model.embed(tokens)
    if levels is None or not model.config.noise_level_input:
        return h
    return h + model.level_proj(noise_level_features(levels, h.dtype))[:, None]


def tables_of(model: Denoiser, positions: Tensor) -> Tables | None:
    """Rotary tables (B, L, 1, P/2) of positions (B, L); None for a model without rotary positions."""
    if model.config.positions != "rope":
        return None
    return rope_tables(model.config, positions.to(model.embed.weight.device), model.embed.weight.dtype)


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of some tokens: (B, Q, H, P), and (B, Q, Hkv, P) twice. Not rotated yet."""

    q: Tensor
    k: Tensor
    v: Tensor


def project(mixer: Attention, x: Tensor) -> Projected:
    """The three projections of normed tokens x (B, Q, D)."""
    size = mixer.config.head_dim
    q, k, v = (proj(x).unflatten(-1, (-1, size)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if mixer.config.qk_norm:
        q, k = mixer.q_norm(q), mixer.k_norm(k)
    return Projected(q, k, v)


def rotated(x: Tensor, tables: Tables | None) -> Tensor:
    return x if tables is None else rotate(x, tables)


@dataclass(frozen=True)
class Attended:
    """Attention output (B, Q, H, P), and where they were asked for the weights (B, H, Q, S) and log-sum-exp (B, H, Q).

    S counts the keys of all segments, one after the other.
    """

    y: Tensor
    weights: Tensor | None = None
    lse: Tensor | None = None


def attend(q: Tensor, segments: Sequence[Segment], *, weights: bool = False) -> Attended:
    """softmax(q k^T / sqrt(P)) v over the keys of all segments together; q (B, Q, H, P), rotated.

    Query head h uses key head h // (H / Hkv). Outputs over disjoint segments can be merged by their log-sum-exps.
    """
    batch, count, heads, size = q.shape
    kv_heads = segments[0].k.shape[2]
    folded = q.transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, Hkv, rep*Q, P)
    if len(segments) == 1 and segments[0].seen is None and not weights and segments[0].k.shape[0] == batch:
        only = segments[0]
        y = F.scaled_dot_product_attention(folded, only.keys().transpose(1, 2), only.v.transpose(1, 2))
        return Attended(y.unflatten(2, (-1, count)).flatten(1, 2).transpose(1, 2))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.cat([_scores(folded, segment).to(wide) for segment in segments], dim=-1) * size**-0.5
    lse = scores.logsumexp(dim=-1, keepdim=True)
    probabilities = (scores - lse).exp().to(q.dtype)
    parts = probabilities.split([segment.k.shape[1] for segment in segments], dim=-1)
    y = torch.stack([_weighted(part, segment) for part, segment in zip(parts, segments)]).sum(dim=0)
    y = y.unflatten(2, (-1, count)).flatten(1, 2).transpose(1, 2)
    if not weights:
        return Attended(y)
    apart = (heads // kv_heads, count)
    return Attended(y, probabilities.unflatten(2, apart).flatten(1, 2), lse[..., 0].unflatten(2, apart).flatten(1, 2))


def _scores(folded: Tensor, segment: Segment) -> Tensor:
    """(B, Hkv, R, S); keys that all rows share are read as they stand, never copied for each row."""
    keys = segment.keys().permute(0, 2, 3, 1)  # (B or 1, Hkv, P, S)
    if keys.shape[0] == len(folded):
        scores = torch.matmul(folded, keys)
    else:
        scores = torch.matmul(folded.transpose(0, 1).flatten(1, 2), keys[0])  # (Hkv, B*R, S)
        scores = scores.unflatten(1, (len(folded), -1)).transpose(0, 1)
    if segment.seen is None:
        return scores
    seen = segment.seen[:, :, None] if segment.seen.dim() == 2 else segment.seen
    return scores.masked_fill(~seen.transpose(1, 2)[:, :, None], -torch.inf)


def _weighted(part: Tensor, segment: Segment) -> Tensor:
    """(B, Hkv, R, S) weights and the segment's values to (B, Hkv, R, P)."""
    values = segment.v.transpose(1, 2)  # (B or 1, Hkv, S, P)
    if values.shape[0] == len(part):
        return torch.matmul(part, values)
    out = torch.matmul(part.transpose(0, 1).flatten(1, 2), values[0])
    return out.unflatten(1, (len(part), -1)).transpose(0, 1)


def finish(layer: Layer, h: Tensor, y: Tensor) -> Tensor:
    """The rest of an attention layer for tokens h (B, Q, D), from attention's output y (B, Q, H, P)."""
    h = h + attention_of(layer).o_proj(y.flatten(2))
    return h + layer.mlp(layer.mlp_norm(h))
