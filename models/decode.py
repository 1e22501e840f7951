"""Text from a denoiser: commit the prompts, then denoise block after block on the exact cached state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .denoiser import Denoiser, LayerRun, in_place, run_layer
from .errors import InputError
from .graphs import StepGraphs
from .request import check_memory, check_prompts, new_tokens
from .reveal import Reveal, Sampler, TopK
from .state import State

GRAPH_TOKENS = 128  # new tokens a row from which two captures, some ten passes each, are worth it


@dataclass(frozen=True, kw_only=True)
class Generation:
    """New tokens of every row, with what they cost.

    Rows are the samples of the first prompt, then those of the second, and so on.
    """

    tokens: list[list[int]]  # without the prompt, cut at the first <eos>, which is left out
    ended: list[bool]  # whether the row wrote <eos> (else it ran into its limit)
    nfe: int  # denoising passes of the batch; commits ride in them
    row_nfe: list[int]  # passes in which the row was not finished yet
    prefill_passes: int
    prefill_seconds: float
    seconds: float  # of all, prefill included

    @property
    def tokens_per_nfe(self) -> float:
        """Tokens of a row per pass of a row."""
        return sum(map(len, self.tokens)) / max(sum(self.row_nfe), 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows per second after prefill."""
        return sum(map(len, self.tokens)) / max(self.seconds - self.prefill_seconds, 1e-9)


