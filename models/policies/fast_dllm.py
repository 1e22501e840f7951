"""Fast-dLLM: keys and values of the prefix, or of prefix and suffix, kept from the start of a block (arXiv 2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..config import ModelConfig
from .interface import Plan, Policy, Sight, require
from .none import prefilled
from .past import Past
from .store import Hooks

MODES = ("prefix", "dual")


@dataclass(frozen=True, kw_only=True)
class FastDLLM(Policy):
    """Everything is recomputed at the start of a block; then only the block and what follows it, or only the block.

    refresh: steps after which everything is recomputed inside a block too; 0 for never, as published; 1 is exact. On a
    block-causal model the canvas is one block and `dual` keeps its other sub-blocks (Fast-dLLM v2, arXiv 2509.26328).
    """

    name: ClassVar[str] = "fast"
    mode: str = "dual"
    refresh: int = 0

    def __post_init__(self) -> None:
        require(self.mode in MODES, self.name, f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
        require(self.refresh >= 0, self.name, f"refresh is {self.refresh}; it must be 0 (never) or a number of steps")

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        if bidirectional:
            return None
        if "M" in config.pattern:
            return (
                f"policy fast has no object on the pattern {config.pattern}: a Mamba layer reads a block as one run, so no "
                "sub-block of it can be recomputed alone"
            )
        if self.mode == "prefix":
            return (
                "policy fast:mode=prefix has no object on a block-causal model: its prefix is exact already; use "
                "fast:mode=dual with sub-blocks"
            )
        return None

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        return prefilled(prompts, hooks)

    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        return Plan(block_queries(sight, mode=self.mode, refresh=self.refresh)), state


def block_queries(sight: Sight, *, mode: str, refresh: int) -> Tensor:
    """(B, L): all at a block's first step and every `refresh` steps, else the block, in `prefix` with all behind it."""
    due = sight.block_step == 0
    if refresh:
        due = due | (sight.block_step % refresh == 0)
    last = sight.length if mode == "prefix" else sight.block.stop
    return due[:, None] | sight.columns(sight.block.start, last)
