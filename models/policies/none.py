"""No cache of the canvas: every step recomputes all of it. On a block-causal model that is the exact block cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..config import ModelConfig
from .interface import Plan, Policy, Sight
from .past import Past, past_of
from .store import Hooks


@dataclass(frozen=True, kw_only=True)
class NoCache(Policy):
    """Full recomputation of a bidirectional canvas; of a block-causal model's frontier block beside its exact past."""

    name: ClassVar[str] = "none"
    stores: ClassVar[bool] = False

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return None

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        return prefilled(prompts, hooks)

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(sight.everything()), state


PREFILL_TOKENS = 1024  # of one clean pass


def prefilled(prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
    """The past behind the whole blocks of prompts (B, n), read by the model's own clean passes, and what is left of them."""
    model = hooks.model
    size = model.config.block_length
    whole = prompts.shape[1] // size * size
    state = model.start(len(prompts), whole)
    chunk = max(PREFILL_TOKENS // size, 1) * size
    for first in range(0, whole, chunk):
        state = model.commit(prompts[:, first : min(first + chunk, whole)], state)
    hooks.cost.prefill_token_layers += len(prompts) * whole * hooks.cost.layers
    past = past_of(model, state, batch=len(prompts), room=hooks.room - whole)
    return past, prompts[:, whole:]
