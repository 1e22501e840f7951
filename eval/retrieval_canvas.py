"""The canvas of a batch of samples behind its prefilled prompts, and its places while they are written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.data.tasks.sample import Sample
from mezzotint.models.denoiser import Denoiser


@dataclass(frozen=True)
class Canvas:
    """Prompt and target of a batch behind the last whole block of the prompt, all (B, n*G) on the CPU."""

    first: int  # tokens of whole prompt blocks
    start: int  # of the answer, counted from `first`
    tokens: Tensor  # prompt, target, then <eos>
    open: Tensor  # bool: to be written; False in the prompt and at given tokens
    scored: Tensor  # bool: enters the bound; the target without given tokens and <eos>
    answers: Tensor  # bool: tokens of the answers themselves, without what separates them

    def asks_on(self, place: int) -> bool:
        """Whether a given token, that is another question, stands at `place` or behind it."""
        return not bool(self.open[:, max(place, self.start) :].all())


def canvas_of(samples: list[Sample], size: int, *, eos: int) -> Canvas:
    """That of samples whose prompts and rooms are equally long, in blocks of `size` tokens."""
    prompt, room = len(samples[0].tokens), samples[0].room
    first = prompt // size * size
    width = -(-(prompt - first + room) // size) * size
    start = prompt - first
    tokens = torch.full((len(samples), width), eos, dtype=torch.int64)
    is_open = torch.zeros(len(samples), width, dtype=torch.bool)
    is_open[:, start:] = True
    scored, answers = torch.zeros_like(is_open), torch.zeros_like(is_open)
    for row, sample in enumerate(samples):
        assert (len(sample.tokens), sample.room) == (prompt, room), "samples of one batch are equally long"
        end = start + len(sample.target)
        tokens[row, :start] = torch.tensor(sample.tokens[first:], dtype=torch.int64)
        tokens[row, start:end] = torch.tensor(sample.target)
        given = torch.tensor(sample.given)
        is_open[row, start:end] = ~given
        scored[row, start : end - 1] = ~given[:-1]
        for low, high in sample.spans:
            answers[row, start + low : start + high] = True
    return Canvas(first, start, tokens, is_open, scored, answers)


class Answers:
    """The canvases of a batch while they are written: prompt and given tokens stand, all else is masks.

    A row is over with the block in which it writes <eos>, unless given tokens are still to come; its rest is <eos>.
    """

    def __init__(self, canvas: Canvas, model: Denoiser) -> None:
        self.config, self.device = model.config, model.embed.weight.device
        self.canvas, rows = canvas, len(canvas.tokens)
        self.out = canvas.tokens.masked_fill(canvas.open, self.config.eos_token_id)
        self.places = [0] * rows  # where the block that a row is at begins
        self.ended = [False] * rows
        self.passes = [0] * rows
        self.active = set(range(rows))

    def first_canvas(self) -> Tensor:
        return torch.stack([self._block(row) for row in range(len(self.out))]).to(self.device)

    def next_canvas(self, canvas: Tensor, going: Tensor) -> Tensor:
        fresh = torch.stack([self._block(row) for row in range(len(self.out))]).to(self.device)
        return torch.where(going[:, None], fresh, canvas)

    def count_pass(self) -> None:
        for row in self.active:
            self.passes[row] += bool(self.canvas.open[row, self._here(row)].any())

    def close_blocks(self, canvas: Tensor, full: Tensor) -> Tensor:
        going = torch.zeros_like(full)
        blocks = canvas.cpu()
        for row in full.nonzero()[:, 0].tolist():
            if row in self.active:
                here, place = self._here(row), self.places[row] + self.config.block_length
                self.out[row, here] = blocks[row]
                ends = (blocks[row] == self.config.eos_token_id) & self.canvas.open[row, here]
                self.ended[row] = self.ended[row] or bool(ends.any())
                over = place == self.out.shape[1] or (self.ended[row] and not self.canvas.asks_on(place))
                if over:
                    self.active.remove(row)
                else:
                    self.places[row], going[row] = place, True
        return going

    def _here(self, row: int) -> slice:
        return slice(self.places[row], self.places[row] + self.config.block_length)

    def _block(self, row: int) -> Tensor:
        here = self._here(row)
        return self.canvas.tokens[row, here].masked_fill(self.canvas.open[row, here], self.config.mask_token_id)
