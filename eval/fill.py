"""A decoding state as if a long prefix had been read, without reading it: random values of realistic scale."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import KVState, State

TILE = 2**20  # random numbers that are drawn; larger tensors repeat them, since drawing 256k tokens takes minutes


@torch.no_grad()
def fill_random(state: State, *, length: int, generator: torch.Generator) -> State:
    """The state filled in place for `length` committed tokens in every row: keys, values and convolution inputs of unit
    scale (what normalized activations give), SSM states of scale 0.1. Raises InputError where there is no room.

    Nothing behind `length` is touched.
    """
    if length > state.max_length or length % state.block_length:
        raise InputError(f"a state with room for {state.max_length} tokens cannot be filled with {length}")
    tile = torch.randn(TILE, generator=generator, device=generator.device)
    for layer in state.layers:
        if isinstance(layer, KVState):
            for part in (layer.k, layer.v):
                for head in part[:, :, :length].flatten(0, 1):  # (length, P), contiguous
                    _fill(head, tile)
        else:
            _fill(layer.ssm, tile * 0.1)
            _fill(layer.conv, tile)
    return State(state.layers, torch.full_like(state.length, length), state.max_length, state.block_length)


def random_tokens(config: ModelConfig, *shape: int, generator: torch.Generator) -> Tensor:
    """Token ids without mask and pad."""
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    control = (tokens == config.mask_token_id) | (tokens == config.pad_token_id)
    return tokens.masked_fill(control, config.eos_token_id)


def prefill(model: Denoiser, tokens: Tensor, state: State, *, chunk: int) -> State:
    """Commit `tokens` (B, T) on the model's device, `chunk` tokens at a time (whole blocks)."""
    for first in range(0, tokens.shape[1], chunk):
        state = model.commit(tokens[:, first : first + chunk], state)
    return state


def _fill(target: Tensor, tile: Tensor) -> None:
    """Repeat `tile` over a contiguous tensor."""
    flat = target.view(-1)
    for first in range(0, flat.numel(), tile.numel()):
        piece = flat[first : first + tile.numel()]
        piece.copy_(tile[: piece.numel()])
