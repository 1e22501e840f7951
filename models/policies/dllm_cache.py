"""dLLM-Cache: prompt and response refreshed at intervals of their own, changed values between (arXiv 2506.06295)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .interface import Carry, Plan, Policy, Sight, bidirectional_only, require
from .look import Look


@dataclass(frozen=True, kw_only=True)
class DLLMCache(Policy):
    """The prompt is recomputed every `prompt_interval` steps and the response every `response_interval`.

    In between every layer projects the values of all response tokens and recomputes the share `ratio` whose values are
    least like (cosine) those of their last recomputation. What a layer added to the stream of the others then, attention
    and MLP together, is added again. The first layer recomputes the whole response unless `first_layer` is false: what
    it is given changes only where a token was revealed. Both intervals 1 are exact.
    """

    name: ClassVar[str] = "dllm"
    carry: ClassVar[Carry] = "changes"
    layerwise: ClassVar[bool] = True
    prompt_interval: int = 50
    response_interval: int = 4
    ratio: float = 0.25
    first_layer: bool = True

    def __post_init__(self) -> None:
        for name in ("prompt_interval", "response_interval"):
            value = getattr(self, name)
            require(value >= 1, self.name, f"{name} is {value}; it must be at least 1 step")
        require(0 <= self.ratio <= 1, self.name, f"ratio is {self.ratio}; it must be from 0 to 1")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return bidirectional_only(self.name, bidirectional)

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(sight.everything()), state

    def at_layer(self, look: Look, state: Any) -> tuple[Tensor, Any]:
        sight = look.sight
        prompt = (sight.step % self.prompt_interval == 0)[:, None] & sight.columns(0, sight.response)
        due = sight.step % self.response_interval == 0
        response = sight.columns(sight.response, sight.length)
        if bool(due.all()) or (self.first_layer and look.layer == 0):
            return prompt | response, state
        columns = slice(sight.response, sight.length)
        fresh = look.values(columns).flatten(2)
        look.count(2 * fresh.numel())
        changed = least_alike(fresh, look.stored_values(columns).flatten(2), self.ratio)
        chosen = F.pad(changed, (sight.response, 0)) | (due[:, None] & response)
        return prompt | chosen, state


def least_alike(new: Tensor, old: Tensor, ratio: float) -> Tensor:
    """(B, n) bool: the ceil(ratio * n) rows of new (B, n, E) with the lowest cosine to old, ties by position."""
    count = math.ceil(ratio * new.shape[1])
    order = F.cosine_similarity(new, old, dim=-1).argsort(dim=1, stable=True)[:, :count]
    return torch.zeros(new.shape[:2], dtype=torch.bool, device=new.device).scatter(1, order, True)
