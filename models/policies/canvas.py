"""The tokens that are decoded together: their positions, what stands outside of them, and checks of what was asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError
from ..request import check_prompts
from .memory import Segment
from .past import KVPast, Past


@dataclass(frozen=True)
class Canvas:
    """B rows of L columns, of which those behind `response` are written, `block` at a time, counted from `start`.

    outside: per layer the segments that all columns see beside the canvas; first: per layer, the columns before it stand
    in those. spans: (start, end) columns of the prompt that are shared parts. full_length: columns that a pass without
    any policy would run. entering: a layer, and what it is given (B or 1, n, D) for the first n columns, which stand
    outside in the layers before.
    """

    tokens: Tensor  # (B, L) int64
    positions: Tensor  # (B, L) int64, on the CPU
    response: int
    start: int
    block: int
    outside: tuple[tuple[Segment, ...], ...]
    first: tuple[int, ...]
    full_length: int
    spans: tuple[tuple[int, int], ...] = ()
    past: Past | None = None
    entering: tuple[int, Tensor] | None = None

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def segments(self, layer: int) -> tuple[Segment, ...]:
        """What the columns of the canvas see outside of it at an attention layer."""
        if self.past is None:
            return self.outside[layer]
        past = self.past.layers[layer]
        assert isinstance(past, KVPast)
        return (*self.outside[layer], *past.segments())


def equal_prompts(model: Denoiser, prompts: list[list[int]]) -> Tensor:
    """(B, n) on the model's device. InputError for control ids and for rows of unequal length."""
    check_prompts(model, prompts)
    for number, prompt in enumerate(prompts):
        if len(prompt) != len(prompts[0]):
            raise InputError(
                f"prompt 0 has {len(prompts[0])} tokens, prompt {number} has {len(prompt)}: a batch under a cache policy "
                "needs prompts of one length; decode them apart"
            )
    return torch.tensor(prompts, dtype=torch.int64, device=model.embed.weight.device)


def check_spans(spans: tuple[tuple[int, int], ...], prompt_tokens: int) -> None:
    """InputError for shared parts that are empty, overlap, are not in order, or reach beyond the prompt."""
    end = 0
    for number, (start, stop) in enumerate(spans):
        if not 0 <= start < stop:
            raise InputError(f"shared part {number} goes from token {start} to {stop}; it must hold at least one token")
        if start < end:
            raise InputError(f"shared part {number} starts at token {start}, before part {number - 1} ends at {end}")
        if stop > prompt_tokens:
            raise InputError(
                f"shared part {number} ends at token {stop}, but the prompt holds {prompt_tokens}: name fewer"
            )
        end = stop


def check_canvas(new_tokens: int, block: int) -> None:
    """InputError for a canvas without one whole block to write."""
    if block < 1:
        raise InputError(f"block is {block}; it must be at least 1 token")
    if new_tokens < block:
        raise InputError(
            f"the canvas has {new_tokens} tokens to write, fewer than a block of {block}; take smaller blocks"
        )
