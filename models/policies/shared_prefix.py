"""Exact sharing of a prefix: its state is computed once, held once, and every request goes on from a fork of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..config import ModelConfig
from ..errors import InputError
from ..state import State
from .interface import Plan, Policy, Sight, causal_only, require_prefix
from .none import PREFILL_TOKENS
from .past import Past, past_of
from .store import Hooks


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Policy):
    """The whole blocks of a prefix that all rows share are read once, whatever the backbone; later requests find them.

    Keys and values of the prefix are read by all rows where they stand; SSM states, whose size is fixed, are copied.
    What the prefix leaves of its last block belongs to each request.
    """

    name: ClassVar[str] = "fork"
    stores: ClassVar[bool] = False
    spans: ClassVar[bool] = True

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        return causal_only(self.name, bidirectional)

    def check(self, config: ModelConfig, spans: tuple[tuple[int, int], ...]) -> None:
        require_prefix(self.name, spans)
        size = config.block_length
        if spans[0][1] < size:
            raise InputError(
                f"policy fork shares whole blocks, and a shared part of {spans[0][1]} tokens is shorter than a block of "
                f"{size}: name a longer one"
            )

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        spans, size = hooks.spans, hooks.model.config.block_length
        end = spans[0][1]
        if not bool((prompts[:, :end] == prompts[:1, :end]).all()):
            raise InputError(f"the prompts do not share their first {end} tokens: name a shorter prefix")
        whole = end // size * size
        hooks.note(prefix_tokens=whole)
        state = prefix_state(prompts[0, :whole], hooks)
        return past_of(hooks.model, state, batch=len(prompts), room=hooks.room - whole), prompts[:, whole:]

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(sight.everything()), state


def prefix_state(prefix: Tensor, hooks: Hooks) -> State:
    """The state behind a prefix (n,) of whole blocks, from the store or read now; it is never written to again."""
    key = tuple(prefix.tolist())
    if key not in hooks.store.states:
        model = hooks.model
        size = model.config.block_length
        state = model.start(1, len(prefix))
        for piece in prefix.split(max(PREFILL_TOKENS // size, 1) * size):
            state = model.commit(piece[None], state) if len(piece) else state
        hooks.store.states[key] = state
        hooks.cost.shared_token_layers += len(prefix) * hooks.cost.layers
    return hooks.store.states[key]
