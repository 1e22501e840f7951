"""EntropyCache: everything is recomputed after a token was revealed with high entropy (arXiv 2603.18489)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import ModelConfig
from .canvas import Canvas
from .interface import Plan, Policy, Sight, bidirectional_only, require
from .look import Delta

MASKS = ("canvas", "block")


@dataclass(frozen=True)
class Recency:
    """Of every column (B, L) the step at which it was revealed, -1 if it was not; whether the next step is full (B,)."""

    revealed_at: Tensor
    refresh: Tensor


@dataclass(frozen=True, kw_only=True)
class EntropyCache(Policy):
    """After a step, H is the largest entropy (nats) of the tokens it revealed. If H > threshold the next step is full.

    Else it recomputes the masks and the `recent` most recently revealed tokens; the first step is full. One decision a
    row and step, from the V probabilities of every revealed token, whatever length and depth. A threshold below 0 is
    exact; above ln V nothing is ever refreshed. masks: which masks are recomputed, those of the whole canvas or those of
    the block alone (the paper does not say; the canvas is its formula taken literally).
    """

    name: ClassVar[str] = "entropy"
    threshold: float = 0.5
    recent: int = 64
    masks: str = "canvas"

    def __post_init__(self) -> None:
        require(not math.isnan(self.threshold), self.name, "threshold is not a number")
        require(self.recent >= 0, self.name, f"recent is {self.recent}; it must be 0 or more tokens")
        require(self.masks in MASKS, self.name, f"masks is {self.masks!r}; it must be one of {', '.join(MASKS)}")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return bidirectional_only(self.name, bidirectional)

    def begin(self, canvas: Canvas, sight: Sight) -> Recency:
        return Recency(torch.full(sight.masked.shape, -1, device=sight.masked.device), sight.active | True)

    def plan(self, sight: Sight, state: Recency) -> tuple[Plan, Recency]:
        masks = sight.masked
        if self.masks == "block":
            masks = masks & sight.columns(sight.block.start, sight.block.stop)
        chosen = masks | most_recent(state.revealed_at, self.recent)
        return Plan(chosen | state.refresh[:, None]), state

    def observe(self, delta: Delta, state: Recency) -> Recency:
        at = torch.where(delta.revealed, delta.sight.step[:, None], state.revealed_at)
        refresh = torch.where(delta.sight.active, self.too_uncertain(delta), state.refresh)
        return Recency(at, refresh)

    def too_uncertain(self, delta: Delta) -> Tensor:
        """(B,) the decision: whether some token was revealed with more entropy than the threshold."""
        return delta.entropies().amax(dim=1) > self.threshold


def most_recent(revealed_at: Tensor, count: int) -> Tensor:
    """(B, L) bool: the `count` columns revealed last, of one step the earlier columns first; never one not revealed."""
    order = (-revealed_at).argsort(dim=1, stable=True)[:, :count]
    chosen = torch.zeros_like(revealed_at, dtype=torch.bool).scatter(1, order, True)
    return chosen & (revealed_at >= 0)
