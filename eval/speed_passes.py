"""The passes that a speed cell times, each from one fixed state, and one whole block decoded with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.eval.fill import random_tokens
from mezzotint.models.denoiser import Denoiser, LayerRun, run_layer
from mezzotint.models.reveal import Sampler, TopK
from mezzotint.models.state import State

Call = Callable[[], object]


def passes(
    model: Denoiser, state: State, *, chunk: int, generator: torch.Generator, run: LayerRun = run_layer
) -> dict[str, Call]:
    """Calls of one denoise, one advance, one commit of a block and one prefill chunk, each from a fixed state.

    The prefill chunk is the last one that ends at the state's length: it rewrites keys and values there;
    `prefill_first`, where it is another one, is the chunk at position 0. run: how denoise and advance call a layer.
    """
    config, device = model.config, next(model.parameters()).device
    g = config.block_length
    canvas = torch.full((state.batch, g), config.mask_token_id, device=device)
    block = random_tokens(config, state.batch, g, generator=generator).to(device)
    tokens = random_tokens(config, state.batch, chunk, generator=generator).to(device)
    earlier, empty = _with_length(state, state.length - chunk), _with_length(state, torch.zeros_like(state.length))
    calls: dict[str, Call] = {
        "denoise": lambda: model.denoise(canvas, state, run=run),
        "advance": lambda: model.advance(block, canvas, state, run=run),
        "commit": lambda: model.commit(block, state),
        "prefill": lambda: model.commit(tokens, earlier),
    }
    if bool((earlier.length > 0).any()):
        calls["prefill_first"] = lambda: model.commit(tokens, empty)
    return calls


def _with_length(state: State, length: Tensor) -> State:
    """The same tensors as a state of another length: what stands in them does not matter to a clock."""
    return State(state.layers, length, state.max_length, state.block_length)


@dataclass(frozen=True)
class BlockDecoder:
    """One block decoded as `generate` does: the advance that commits the block before, then denoising, with sampling.

    `first` gives the logits (B, G, V) of an all-mask canvas and the state to go on with, `next` those of a canvas on that
    state. TopK with `steps` steps, greedy.
    """

    first: Callable[[], tuple[Tensor, State]]
    next: Callable[[Tensor, State], Tensor]
    mask_token_id: int
    steps: int
    generator: torch.Generator

    def __call__(self) -> Tensor:
        """The finished canvas (B, G), on the CPU: a block counts once its tokens can be read."""
        sampler, reveal = Sampler(temperature=0.0), TopK(steps=self.steps)
        logits, state = self.first()
        canvas = torch.full(logits.shape[:2], self.mask_token_id, device=logits.device)
        step = torch.zeros(len(canvas), dtype=torch.long, device=logits.device)
        for number in range(self.steps):
            proposal = sampler(logits, self.generator)
            masked = canvas == self.mask_token_id
            chosen, step = reveal(proposal, masked=masked, step=step, generator=self.generator)
            canvas = torch.where(chosen & masked, proposal.tokens, canvas)
            if number + 1 < self.steps:
                logits = self.next(canvas, state)
        return canvas.cpu()


def block_decoder(model: Denoiser, state: State, *, steps: int, generator: torch.Generator) -> BlockDecoder:
    """A decoder of the block behind `state`, which it leaves as long as it was."""
    config, device = model.config, next(model.parameters()).device
    g = config.block_length
    canvas = torch.full((state.batch, g), config.mask_token_id, device=device)
    block = random_tokens(config, state.batch, g, generator=generator).to(device)
    shorter = _with_length(state, state.length - g)
    return BlockDecoder(
        first=lambda: model.advance(block, canvas, shorter),
        next=model.denoise,
        mask_token_id=config.mask_token_id,
        steps=min(steps, g),
        generator=generator,
    )
