"""The likelihood bound of a text, block by block on one cached state, with its Monte-Carlo error, streamed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.eval.canvases import Job, measure
from mezzotint.eval.canvases import shared as shared  # read by who scores other canvases on one prefix
from mezzotint.eval.draws import Draw, block_draws
from mezzotint.eval.memory import available_bytes, both_units
from mezzotint.eval.tally import Bound as Bound
from mezzotint.eval.tally import Tally
from mezzotint.eval.tally import summarize as summarize
from mezzotint.models.config import ModelConfig, state_bytes
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError

TWIN_EVERY = 8  # one block in so many has twice the draws where single blocks have too few to show their own error


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How many draws a block gets, the seed of their masks, and how many canvases are denoised in one pass."""

    per_block: int = 32
    seed: int = 0
    batch: int = 32

    def of(self, count: int, *, key: str, twin: bool) -> list[Draw]:
        """Draws for `count` tokens. From one draw a token on there are two replicates, whose difference shows the error.

        With fewer, halving them would cost more than it tells: then only a `twin` has two, each of the full number.
        """
        name = f"{self.seed}/{key}"
        if self.per_block >= count:
            return block_draws(count, draws=self.per_block, key=name, replicates=2)
        if twin:
            return block_draws(count, draws=2 * self.per_block - 1, key=name, replicates=2)
        return block_draws(count, draws=self.per_block, key=name)


def document_bound(model: Denoiser, tokens: Tensor, *, draws: Draws, key: str) -> float:
    """Nats by which `-log p(tokens)` is bounded, for one document (T,) int64 that starts from an empty state."""
    tally = Tally()
    for _ in stream_bound(model, [tokens], length=len(tokens), draws=draws, key=key, tally=tally):
        pass
    return tally.nats


@torch.inference_mode()
def stream_bound(
    model: Denoiser, pieces: Iterable[Tensor], *, length: int, draws: Draws, key: str, tally: Tally
) -> Iterator[int]:
    """Add to `tally`, block by block, the bound of a document that comes in `pieces`; yields the tokens done so far.

    The pieces (any lengths, int64, `length` tokens in all) are read as they are needed. The context is committed once;
    all draws of a block are denoised on it: beside the state, one block and its draws are all that exists at one time.
    When `length` is no multiple of the block length the text does not end there: positions after it stay mask in every
    draw and are not scored. `key` names the document for its masks. Raises InputError for tokens no text can have and a
    state that memory cannot hold.
    """
    config, device = model.config, model.embed.weight.device
    g = config.block_length
    if length == 0:
        raise InputError("the text to score is empty")
    room = (math.ceil(length / g) - 1) * g  # the last block is never committed
    require_room(model, rows=1, length=room)
    state, previous, done = model.start(1, room), None, 0
    for b, block in enumerate(_blocks(pieces, g)):
        check_tokens(config, block)
        if previous is not None:
            state = model.commit(previous[None].to(device), state)
        canvas = torch.full((g,), config.mask_token_id)
        canvas[: len(block)] = block
        twin = draws.per_block < len(block) and tally.blocks % TWIN_EVERY == 0
        chosen = draws.of(len(block), key=f"{key}/{b}", twin=twin)
        sums = measure(model, [Job(canvas, torch.arange(len(block)), chosen)], state, batch=draws.batch)[0]
        tally.add(chosen, sums.nats, count=len(block), position=b * g, twin=twin)
        previous, done = block, done + len(block)
        yield done


def _blocks(pieces: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The pieces, laid end to end and cut every `size` tokens; the last block may be shorter."""
    rest = torch.zeros(0, dtype=torch.int64)
    for piece in pieces:
        rest = torch.cat([rest, piece])
        whole = len(rest) // size * size
        yield from rest[:whole].split(size) if whole else ()
        rest = rest[whole:]
    if len(rest):
        yield rest


def require_room(model: Denoiser, *, rows: int, length: int) -> None:
    """InputError if memory cannot hold the states of `rows` texts of `length` tokens."""
    weight = model.embed.weight
    needed = state_bytes(model.config, batch=rows, length=length, itemsize=weight.element_size())
    free = available_bytes(weight.device)
    if needed > free:
        raise InputError(
            f"the state of a text of {length} tokens needs {both_units(needed)}, {both_units(free)} are available: "
            "score a shorter text"
        )


def check_tokens(config: ModelConfig, tokens: Tensor) -> None:
    """InputError for ids that no text can have."""
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        wrong = int(tokens.max()) if int(tokens.max()) >= config.vocab_size else int(tokens.min())
        raise InputError(f"token id {wrong} is beyond the model's vocabulary of {config.vocab_size}")
    if bool((tokens == config.mask_token_id).any()):
        raise InputError(f"the text to score holds the mask id {config.mask_token_id}, which no text can produce")
