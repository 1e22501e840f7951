"""ACache: affixes computed alone and shared by requests, with the tokens that matter recomputed (arXiv 2608.26140)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import ModelConfig
from .canvas import Canvas
from .fast_dllm import block_queries
from .forward import attend, attention_of, embed, finish, layers_of, project, rotated, tables_of
from .interface import Plan, Policy, Sight, bidirectional_only, require
from .memory import Segment
from .store import Hooks, Packet


@dataclass(frozen=True, kw_only=True)
class ACache(Policy):
    """Shared parts of the prompt (affixes: before, between or behind the rest) are read from keys computed alone.

    A probe pass of the request's own tokens finds the anchors: the ceil(ratio * n) of n affix tokens that its masks look
    at most, over all heads and layers. Anchors and own tokens are recomputed at the start of a block, and every `refresh`
    steps if that is not 0; inside a block its tokens alone are. The other affix tokens stay as they are in the one
    shared copy, or with drop_rest are not looked at. Ratio 1 with refresh 1 is exact, ratio 0 is direct reuse.
    """

    name: ClassVar[str] = "acache"
    spans: ClassVar[bool] = True
    ratio: float = 0.2
    refresh: int = 0
    drop_rest: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.ratio <= 1, self.name, f"ratio is {self.ratio}; it must be from 0 to 1")
        require(self.refresh >= 0, self.name, f"refresh is {self.refresh}; it must be 0 (never) or a number of steps")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return bidirectional_only(self.name, bidirectional)

    def arrange(self, canvas: Canvas, hooks: Hooks) -> Canvas:
        packets = [shared_part(canvas, span, hooks) for span in canvas.spans]
        within = span_columns(canvas)  # (n,)
        count = math.ceil(self.ratio * len(within))
        hooks.note(anchors=count, affix_tokens=len(within))
        if 0 < count < len(within):
            anchors = most_important(importance(canvas, packets, hooks), count)
        else:
            anchors = torch.full((len(canvas.tokens), len(within)), count > 0, device=canvas.tokens.device)
        own = torch.ones_like(canvas.tokens, dtype=torch.bool)
        own[:, within] = anchors
        columns = (~own).int().argsort(dim=1, stable=True)[:, : canvas.length - len(within) + count]
        outside: tuple[tuple[Segment, ...], ...] = ((),) * len(canvas.first)
        if count < len(within) and not self.drop_rest:
            outside = segments_of(canvas, packets, hooks, seen=~anchors if count else None)
        return dataclasses.replace(
            canvas,
            tokens=canvas.tokens.gather(1, columns),
            positions=canvas.positions.gather(1, columns.cpu()),
            response=canvas.response - len(within) + count,
            start=canvas.start - len(within) + count,
            outside=outside,
        )

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(block_queries(sight, mode="dual", refresh=self.refresh)), state


def shared_part(canvas: Canvas, span: tuple[int, int], hooks: Hooks) -> Packet:
    """The packet of one shared part: of all rows where they agree, else each row's own."""
    return hooks.stacked([hooks.packet(row[span[0] : span[1]]) for row in canvas.tokens])


def span_columns(canvas: Canvas) -> Tensor:
    """Columns of all shared parts, in order."""
    return torch.cat([torch.arange(start, stop) for start, stop in canvas.spans]).to(canvas.tokens.device)


def segments_of(
    canvas: Canvas, packets: list[Packet], hooks: Hooks, seen: Tensor | None = None
) -> tuple[tuple[Segment, ...], ...]:
    """Per layer, the packets at their places in the prompt; seen (B, n) over the columns of all parts."""
    sizes = [packet.tokens for packet in packets]
    parts: list[Tensor | None] = list(seen.split(sizes, dim=1)) if seen is not None else [None] * len(packets)
    tables = [tables_of(hooks.model, canvas.positions[:1, start:stop]) for start, stop in canvas.spans]
    return tuple(
        tuple(packet.segment(layer, table, part) for packet, table, part in zip(packets, tables, parts))
        for layer in range(len(canvas.first))
    )


def importance(canvas: Canvas, packets: list[Packet], hooks: Hooks) -> Tensor:
    """(B, n): how much attention the masks pay each affix token, softmax over affix tokens alone, all heads and layers.

    One pass over the request's own tokens beside the affixes.
    """
    model = hooks.model
    within = torch.zeros(canvas.length, dtype=torch.bool)
    within[span_columns(canvas).cpu()] = True
    own = (~within).nonzero()[:, 0]
    tokens = canvas.tokens[:, own.to(canvas.tokens.device)]
    masked = tokens == model.config.mask_token_id
    levels = masked.sum(dim=1).double() / canvas.length
    h, tables = embed(model, tokens, levels), tables_of(model, canvas.positions[:, own])
    outside = segments_of(canvas, packets, hooks)
    total = torch.zeros(len(tokens), int(within.sum()), dtype=torch.float64, device=tokens.device)
    for index, layer in enumerate(layers_of(model)):
        projected = project(attention_of(layer), layer.mixer_norm(h))
        q, k = rotated(projected.q, tables), rotated(projected.k, tables)
        weights = attend(q, outside[index], weights=True).weights
        assert weights is not None
        total += (weights * masked[:, None, :, None]).sum(dim=(1, 2), dtype=torch.float64)
        h = finish(layer, h, attend(q, [*outside[index], Segment(k, projected.v)]).y)
        hooks.cost.decision_operations += weights.numel() * model.config.head_dim
    hooks.cost.token_layers += tokens.numel() * hooks.cost.layers
    hooks.cost.passes += 1
    return total


def most_important(importance: Tensor, count: int) -> Tensor:
    """(B, n) bool: the `count` largest of each row, ties by position."""
    order = importance.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(importance, dtype=torch.bool).scatter(1, order, True)