@torch.no_grad()
def generate(
    model: Denoiser,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    generator: torch.Generator,
    reveal: Reveal | None = None,
    sampler: Sampler | None = None,
    samples_per_prompt: int = 1,
    max_length: int | None = None,
    prefill_chunk: int = 1024,
    run: LayerRun = run_layer,
) -> Generation:
    """Continue each prompt (token ids, any length, 0 too) by up to `max_new_tokens`.

    The whole blocks of a prompt are committed in chunks of about `prefill_chunk` tokens; what remains stands as fixed
    tokens in the first canvas, so the block grid starts at token 0. `samples_per_prompt` samples fork one prefilled
    state. Rows go their own way: one whose canvas is full is committed in the same pass that denoises the others
    (`advance`), so a block of S steps costs S passes. A row ends with the block that holds its first <eos>, or at
    `max_new_tokens`, or where prompt and new tokens together reach `max_length`. run: how each layer is called
    (`compiled.CompiledLayers`).

    Defaults: four tokens each step, the surest first, sampled at temperature 1. Raises InputError for
    prompts with control ids or ids out of the vocabulary, limits below 1, and a state that memory cannot hold.
    """
    config = model.config
    reveal = TopK(steps=max(config.block_length // 4, 1)) if reveal is None else reveal
    sampler = Sampler() if sampler is None else sampler
    check_prompts(model, prompts)
    limits = new_tokens(prompts, max_new_tokens=max_new_tokens, max_length=max_length)
    # a text's last block is never committed
    room = max(-(-(len(prompt) + new) // config.block_length) - 1 for prompt, new in zip(prompts, limits))
    check_memory(model, prompts=len(prompts), samples=samples_per_prompt, length=room * config.block_length)

    begin = _now(model)
    state, passes = _prefill(model, prompts, length=room * config.block_length, chunk=prefill_chunk)
    rows = torch.arange(len(prompts)).repeat_interleave(samples_per_prompt)
    if samples_per_prompt > 1:
        state = state.select(rows)
    prefilled = _now(model)
    texts = _Texts(model, [prompts[row] for row in rows], [limits[row] for row in rows])
    steps = _steps(model, state, run, new_tokens=max_new_tokens)
    nfe = denoise_all(model, texts, state, reveal=reveal, sampler=sampler, generator=generator, passes=steps)
    return Generation(
        tokens=[text[start:] for text, start in zip(texts.tokens, texts.starts)],
        ended=texts.ended,
        nfe=nfe,
        row_nfe=texts.passes,
        prefill_passes=passes,
        prefill_seconds=prefilled - begin,
        seconds=_now(model) - begin,
    )


class Passes(Protocol):
    """Denoise and advance as a model has them; logits may be overwritten by the next call, and states are consumed."""

    def denoise(self, canvas: Tensor, state: State) -> Tensor:
        """Logits (B, G, V) of the frontier block."""

    def advance(
        self, clean: Tensor, canvas: Tensor, state: State, blocks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Commit a block of the rows that `blocks` (B,) names, and denoise the canvas behind it."""


@dataclass(frozen=True)
class OwnPasses:
    """The model's own passes on a state that belongs to this decoding: SSM states are written where they stand."""

    model: Denoiser
    run: LayerRun

    def denoise(self, canvas: Tensor, state: State) -> Tensor:
        return self.model.denoise(canvas, state, run=self.run)

    def advance(
        self, clean: Tensor, canvas: Tensor, state: State, blocks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return self.model.advance(clean, canvas, state, blocks, run=in_place(self.run))


def _steps(model: Denoiser, state: State, run: LayerRun, *, new_tokens: int) -> Passes:
    """CUDA graphs where the device captures them and there are enough passes to pay for it, else the model's own passes."""
    if not isinstance(model, Denoiser):
        return model  # a stand-in has passes and no layers
    if run is run_layer and new_tokens >= GRAPH_TOKENS:
        graphs = StepGraphs(model, state)
        if graphs.captures:
            return graphs
    return OwnPasses(model, run)


class Texts(Protocol):
    """Rows being written, each at a block of its own. `active`: rows that are not at their end."""

    active: set[int]

    def first_canvas(self) -> Tensor:
        """(B, G) the first block of every row: fixed tokens and masks."""

    def count_pass(self) -> None:
        """Called once a pass, before its tokens are taken in."""

    def close_blocks(self, canvas: Tensor, full: Tensor) -> Tensor:
        """Take in the full canvases of active rows; (B,) bool on the CPU: rows that go on with a new block."""

    def next_canvas(self, canvas: Tensor, going: Tensor) -> Tensor:
        """The canvas with the next block of the rows that go on; `going` is on the canvas's device."""


def denoise_all(
    model: Denoiser,
    texts: Texts,
    state: State,
    *,
    reveal: Reveal,
    sampler: Sampler,
    generator: torch.Generator,
    passes: Passes | None = None,
) -> int:
    """Run every row of `texts` to its end; returns the number of passes.

    passes: how they are run, None for the model's own, which leave `state` as it is.
    """
    passes = model if passes is None else passes
    mask = model.config.mask_token_id
    canvas = texts.first_canvas()
    masks = Masks(canvas == mask)
    step = torch.zeros(len(canvas), dtype=torch.long, device=canvas.device)
    logits, nfe = passes.denoise(canvas, state), 1
    while True:
        texts.count_pass()
        proposal = sampler(logits, generator)
        masked = canvas == mask
        chosen, step = reveal(proposal, masked=masked, step=step, generator=generator)
        canvas = torch.where(chosen & masked, proposal.tokens, canvas)
        full = masks.after(reveal, canvas == mask)
        going = texts.close_blocks(canvas, full) if bool(full.any()) else full
        if not texts.active:
            return nfe
        if bool(going.any()):
            clean, fresh = canvas, going.to(canvas.device)
            canvas = texts.next_canvas(canvas, fresh)
            step = step.masked_fill(fresh, 0)
            masks.renew(going, canvas == mask)
            logits, state = passes.advance(clean, canvas, state, blocks=going.long())
        else:
            logits = passes.denoise(canvas, state)
        nfe += 1


class Masks:
    """How many masks every row has, known on the CPU: where a rule's counts depend on nothing else (`Reveal.left`), no step
    but a block's last waits for the device."""

    def __init__(self, masked: Tensor) -> None:
        self.count = masked.sum(dim=1).cpu()
        self.step = torch.zeros_like(self.count)

    def after(self, reveal: Reveal, left: Tensor) -> Tensor:
        """Which rows (B,) have no mask after a step; left (B, G): the masks on the device.

        Raises InputError for a row that would never end: a rule that chose none, a model of NaN, which proposes masks.
        """
        found = reveal.left(self.count, self.step)
        most = (self.count - 1).clamp(min=0) if found is None else found
        if found is None or bool(((found == 0) & (self.count > 0)).any()):
            found = left.sum(dim=1).cpu()
        if bool((found > most).any()):
            raise InputError(
                f"the reveal rule {reveal} chose no mask of a row that has some, or the model's logits are not numbers, so "
                "decoding would never end"
            )
        self.count, self.step = found, self.step + 1
        return found == 0

    def renew(self, going: Tensor, masked: Tensor) -> None:
        """Rows (B,) `going` have a new block, `masked` (B, G)."""
        self.count = torch.where(going, masked.sum(dim=1).cpu(), self.count)
        self.step = self.step.masked_fill(going, 0)


class _Texts:
    """The rows being written: prompt and finished blocks as lists, with limits and ends. Canvases stay tensors."""

    def __init__(self, model: Denoiser, prompts: list[list[int]], limits: list[int]) -> None:
        self.config, self.device = model.config, model.embed.weight.device
        self.tokens = [list(prompt) for prompt in prompts]
        self.starts = [len(prompt) for prompt in prompts]
        self.limits = [len(prompt) + new for prompt, new in zip(prompts, limits)]
        self.ended = [False] * len(prompts)
        self.passes = [0] * len(prompts)
        self.active = set(range(len(prompts)))

    def first_canvas(self) -> Tensor:
        """(B, G): what the prompt leaves of its last block, then masks."""
        size = self.config.block_length
        rest = [text[len(text) // size * size :] for text in self.tokens]
        rows = [row + [self.config.mask_token_id] * (size - len(row)) for row in rest]
        return torch.tensor(rows, device=self.device)

    def next_canvas(self, canvas: Tensor, going: Tensor) -> Tensor:
        return canvas.masked_fill(going[:, None], self.config.mask_token_id)

    def count_pass(self) -> None:
        for row in self.active:
            self.passes[row] += 1

    def close_blocks(self, canvas: Tensor, full: Tensor) -> Tensor:
        size = self.config.block_length
        going = torch.zeros_like(full)
        closing = [row for row in full.nonzero()[:, 0].tolist() if row in self.active]
        if not closing:
            return going
        for row, block in zip(closing, canvas[closing].tolist()):
            text = self.tokens[row]
            new = block[len(text) % size :]  # behind what the prompt left in this block
            if self.config.eos_token_id in new:
                new = new[: new.index(self.config.eos_token_id)]
                self.ended[row] = len(text) + len(new) < self.limits[row]
            text += new
            del text[self.limits[row] :]
            going[row] = len(text) % size == 0 and len(text) < self.limits[row] and not self.ended[row]
            if not going[row]:
                self.active.remove(row)
        return going


def _prefill(model: Denoiser, prompts: list[list[int]], *, length: int, chunk: int) -> tuple[State, int]:
    """A state holding the whole blocks of every prompt, and the number of passes that took."""
    size = model.config.block_length
    state = model.start(len(prompts), length)
    whole = torch.tensor([len(prompt) // size for prompt in prompts])
    step, passes = max(chunk // size, 1), 0
    for first in range(0, int(whole.max()), step):
        blocks = (whole - first).clamp(min=0, max=step)
        tokens = int(blocks.max()) * size
        pieces = [prompt[first * size : (first + int(count)) * size] for prompt, count in zip(prompts, blocks)]
        rows = [piece + [model.config.pad_token_id] * (tokens - len(piece)) for piece in pieces]
        state = model.commit(torch.tensor(rows, device=model.embed.weight.device), state, blocks=blocks)
        passes += 1
    return state, passes


def _now(model: Denoiser) -> float:
    """Seconds on a clock, after the device has finished what it was given."""
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize(model.embed.weight.device)
    return time.perf_counter()
