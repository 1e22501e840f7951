"""Decoding of a block-causal denoiser, block after block on its past, under a policy of what to share, evict or keep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..denoiser import Denoiser
from ..errors import InputError
from ..layout import make_layout
from ..reveal import Reveal, Sampler
from ..state import SSMState
from .bidirectional import GREEDY, Decoded, _now, check_shared, new_canvas, require_object
from .canvas import Canvas, equal_prompts
from .cost import Cost
from .forward import attend, attention_of, embed, finish, is_attention, layers_of, project, rotated, tables_of
from .interface import Policy
from .loop import Revealing, reveal_canvas
from .memory import Segment, held_bytes
from .past import KVPast, Past
from .store import Hooks, Store


@torch.inference_mode()
def decode_blocks(
    model: Denoiser,
    prompts: list[list[int]],
    *,
    policy: Policy,
    new_tokens: int,
    reveal: Reveal,
    block: int | None = None,
    sampler: Sampler = GREEDY,
    generator: torch.Generator | None = None,
    spans: tuple[tuple[int, int], ...] = (),
    store: Store | None = None,
    standing: list[list[int]] | None = None,
) -> Decoded:
    """Write `new_tokens` behind each prompt, on the exact past or what the policy makes of it.

    A block of the model is revealed `block` tokens at a time (a sub-block), None for all at once. Every block is
    committed by a clean pass once it is full. Rows go on to the last token, whether they wrote <eos> or not.
    spans, store and standing as in decode_canvas. Raises InputError for prompts of unequal length, sub-blocks that do
    not divide a block, shared parts that the prompt does not hold, and a policy without an object here.
    """
    config = model.config
    size = config.block_length
    block = size if block is None else block
    require_object(model, policy, bidirectional=False)
    tokens = equal_prompts(model, prompts)
    if block < 1 or size % block:
        raise InputError(f"a sub-block of {block} tokens does not divide a block of {size}")
    if new_tokens < 1:
        raise InputError(f"new_tokens is {new_tokens}; it must be at least 1")
    check_shared(policy, model, spans, tokens.shape[1])
    began = _now(model)
    store = Store() if store is None else store
    store.bind(model)
    cost = Cost(layers=len(config.pattern))
    how = Revealing(reveal, sampler, torch.Generator().manual_seed(0) if generator is None else generator)
    room = -(-(tokens.shape[1] + new_tokens) // size) * size
    past, rest = policy.open(tokens, Hooks(model, store, cost, spans, room))
    whole = rest.shape[1] // size * size
    for first in range(0, whole, size):
        commit(model, rest[:, first : first + size], past)
        cost.prefill_token_layers += len(rest) * size * cost.layers
    cost.prepare_seconds = _now(model) - began
    cost.hold(held_bytes(list(past.layers)))
    left = rest.shape[1] - whole  # of the prompt, for the first canvas
    blank = torch.cat([rest[:, whole:], new_canvas(model, len(tokens), new_tokens, standing)], dim=1)
    written = _write(model, blank, past, policy, how, cost, block=block, left=left)
    cost.seconds = _now(model) - began
    cost.effective |= policy.effective() | {
        "block": size,
        "sub_block": block,
        "new_tokens": new_tokens,
        "prompt_tokens": tokens.shape[1],
        "reveal": str(reveal),
        "held_tokens": max((layer.tokens for layer in past.layers if isinstance(layer, KVPast)), default=0),
    }
    return Decoded(written[:, left : left + new_tokens].tolist(), cost, config.eos_token_id)


def _write(
    model: Denoiser, blank: Tensor, past: Past, policy: Policy, how: Revealing, cost: Cost, *, block: int, left: int
) -> Tensor:
    """Fill blank (B, n), whose first `left` tokens are the prompt's, block after block; (B, whole blocks)."""
    size = model.config.block_length
    blank = F.pad(blank, (0, -blank.shape[1] % size), value=model.config.mask_token_id)
    written = []
    for first in range(0, blank.shape[1], size):
        canvas = make_block(model, blank[:, first : first + size], past, block, response=max(left - first, 0))
        written.append(reveal_canvas(model, canvas, policy, how, cost))
        if first + size < blank.shape[1]:
            commit(model, written[-1], past)
            cost.commits += 1
            cost.commit_token_layers += written[-1].numel() * cost.layers
            cost.hold(held_bytes(list(past.layers)))
    return torch.cat(written, dim=1)


def make_block(model: Denoiser, tokens: Tensor, past: Past, block: int, *, response: int) -> Canvas:
    """The next frontier block (B, G), whose first `response` tokens are what the prompt left."""
    size, layers = model.config.block_length, len(model.config.pattern)
    return Canvas(
        tokens=tokens,
        positions=(past.length + torch.arange(size)).expand(len(tokens), -1),
        response=response,
        start=0,
        block=block,
        outside=((),) * layers,
        first=(0,) * layers,
        full_length=size,
        past=past,
    )


def commit(model: Denoiser, clean: Tensor, past: Past) -> None:
    """Read one clean block (B, G) into the past: keys and values behind those there, SSM states folded on."""
    batch, size = clean.shape
    h = embed(model, clean, None)
    tables = tables_of(model, (past.length + torch.arange(size))[None])
    layout = make_layout(
        block_length=size,
        clean_tokens=size,
        frontiers=torch.zeros(batch, 0, dtype=torch.long),
        lengths=torch.full((batch,), past.length),
    )
    for index, layer in enumerate(layers_of(model)):
        before = past.layers[index]
        if is_attention(layer):
            assert isinstance(before, KVPast)
            own = project(attention_of(layer), layer.mixer_norm(h))
            q, k = rotated(own.q, tables), rotated(own.k, tables)
            past.layers[index] = before.append(k, own.v)
            h = finish(layer, h, attend(q, [*before.segments(), Segment(k, own.v)]).y)
        else:
            h, after = layer(h, layout, None, before)
            assert isinstance(after, SSMState)
            past.layers[index] = SSMState(_own(after.ssm), _own(after.conv))
    past.length += size


def _own(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own: a view of the states of a whole pass would keep all of them in memory."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
