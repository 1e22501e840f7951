"""DropKV: committed keys that change the output least are evicted, by their exact leave-one-out effect (NeurIPS 2026)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from .forward import attend
from .interface import Evicting, Plan, Policy, Sight, causal_only, require
from .look import Scene
from .memory import Segment
from .none import prefilled
from .past import KVPast, Past
from .store import Hooks

RULES = ("leave-one-out", "recency", "random")
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class DropKV(Policy):
    """At the first step of every block each key head keeps ceil(keep * n) of the n tokens read so far, and no more.

    The block's queries, masks all but a prompt's remainder, score what is still held: by how much the output of
    attention would move without a key, averaged over the query heads that share it and over `kernel` neighbouring keys.
    The last `protect` tokens always stay. That step itself still sees everything, unless exact_first is false. rule
    `recency` keeps the last, `random` any. Keep 1 is exact. Only keys of attention layers are evicted; what was evicted
    never comes back.
    """

    name: ClassVar[str] = "drop"
    stores: ClassVar[bool] = False
    keep: float = 0.5
    rule: str = "leave-one-out"
    kernel: int = 11
    protect: int = 8
    exact_first: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, self.name, f"keep is {self.keep}; it must be above 0 and at most 1")
        require(self.rule in RULES, self.name, f"rule is {self.rule!r}; it must be one of {', '.join(RULES)}")
        require(self.kernel >= 1 and self.kernel % 2 == 1, self.name, f"kernel is {self.kernel}; it must be odd")
        require(self.protect >= 0, self.name, f"protect is {self.protect}; it must be 0 or more tokens")
        require(self.seed >= 0, self.name, f"seed is {self.seed}; it must be 0 or more")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        if "A" not in config.pattern:
            return (
                f"policy drop has no object on the pattern {config.pattern}: an SSM state keeps no tokens that could be "
                "evicted"
            )
        return causal_only(self.name, bidirectional)

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        if self.keep == 1:
            return prefilled(prompts, hooks)
        block = hooks.model.config.block_length  # what is kept is copied each time: behind it there is room for a block
        return prefilled(prompts, dataclasses.replace(hooks, room=prompts.shape[1] // block * block + block))

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(sight.everything()), state

    def evicting(self) -> Evicting:
        return "after" if self.exact_first else "before"

    def evict(self, scene: Scene) -> KVPast:
        past = scene.past
        assert past is not None, "only a block-causal model has a past"
        count = max(math.ceil(self.keep * scene.length), min(self.protect, past.tokens))
        if count >= past.tokens:
            return past
        parts = past.segments()
        k = torch.cat([part.keys() for part in parts], dim=1)
        v = torch.cat([part.v for part in parts], dim=1)
        scores = self._scores(scene, k, v)  # (B, Hkv, S)
        scores[:, :, past.tokens - self.protect :] = torch.inf
        index = scores.topk(count, dim=2).indices.sort(dim=2).values.transpose(1, 2)  # (B, K, Hkv)
        index = index[..., None].expand(-1, -1, -1, k.shape[3])
        return past.kept((Segment(k.gather(1, index), v.gather(1, index)),))

    def _scores(self, scene: Scene, k: Tensor, v: Tensor) -> Tensor:
        batch, tokens, heads, size = k.shape
        if self.rule == "recency":
            return torch.arange(tokens, dtype=torch.float64, device=k.device).repeat(batch, heads, 1)
        if self.rule == "random":
            g = torch.Generator().manual_seed((self.seed * 2**40 + scene.layer * 2**32 + scene.length) % 2**63)
            return torch.rand(batch, heads, tokens, generator=g, dtype=torch.float64).to(k.device)
        found = attend(scene.q, [Segment(k, v), scene.inside], weights=True)
        assert found.weights is not None
        scene.count(2 * found.weights[..., :tokens].numel() * size)
        scores = leave_one_out(found.weights[..., :tokens], v, found.y)
        return F.avg_pool1d(scores, self.kernel, 1, self.kernel // 2, count_include_pad=False)


def leave_one_out(weights: Tensor, v: Tensor, y: Tensor) -> Tensor:
    """(B, Hkv, S): the summed squared change of attention's outputs y (B, Q, H, P) when one key is taken away.

    weights (B, H, Q, S) are those of the S keys among all that were seen. Without key j the others' weights grow by
    1 / (1 - p_j), so the output moves by p_j / (1 - p_j) times (y - v_j). Averaged over the query heads of a key head.
    """
    kv_heads = v.shape[2]
    p = weights.double().unflatten(1, (kv_heads, -1))  # (B, Hkv, rep, Q, S)
    out = y.double().transpose(1, 2).unflatten(1, (kv_heads, -1))  # (B, Hkv, rep, Q, P)
    values = v.double().transpose(1, 2)[:, :, None]  # (B, Hkv, 1, S, P)
    distance = out.square().sum(-1)[..., None] - 2 * out @ values.transpose(-1, -2)
    distance = (distance + values.square().sum(-1)[..., None, :]).clamp(min=0)
    return ((p / (1 - p + EPSILON)).square() * distance).sum(dim=3).mean(dim=2)
