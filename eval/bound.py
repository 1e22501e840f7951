"""The likelihood bound, block by block through the cached interface, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzotint.eval.draws import Draw, block_draws
from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import State


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How many draws a block gets, the seed of their masks, and how many canvases are denoised in one pass."""

    per_block: int = 32
    seed: int = 0
    batch: int = 32


@torch.inference_mode()
def document_bound(model: Denoiser, tokens: Tensor, *, draws: Draws, key: str) -> float:
    """Nats by which `-log p(tokens)` is bounded, for one document (T,) int64 that starts from an empty state.

    The context is committed once; all draws of a block are denoised on it. When T is no multiple of the block length
    the text does not end there: positions after it stay mask in every draw and are not scored. `key` names the
    document for its masks.
    """
    config = model.config
    _check(config, tokens)
    g = config.block_length
    blocks = math.ceil(len(tokens) / g)
    state, total = model.start(1, (blocks - 1) * g), 0.0  # the last block is never committed
    for b in range(blocks):
        block = tokens[b * g : (b + 1) * g]
        chosen = block_draws(len(block), draws=draws.per_block, key=f"{draws.seed}/{key}/{b}")
        total += _block_bound(model, block, state=state, chosen=chosen, batch=draws.batch)
        if b + 1 < blocks:
            state = model.commit(block[None].to(_device(model)), state)
    return total


def _block_bound(model: Denoiser, block: Tensor, *, state: State, chosen: list[Draw], batch: int) -> float:
    """Weighted sum of the cross-entropies at the masked tokens of all `chosen` draws; the state stays as it is."""
    config, device, total = model.config, _device(model), 0.0
    copies: State | None = None
    for first in range(0, len(chosen), batch):
        part = chosen[first : first + batch]
        if copies is None or copies.batch != len(part):
            copies = shared(state, len(part))
        canvas = torch.full((len(part), config.block_length), config.mask_token_id, dtype=torch.int64)
        masked = torch.zeros_like(canvas, dtype=torch.bool)
        for i, draw in enumerate(part):
            masked[i, list(draw.masked)] = True
        canvas[:, : len(block)] = torch.where(masked[:, : len(block)], config.mask_token_id, block)
        logits = model.denoise(canvas.to(device), copies)
        rows, places = masked.nonzero(as_tuple=True)
        losses = F.cross_entropy(_wide(logits[rows, places]), block[places].to(device), reduction="none")
        weights = torch.tensor([draw.weight for draw in part], dtype=torch.float64)[rows]
        total += float(losses.double().cpu() @ weights)
    return total


def shared(state: State, rows: int) -> State:
    """`rows` views of a state of one row, for reading alone: many canvases on one prefix, which is not copied."""
    layers = tuple(
        type(layer)(*(tensor.expand(rows, *tensor.shape[1:]) for tensor in vars(layer).values()))
        for layer in state.layers
    )
    return State(layers, state.length.expand(rows), state.max_length, state.block_length)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _device(model: Denoiser) -> torch.device:
    return next(model.parameters()).device


def _check(config: ModelConfig, tokens: Tensor) -> None:
    if len(tokens) == 0:
        raise InputError("the text to score is empty")
    if int(tokens.max()) >= config.vocab_size:
        raise InputError(f"token id {int(tokens.max())} is beyond the model's vocabulary of {config.vocab_size}")
    if bool((tokens == config.mask_token_id).any()):
        raise InputError(f"the text to score holds the mask id {config.mask_token_id}, which no text can produce")


@dataclass(frozen=True)
class Bound:
    """A bound over several rows: its value and standard error, the row being the unit of sampling."""

    nats_per_token: float
    nats_per_token_error: float
    bits_per_byte: float
    bits_per_byte_error: float
    rows: int
    tokens: int
    bytes: int


def summarize(rows: list[dict]) -> Bound:
    """The bound of rows {nats, tokens, bytes}: ratios of sums, standard errors by linearization over rows.

    With one row the error is infinite, not zero.
    """
    nats = [float(row["nats"]) for row in rows]
    per_token = _ratio(nats, [float(row["tokens"]) for row in rows])
    per_byte = _ratio(nats, [float(row["bytes"]) for row in rows])
    bits = 1 / math.log(2)
    return Bound(
        nats_per_token=per_token[0],
        nats_per_token_error=per_token[1],
        bits_per_byte=per_byte[0] * bits,
        bits_per_byte_error=per_byte[1] * bits,
        rows=len(rows),
        tokens=sum(int(row["tokens"]) for row in rows),
        bytes=sum(int(row["bytes"]) for row in rows),
    )


def _ratio(tops: list[float], bottoms: list[float]) -> tuple[float, float]:
    """sum(tops) / sum(bottoms) and its standard error; infinite where nothing can be said."""
    n, bottom = len(tops), sum(bottoms)
    if bottom == 0:
        return math.inf, math.inf
    ratio = sum(tops) / bottom
    if n < 2:
        return ratio, math.inf
    squares = sum((top - ratio * below) ** 2 for top, below in zip(tops, bottoms))
    return ratio, math.sqrt(squares * n / (n - 1)) / bottom
