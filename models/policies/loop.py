"""Reveals all masks of a canvas, block after block of it, under one policy: the inner loop of both kinds of decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError
from ..reveal import Reveal, Sampler
from .canvas import Canvas
from .cost import Cost
from .interface import Policy, Sight
from .look import Delta
from .memory import held_bytes
from .step import make_frame, run_step


@dataclass(frozen=True)
class Revealing:
    """How tokens are proposed and revealed."""

    reveal: Reveal
    sampler: Sampler
    generator: torch.Generator


def reveal_canvas(model: Denoiser, canvas: Canvas, policy: Policy, how: Revealing, cost: Cost) -> Tensor:
    """The tokens (B, L) without masks. Rows whose block is done wait for the others, and cost nothing meanwhile."""
    mask = model.config.mask_token_id
    frame = make_frame(model, canvas, policy, cost)
    tokens = canvas.tokens.clone()
    steps = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
    state: object = None
    begun = False
    for number, low in enumerate(range(canvas.start, canvas.length, canvas.block)):
        block = slice(low, min(low + canvas.block, canvas.length))
        block_steps = torch.zeros_like(steps)
        reveal_step = torch.zeros_like(steps)
        while bool((active := (tokens[:, block] == mask).any(dim=1)).any()):
            sight = Sight(tokens == mask, active, block, canvas.response, steps, block_steps, number, cost.layers)
            with cost.deciding():
                if not begun:
                    state, begun = policy.begin(canvas, sight), True
                plan, state = policy.plan(sight, state)
            hidden, state = run_step(frame, tokens, sight, plan, state)
            logits = model.logits(hidden)
            tokens, chosen, reveal_step = _reveal(tokens, block, logits, how, reveal_step, mask)
            revealed = torch.zeros_like(sight.masked)
            revealed[:, block] = chosen
            with cost.deciding():
                state = policy.observe(Delta(revealed, logits, sight, cost), state)
            cost.hold(held_bytes(frame.memory, list(canvas.outside), _layers(canvas), state))
            steps, block_steps = steps + active, block_steps + active
    return tokens


def _layers(canvas: Canvas) -> list:
    return [] if canvas.past is None else list(canvas.past.layers)


def _reveal(
    tokens: Tensor, block: slice, logits: Tensor, how: Revealing, step: Tensor, mask: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The next tokens, which of the block's columns (B, n) were revealed, and the reveal rule's next step."""
    here = tokens[:, block]
    masked = here == mask
    proposal = how.sampler(logits, how.generator)
    chosen, step = how.reveal(proposal, masked=masked, step=step, generator=how.generator)
    chosen = chosen & masked
    if bool((masked.any(dim=1) & ~chosen.any(dim=1)).any()):
        raise InputError(f"the reveal rule {how.reveal} chose no mask of a row that has some, so decoding never ends")
    tokens = tokens.clone()
    tokens[:, block] = torch.where(chosen, proposal.tokens, here)
    return tokens, chosen, step
