"""Denoises many canvases on cached prefixes: for every set of masked tokens its cross-entropy, a few logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.eval.draws import Draw
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.state import State

ROWS_AT_ONCE = 512  # rows of logits that are widened to float32 at one time
COPY_BYTES = 2**28  # of states that are copied for a pass over canvases of several prefixes; above, one prefix a pass


@dataclass(frozen=True)
class Job:
    """A block to score on one prefix.

    `canvas` (G,) holds the block's tokens, and masks where no text is; `places` (n,) are those to score, which the
    draws mask by their number; all other tokens stand. Both int64 on the CPU. `row` is the prefix's row of the state.
    """

    canvas: Tensor
    places: Tensor
    draws: list[Draw]
    row: int = 0


@dataclass(frozen=True)
class Sums:
    """Of one job: the summed cross-entropy (draws,) float64 of each draw's masked tokens, in nats.

    `greedy`: whether with all places masked every likeliest token is the block's own; None without such a draw.
    """

    nats: Tensor
    greedy: bool | None

    def bound(self, draws: list[Draw]) -> float:
        return float(self.nats @ torch.tensor([draw.weight for draw in draws], dtype=torch.float64))


def measure(model: Denoiser, jobs: list[Job], state: State, *, batch: int) -> list[Sums]:
    """The sums of all jobs, `batch` canvases a pass; equal canvases on one prefix are denoised once.

    The state (one row a prefix) is read only. Jobs of one row should follow each other: they share its keys and values.
    """
    plan = _Plan(jobs, mask=model.config.mask_token_id)
    device = model.embed.weight.device
    found = [torch.zeros(len(job.draws), dtype=torch.float64) for job in jobs]
    greedy: list[bool | None] = [None] * len(jobs)
    for chunk in plan.chunks(batch=batch, row_bytes=state.nbytes // max(state.batch, 1)):
        canvases = torch.tensor([plan.canvases[i][1] for i in chunk])
        logits = model.denoise(canvases.to(device), _read(state, [plan.canvases[i][0] for i in chunk]))
        asks = [(place, job, draw) for place, i in enumerate(chunk) for job, draw in plan.asks[i]]
        losses, right = _losses(logits, asks, jobs)
        for (_, job, draw), loss, hit in zip(asks, losses, right):
            found[job][draw] = loss
            if len(jobs[job].draws[draw].masked) == len(jobs[job].places):
                greedy[job] = hit
    return [Sums(nats, hit) for nats, hit in zip(found, greedy)]


class _Plan:
    """Distinct canvases (row, tokens), and which draws of which jobs ask for each."""

    def __init__(self, jobs: list[Job], *, mask: int) -> None:
        places: dict[tuple[int, tuple[int, ...]], int] = {}
        self.asks: list[list[tuple[int, int]]] = []
        for number, job in enumerate(jobs):
            tokens, to_score = job.canvas.tolist(), job.places.tolist()
            for index, draw in enumerate(job.draws):
                canvas = list(tokens)
                for i in draw.masked:
                    canvas[to_score[i]] = mask
                place = places.setdefault((job.row, tuple(canvas)), len(places))
                if place == len(self.asks):
                    self.asks.append([])
                self.asks[place].append((number, index))
        self.canvases = list(places)

    def chunks(self, *, batch: int, row_bytes: int) -> list[list[int]]:
        """Numbers of the canvases of each pass."""
        chunks: list[list[int]] = []
        for i, (row, _) in enumerate(self.canvases):
            last = chunks[-1] if chunks else []
            alone = all(self.canvases[j][0] == row for j in last)
            fits = alone or (len(last) + 1) * row_bytes <= COPY_BYTES
            if last and len(last) < batch and fits:
                last.append(i)
            else:
                chunks.append([i])
        return chunks


def _losses(logits: Tensor, asks: list[tuple[int, int, int]], jobs: list[Job]) -> tuple[list[float], list[bool]]:
    """For each (canvas of the pass, job, draw) the summed cross-entropy, and whether every target is the likeliest."""
    rows, places, targets, owners = [], [], [], []
    for owner, (canvas, number, index) in enumerate(asks):
        job = jobs[number]
        at = job.places[list(job.draws[index].masked)]
        rows.append(torch.full_like(at, canvas))
        places.append(at)
        targets.append(job.canvas[at])
        owners.append(torch.full_like(at, owner))
    row, place, target = (torch.cat(part).to(logits.device) for part in (rows, places, targets))
    losses, hits = [], []
    for first in range(0, len(row), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        chosen = logits[row[part], place[part]]
        chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
        own = chosen.gather(1, target[part, None])[:, 0]
        losses.append((chosen.logsumexp(dim=1) - own).double())
        hits.append(chosen.argmax(dim=1) == target[part])
    owner_of = torch.cat(owners)
    sums = torch.zeros(len(asks), dtype=torch.float64).index_add_(0, owner_of, torch.cat(losses).cpu())
    missed = torch.zeros(len(asks), dtype=torch.int64).index_add_(0, owner_of, (~torch.cat(hits)).long().cpu())
    return sums.tolist(), (missed == 0).tolist()


def _read(state: State, rows: list[int]) -> State:
    """The given rows of the state for reading alone: views where it is one row, else copies."""
    if len(set(rows)) == 1:
        return shared(row_of(state, rows[0]), len(rows))
    return state.select(torch.tensor(rows))


def row_of(state: State, row: int) -> State:
    """One row of a state, as a view."""
    layers = tuple(type(layer)(*(t[row : row + 1] for t in vars(layer).values())) for layer in state.layers)
    return State(layers, state.length[row : row + 1], state.max_length, state.block_length)


def shared(state: State, rows: int) -> State:
    """`rows` views of a state of one row, for reading alone: many canvases on one prefix, which is not copied."""
    layers = tuple(
        type(layer)(*(tensor.expand(rows, *tensor.shape[1:]) for tensor in vars(layer).values()))
        for layer in state.layers
    )
    return State(layers, state.length.expand(rows), state.max_length, state.block_length)
