"""BiCache: a prefix computed alone and shared stands in the first layers, above it is refreshed (arXiv 2606.07571)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..denoiser import Denoiser
from .acache import segments_of
from .canvas import Canvas
from .fast_dllm import block_queries
from .interface import Carry, Plan, Policy, Sight, bidirectional_only, require, require_prefix
from .look import Look
from .store import Hooks, alone

INNER = ("none", "dual")


@dataclass(frozen=True, kw_only=True)
class BiCache(Policy):
    """Layers below `layers` read a prefix computed alone, held once for all requests; they never recompute it.

    Layers above recompute it every `interval` steps, from what the prefix alone gave the first of them, and keep it in
    the request's own memory in between. All other tokens are recomputed every step, or with inner `dual` at the start of
    a block and then those of the block. table: (percent of the canvas that the prefix takes, layers), from
    `measured_layers`; the last entry not above the prefix's share holds, instead of `layers`. 0 layers and interval 1
    are exact.
    """

    name: ClassVar[str] = "bicache"
    carry: ClassVar[Carry] = "stream"
    layerwise: ClassVar[bool] = True
    spans: ClassVar[bool] = True
    layers: int = 1
    interval: int = 16
    inner: str = "none"
    table: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        require(self.layers >= 0, self.name, f"layers is {self.layers}; it must be 0 or more")
        require(self.interval >= 1, self.name, f"interval is {self.interval}; it must be at least 1 step")
        require(self.inner in INNER, self.name, f"inner is {self.inner!r}; it must be one of {', '.join(INNER)}")
        shares = [share for share, _ in self.table]
        require(shares == sorted(shares), self.name, f"the shares of the table, {shares}, must ascend")
        within = all(0 <= share <= 100 for share in shares)
        require(within, self.name, f"the shares of the table, {shares}, are percents: from 0 to 100")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return bidirectional_only(self.name, bidirectional)

    def check(self, config: ModelConfig, spans: tuple[tuple[int, int], ...]) -> None:
        require_prefix(self.name, spans)
        most, total = max([self.layers, *(layers for _, layers in self.table)]), len(config.pattern)
        require(most <= total, self.name, f"layers is {most}, but the model has {total}")

    def arrange(self, canvas: Canvas, hooks: Hooks) -> Canvas:
        end, total = canvas.spans[0][1], len(canvas.first)
        layers = layers_for(100 * end / canvas.length, self.table) if self.table else self.layers
        hooks.note(shared_layers=layers, prefix_tokens=end)
        if layers == 0:
            return canvas
        packets = [hooks.packet(row[:end], hidden_at=layers) for row in canvas.tokens]
        packet = hooks.stacked(packets)
        outside = segments_of(canvas, [packet], hooks)
        return dataclasses.replace(
            canvas,
            outside=outside[:layers] + ((),) * (total - layers),
            first=(end,) * layers + (0,) * (total - layers),
            entering=None if packet.hidden is None else (layers, packet.hidden),
        )

    def begin(self, canvas: Canvas, sight: Sight) -> int:
        """The state: where the prefix ends."""
        return canvas.spans[0][1]

    def plan(self, sight: Sight, state: int) -> tuple[Plan, int]:
        return Plan(sight.everything()), state

    def at_layer(self, look: Look, state: int) -> tuple[Tensor, int]:
        sight = look.sight
        own = sight.columns(state, sight.length)
        if self.inner == "dual":
            own = own & block_queries(sight, mode="dual", refresh=0)
        if look.first:
            return own, state
        due = sight.step % self.interval == 0
        return own | (due[:, None] & sight.columns(0, state)), state


def layers_for(share: float, table: tuple[tuple[int, int], ...]) -> int:
    """Layers of the last entry whose share is at most `share` percent; 0 below all of them."""
    return max([0, *(layers for percent, layers in table if percent <= share)][-1], 0)


@torch.inference_mode()
def measured_layers(model: Denoiser, texts: Tensor, end: int, *, threshold: float = 0.97) -> int:
    """Leading layers whose keys and values of the first `end` tokens of texts (B, L) hardly depend on what follows.

    A layer counts while the mean cosine of keys and values, computed alone and in context, is at least `threshold`.
    """
    short, whole = alone(model, model.embed(texts[:, :end])), alone(model, model.embed(texts))
    for layer in range(len(short.k)):
        alike = [
            F.cosine_similarity(one[layer].flatten(2), other[layer][:, :end].flatten(2), dim=-1).mean()
            for one, other in ((short.k, whole.k), (short.v, whole.v))
        ]
        if float(sum(alike)) / 2 < threshold:
            return layer
    return len(short.k)
