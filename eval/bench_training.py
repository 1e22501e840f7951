"""The training steps that the benchmark times: two streams with all frontiers, and one plain stream beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mezzotint.eval.fill import random_tokens
from mezzotint.models.attention import plan_attention
from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.layout import make_layout
from mezzotint.models.ops.nll import nll

LOSS_ROWS = 2048  # masked tokens whose logits exist at one time


@dataclass(frozen=True)
class TrainingCase:
    """Random rows with every block noised at its own level; weights 1/t at masked tokens."""

    clean: Tensor  # (B, T)
    noisy: Tensor  # (B, K, G)
    frontiers: Tensor  # (B, K) on the CPU
    masked: Tensor  # (B, K, G) bool
    weights: Tensor  # (masked.sum(),)


def training_case(config: ModelConfig, *, batch: int, row_length: int, device: str = "cpu") -> TrainingCase:
    """Noise levels are spread evenly over the blocks of all rows, so that half of all tokens are masked."""
    generator, g = torch.Generator().manual_seed(0), config.block_length
    blocks = row_length // g
    clean = random_tokens(config, batch, row_length, generator=generator)
    order = torch.randperm(batch * blocks, generator=generator)
    levels = ((order + 0.5) / (batch * blocks)).view(batch, blocks, 1)
    masked = torch.rand(batch, blocks, g, generator=generator) < levels
    noisy = clean.view(batch, blocks, g).masked_fill(masked, config.mask_token_id)
    weights = (1 / levels).expand_as(masked)[masked]
    clean, noisy, masked, weights = (t.to(device) for t in (clean, noisy, masked, weights))
    return TrainingCase(clean, noisy, torch.arange(blocks).expand(batch, -1), masked, weights)


def two_stream_step(model: Denoiser, case: TrainingCase, *, autocast: torch.dtype) -> Callable[[], None]:
    """Forward and backward of the block-diffusion loss; autocast at float32 is off. Gradients are dropped each time.

    The last clean block is cut off, as in training: no frontier sees it.
    """

    def step() -> None:
        with torch.autocast(case.clean.device.type, dtype=torch.bfloat16, enabled=autocast == torch.bfloat16):
            hidden = model.hidden(case.clean[:, : -model.config.block_length], case.noisy, case.frontiers)[case.masked]
            loss = masked_loss(model, hidden, case)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def one_stream_step(model: Denoiser, case: TrainingCase, *, autocast: torch.dtype) -> Callable[[], None]:
    """The same with one stream: the clean tokens through the same layers, the loss at as many of their positions."""
    masked = case.masked.flatten(1)

    def step() -> None:
        with torch.autocast(case.clean.device.type, dtype=torch.bfloat16, enabled=autocast == torch.bfloat16):
            loss = masked_loss(model, one_stream_hidden(model, case.clean, autocast)[masked], case)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def one_stream_hidden(model: Denoiser, clean: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states (B, T, D) of the clean tokens (B, T) alone, behind all layers; products in `dtype`."""
    config, no_frontiers = model.config, torch.zeros(len(clean), 0, dtype=torch.int64)
    layout = make_layout(block_length=config.block_length, clean_tokens=clean.shape[1], frontiers=no_frontiers)
    plan = None
    if "A" in config.pattern:
        plan = plan_attention(config, layout, cached=False, device=clean.device, dtype=dtype)
    h = model.embed(clean)
    for layer in model.layers:
        h, _ = layer(h, layout, plan, None)
    return h


def masked_loss(model: Denoiser, hidden: Tensor, case: TrainingCase) -> Tensor:
    """Weighted sum of cross-entropies, in pieces of LOSS_ROWS whose logits are made again in the backward pass."""
    targets = case.clean.view(case.masked.shape)[case.masked]
    if len(hidden) <= LOSS_ROWS:
        return _piece(model, hidden, targets, case.weights)
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, labels, weights in zip(*(t.split(LOSS_ROWS) for t in (hidden, targets, case.weights))):
        total = total + checkpoint(_piece, model, rows, labels, weights, use_reentrant=False)
    return total


def _piece(model: Denoiser, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (nll(model.logits(hidden), targets) * weights).sum()
