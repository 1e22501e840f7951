"""The attention mixer: multi-head or grouped-query block-causal attention as one pass over clean and noisy blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import RMSNorm, rope_tables
from .layout import Layout, document_starts
from .ops.attention import attend_tiles
from .ops.cuda_attention import RangePlan, attend_ranges, plan_ranges
from .ops.rope import rotate
from .ops.tiles import Tile, plan_tiles
from .state import KVState


@dataclass(frozen=True)
class AttentionPlan:
    """What all attention layers of a pass share: the tiles of both streams and the rotary tables."""

    layout: Layout
    clean: list[Tile]
    noisy: list[Tile]
    rope: tuple[Tensor, Tensor] | None
    inner: list[Tile] | None = None  # noisy tokens among noisy tokens, where documents end inside a block
    ranges: RangePlan | None = None  # in place of tiles on CUDA


def plan_attention(config: ModelConfig, layout: Layout, *, cached: bool, device, dtype: torch.dtype) -> AttentionPlan:
    """Visibility (DESIGN: a clean block sees clean blocks up to itself, a frontier those before it) as ranges of keys.

    Keys are those of the pass, or with `cached` those of the state, into which the pass has been written already.
    """
    size = layout.block_length
    offset = layout.lengths[:, None] if cached else torch.zeros(layout.batch, 1, dtype=torch.long)
    index = layout.clean_index()
    reach = torch.minimum(index + 1, layout.reached())  # invalid blocks look at what is there, and are seen by nobody

    def seen(blocks: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        start = layout.start_of(blocks)
        return torch.where(start == 0, 0, offset + start * size), offset + high * size

    streams = seen(index, reach), seen(layout.frontiers, layout.frontiers)
    rope = None
    if config.positions == "rope":
        rope = rope_tables(config, layout.positions().to(device), dtype)
    if layout.inner is None:
        low, high = (torch.cat(pair, dim=1) for pair in zip(*streams))
        ranges = plan_ranges(
            low, high, clean_blocks=layout.clean_blocks, block_length=size, cached=cached, device=device, dtype=dtype
        )
        if ranges is not None:
            return AttentionPlan(layout, [], [], rope, ranges=ranges)
    clean, noisy = (plan_tiles(*stream, block_length=size, device=device, dtype=dtype) for stream in streams)
    return AttentionPlan(layout, clean, noisy, rope, _inner_tiles(layout, device, dtype))


def _inner_tiles(layout: Layout, device, dtype: torch.dtype) -> list[Tile] | None:
    """Tiles over single tokens: a token of a block of several documents sees those of its own document in that block."""
    if layout.inner is None:
        return None
    ids = layout.inner.flatten(0, 1)  # (B*K, G)
    size = layout.block_length
    low = document_starts(ids, 1)
    high = size - document_starts(ids.flip(1), 1).flip(1)
    first = torch.arange(layout.noisy_blocks).repeat(layout.batch) * size  # keys are numbered over all blocks
    low, high = ((t + first[:, None]).view(layout.batch, -1) for t in (low, high))
    return plan_tiles(low, high, block_length=1, device=device, dtype=dtype)


class Attention(nn.Module):
    """softmax attention with optional QK-norm and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def start(self, batch: int, max_length: int, dtype: torch.dtype, device: torch.device) -> KVState:
        """The empty state, zeros: beside a longer row, a masked weight of 0 meets a shorter row's unwritten values."""
        shape = (batch, self.config.n_kv_heads, max_length, self.config.head_dim)
        return KVState(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, x: Tensor, plan: AttentionPlan, state: KVState | None) -> tuple[Tensor, KVState | None]:
        """One pass over x (B, T + K*G, D), clean tokens first -> (B, T + K*G, D) and the state, written in place.

        Where the layout wants no clean outputs, only noisy tokens ask: -> (B, K*G, D).
        """
        layout = plan.layout
        size, clean = layout.block_length, layout.clean_tokens
        asked = layout.outputs(x)
        q, k, v = (
            proj(t).unflatten(-1, (-1, self.config.head_dim))
            for proj, t in ((self.q_proj, asked), (self.k_proj, x), (self.v_proj, x))
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if plan.rope is not None:
            cos, sin = plan.rope
            q, k = rotate(q, (layout.outputs(cos), layout.outputs(sin))), rotate(k, plan.rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, L, P)
        keys, values = k[:, :, :clean], v[:, :, :clean]
        if state is not None:
            if clean:
                state.write(keys, values, layout.lengths, layout.reached()[:, 0] * size)
            keys, values = state.k, state.v
        if plan.ranges is not None and q.shape[2]:
            y = attend_ranges(q, k, v, keys, values, plan.ranges)
            return self.o_proj(y.transpose(1, 2).flatten(2)), state
        parts = []
        if clean and layout.clean_output:
            queries = q[:, :, :clean].unflatten(2, (-1, size))
            parts.append(attend_tiles(queries, keys, values, plan.clean, None))
        if plan.inner is not None:
            single = attend_tiles(
                q[:, :, :, None], k, v, plan.inner, None
            )  # no clean token beside it: one block is the row
            parts.append(single.flatten(2, 3).unflatten(2, (-1, size)))
        elif layout.noisy_blocks:
            noisy = layout.noisy_blocks * size
            noisy_q, noisy_k, noisy_v = (t[:, :, t.shape[2] - noisy :].unflatten(2, (-1, size)) for t in (q, k, v))
            parts.append(attend_tiles(noisy_q, keys, values, plan.noisy, (noisy_k, noisy_v)))
        if not parts:
            return asked, state  # no token asks
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return self.o_proj(y.flatten(2, 3).transpose(1, 2).flatten(2)), state
