"""Bounds of many continuations of many contexts: one prefill a context, shared by all its continuations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mezzotint.eval.bound import Draws, check_tokens, require_room
from mezzotint.eval.canvases import Job, measure
from mezzotint.eval.memory import available_bytes
from mezzotint.models.config import state_bytes
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.state import State

MEMORY_SHARE = 0.8  # of what is free, for the states of the texts that are scored together
MOST_SHARED = 64  # continuations scored together on one prefix; more come in several turns


@dataclass(frozen=True)
class Request:
    """Token ids to score, and those before them. `key` names the masks: equal keys and lengths have equal ones."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Answer:
    """nats: bounds -log p(continuation | context).

    greedy: in every block, with all of the continuation masked in it and everything before it as given, the continuation's
    tokens are the likeliest ones.
    """

    nats: float
    greedy: bool


def continuation_bounds(
    model: Denoiser, requests: list[Request], *, draws: Draws, contexts: int, chunk: int = 1024
) -> Iterator[tuple[int, Answer]]:
    """(number of the request, its answer), in any order; `contexts` different ones are prefilled together, if they fit.

    The block grid starts at the context's first token. What remains of the context behind its last whole block stands as
    fixed tokens in the first canvas, as in decoding; positions behind the continuation stay mask in every draw and are
    not scored. An empty context is an empty state. Raises InputError for tokens no text can have and a text that memory
    cannot hold.
    """
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for number, request in enumerate(requests):
        if request.continuation:
            groups.setdefault((request.context, request.key), []).append(number)
            check_tokens(model.config, torch.tensor(request.context + request.continuation))
        else:
            yield number, Answer(0.0, True)
    # the longest first: what does not fit is known at once, and contexts of a batch have about the same length
    parts = [group[i : i + MOST_SHARED] for group in groups.values() for i in range(0, len(group), MOST_SHARED)]
    ordered = sorted(parts, key=lambda group: -len(requests[group[0]].context))
    for first in range(0, len(ordered), contexts):
        for part in _fitting(model, requests, ordered[first : first + contexts]):
            yield from _score(model, requests, part, draws=draws, chunk=chunk)


def _fitting(model: Denoiser, requests: list[Request], groups: list[list[int]]) -> Iterator[list[list[int]]]:
    """The groups (request numbers that share a context), cut into parts whose states fit into memory."""
    flat = [number for group in groups for number in group]
    room, weight = _room(model, requests, flat), model.embed.weight
    rows = len(groups) + len(flat)  # prefixes, and the branches behind them
    needed = state_bytes(model.config, batch=rows, length=room, itemsize=weight.element_size())
    if needed <= MEMORY_SHARE * available_bytes(weight.device):
        yield groups
    elif len(groups) > 1:
        half = len(groups) // 2
        yield from _fitting(model, requests, groups[:half])
        yield from _fitting(model, requests, groups[half:])
    elif len(flat) > 1:
        for number in flat:
            yield from _fitting(model, requests, [[number]])
    else:
        require_room(model, rows=1, length=room)
        yield groups


def _room(model: Denoiser, requests: list[Request], numbers: list[int]) -> int:
    """Tokens the state must hold: all blocks of the longest text but its last, which is never committed."""
    size = model.config.block_length
    longest = max(len(requests[n].context) + len(requests[n].continuation) for n in numbers)
    return (-(-longest // size) - 1) * size


@dataclass
class _Text:
    """A request being scored: its tokens behind the whole blocks of its context, and its row of the state."""

    number: int
    tokens: list[int]
    start: int  # of the continuation
    row: int
    done: int = 0
    nats: float = 0.0
    greedy: bool = True


def _score(
    model: Denoiser, requests: list[Request], groups: list[list[int]], *, draws: Draws, chunk: int
) -> Iterator[tuple[int, Answer]]:
    size, room = model.config.block_length, _room(model, requests, [n for group in groups for n in group])
    contexts = [list(requests[group[0]].context) for group in groups]
    with torch.inference_mode():
        state = prefill(model, contexts, length=room, chunk=chunk)
    texts = []
    for row, (context, group) in enumerate(zip(contexts, groups)):
        rest = context[len(context) // size * size :]
        texts += [_Text(n, rest + list(requests[n].continuation), len(rest), row) for n in group]
    while texts:
        jobs = [_job(model, text, requests[text.number].key, draws) for text in texts]
        with torch.inference_mode():
            found = measure(model, jobs, state, batch=draws.batch)
        for text, job, sums in zip(texts, jobs, found):
            text.nats += sums.bound(job.draws)
            text.greedy = text.greedy and bool(sums.greedy)
        for text in texts:
            if text.done + size >= len(text.tokens):
                yield text.number, Answer(text.nats, text.greedy)
        texts = [text for text in texts if text.done + size < len(text.tokens)]
        if texts:
            state = _branch(model, texts, state)


def _job(model: Denoiser, text: _Text, key: str, draws: Draws) -> Job:
    """The text's next block, its part of the continuation to be scored."""
    size = model.config.block_length
    block = text.tokens[text.done : text.done + size]
    places = torch.arange(max(text.start - text.done, 0), len(block))
    canvas = torch.full((size,), model.config.mask_token_id)
    canvas[: len(block)] = torch.tensor(block)
    chosen = draws.of(len(places), key=f"{key}/{text.done // size}", twin=False)
    return Job(canvas, places, chosen, text.row)


def _branch(model: Denoiser, texts: list[_Text], state: State) -> State:
    """Commit each text's block; texts with equal blocks on one prefix go on sharing a row, which is set anew."""
    size = model.config.block_length
    rows: dict[tuple[int, ...], int] = {}
    for text in texts:
        block = text.tokens[text.done : text.done + size]
        text.row = rows.setdefault((text.row, *block), len(rows))
        text.done += size
    parents = [parent for parent, *_ in rows]
    if parents != list(range(state.batch)):  # else every row goes on alone, and nothing needs to be copied
        state = state.select(torch.tensor(parents))
    blocks = torch.tensor([block for _, *block in rows], device=model.embed.weight.device)
    with torch.inference_mode():
        return model.commit(blocks, state)


def prefill(model: Denoiser, contexts: list[list[int]], *, length: int, chunk: int) -> State:
    """A state with room for `length` tokens that holds the whole blocks of every context, about `chunk` tokens a pass."""
    size, pad = model.config.block_length, model.config.pad_token_id
    state = model.start(len(contexts), length)
    whole = torch.tensor([len(context) // size for context in contexts])
    step = max(chunk // size, 1)
    for first in range(0, int(whole.max()), step):
        blocks = (whole - first).clamp(min=0, max=step)
        tokens = int(blocks.max()) * size
        pieces = [c[first * size : (first + int(count)) * size] for c, count in zip(contexts, blocks)]
        rows = torch.tensor([piece + [pad] * (tokens - len(piece)) for piece in pieces])
        state = model.commit(rows.to(model.embed.weight.device), state, blocks=blocks)
    return state
