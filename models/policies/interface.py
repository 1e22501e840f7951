"""The interface of a cache policy: frozen parameters, a state value of its own, and what it is shown before it decides."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import InputError

if TYPE_CHECKING:
    from .canvas import Canvas
    from .look import Delta, Look, Scene
    from .past import KVPast, Past
    from .store import Hooks

# what runs from layer to layer beside the queries: nothing; the hidden states of this step; those, filled up with every
# layer's stored outputs; or those, to which every layer's stored changes are added where it is not recomputed
Carry = Literal["nothing", "stream", "hidden", "changes"]

Evicting = Literal["never", "before", "after"]


@dataclass(frozen=True)
class Sight:
    """What a policy knows of a canvas before a step; columns are those of the canvas, L in all."""

    masked: Tensor  # (B, L) bool: still a mask
    active: Tensor  # (B,) bool: rows whose block has masks left; a policy's choice for others is ignored
    block: slice  # columns that are being revealed
    response: int  # first column behind the prompt
    step: Tensor  # (B,) steps that each row has had on this canvas
    block_step: Tensor  # (B,) of them in this block
    block_number: int
    layers: int

    @property
    def length(self) -> int:
        return self.masked.shape[1]

    def columns(self, first: int, last: int) -> Tensor:
        """(B, L) bool, True from `first` to before `last`."""
        chosen = self.masked.new_zeros(self.masked.shape)
        chosen[:, max(first, 0) : last] = True
        return chosen

    def everything(self) -> Tensor:
        return self.columns(0, self.length)


@dataclass(frozen=True)
class Plan:
    """What a policy asks of a step: the columns (B, L) bool that are recomputed, in every layer unless it is layerwise."""

    queries: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of all policies; a subclass overrides what it decides. Everything here is called by the harness alone.

    The state value is whatever `begin` returns; `plan`, `at_layer` and `observe` are given the last one and return the
    next. It is kept per row: rows of a batch decide apart, so that a row decodes as it would alone.
    """

    name: ClassVar[str]
    carry: ClassVar[Carry] = "nothing"
    layerwise: ClassVar[bool] = False  # whether at_layer is asked
    stores: ClassVar[bool] = True  # whether anything of the canvas is kept between steps
    spans: ClassVar[bool] = False  # whether parts of the prompt are named as shared (affixes, documents, a prefix)
    attends: ClassVar[bool] = False  # whether `attention` stands in for plain attention

    def without_object(self, config: ModelConfig, *, bidirectional: bool) -> str | None:
        """A sentence that says why this policy has nothing to do on such a model; None where it has."""
        return None

    def check(self, config: ModelConfig, spans: tuple[tuple[int, int], ...]) -> None:
        """InputError where the parameters do not fit the model, or the shared parts are none that this policy shares."""
        return

    def arrange(self, canvas: Canvas, hooks: Hooks) -> Canvas:
        """The canvas as it will be decoded: what of it stands outside, computed elsewhere or shared."""
        return canvas

    def open(self, prompts: Tensor, hooks: Hooks) -> tuple[Past, Tensor]:
        """On a block-causal model: what stands before the first canvas, and the prompt tokens (B, n) still to commit."""
        return hooks.empty_past(len(prompts)), prompts

    def begin(self, canvas: Canvas, sight: Sight) -> Any:
        return None

    @abstractmethod
    def plan(self, sight: Sight, state: Any) -> tuple[Plan, Any]:
        """What this step asks, recomputes and stores."""

    def at_layer(self, look: Look, state: Any) -> tuple[Tensor, Any]:
        """The columns (B, L) bool that this layer recomputes: all, unless a policy that is `layerwise` says which."""
        return torch.ones(look.stream.shape[:2], dtype=torch.bool, device=look.stream.device), state

    def observe(self, delta: Delta, state: Any) -> Any:
        """Called after tokens were revealed."""
        return state

    def attention(self, scene: Scene, state: Any) -> tuple[Tensor, Any]:
        """Attention's output (B, Q, H, P) over what the policy chooses of a layer's keys, or puts together from parts."""
        raise AssertionError(f"{self.name} says that it attends, and has no attention of its own")

    def evicting(self) -> Evicting:
        """When `evict` is asked at the first step of a block: before its attention or after it, or never."""
        return "never"

    def evict(self, scene: Scene) -> KVPast:
        """What is kept of a layer's past, seen the queries of a block's first step."""
        assert scene.past is not None  # it is asked behind a past alone
        return scene.past

    def effective(self) -> dict[str, object]:
        """The parameters, for the record."""
        return {"policy": self.name} | {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "adapters"
        }


def require(condition: bool, policy: str, sentence: str) -> None:
    if not condition:
        raise InputError(f"policy {policy}: {sentence}")


def require_prefix(policy: str, spans: tuple[tuple[int, int], ...]) -> None:
    if len(spans) != 1 or spans[0][0] != 0:
        raise InputError(f"policy {policy} shares a prefix: name one part that starts at token 0")


def bidirectional_only(name: str, bidirectional: bool) -> str | None:
    """The sentence of policies that refresh a prefix which drifts."""
    if bidirectional:
        return None
    return (
        f"policy {name} has no object on a block-causal model: its committed prefix never drifts, so nothing of it needs "
        "refreshing; use none, fast:mode=dual, fork, drop or packet"
    )


def causal_only(name: str, bidirectional: bool) -> str | None:
    if not bidirectional:
        return None
    return (
        f"policy {name} has no object on a bidirectional model: its prefix is not committed, every token sees what is "
        "revealed later; use acache or bicache to share parts of prompts"
    )
