"""Scores a batch of samples with a model: one prefill, then answers by decoding, by argmax and by the bound."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.data.tasks.sample import Sample
from mezzotint.eval.bound import Draws
from mezzotint.eval.canvases import Job, measure
from mezzotint.eval.fill import prefill
from mezzotint.models.decode import denoise_all
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.reveal import Reveal, Sampler
from mezzotint.models.state import KVState, State


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How answers are written and scored. draws: of the answer's bound; chunk: tokens of a prefill pass; seed: of noise."""

    reveal: Reveal
    sampler: Sampler
    draws: Draws
    chunk: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class Scored:
    """What a model made of one sample. Shares are of answer tokens; `nats` bounds -log p of the whole answer."""

    written: list[int]  # all tokens of the room
    ended: bool  # whether <eos> is among them
    nfe: int
    argmax: float  # answer tokens that are the likeliest ones, all answer tokens of a block masked, those before given
    nats: float
    answer_tokens: int


@dataclass(frozen=True)
class _Canvas:
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


@torch.inference_mode()
def score_batch(model: Denoiser, samples: list[Sample], *, answering: Answering, keys: list[str]) -> list[Scored]:
    """Score samples of one task and length, so that their prompts and rooms are equally long.

    The prompts are committed once. `keys` name the samples for the masks of the bound, the first of them the noise of
    the decoding.
    """
    size, device = model.config.block_length, model.embed.weight.device
    canvas = _canvas(samples, size, eos=model.config.eos_token_id)
    prompts = torch.tensor([sample.tokens[: canvas.first] for sample in samples], dtype=torch.int64, device=device)
    state = model.start(len(samples), max(size, canvas.first + canvas.tokens.shape[1] - size))
    state = prefill(model, prompts, state, chunk=max(size, answering.chunk // size * size))
    right, nats = _given_the_truth(model, canvas, forked(state), answering=answering, keys=keys)
    written, nfe = _write(model, canvas, state, answering=answering, key=keys[0])
    return [
        _scored(sample, written[row], nfe=nfe[row], right=right[row], nats=nats[row], canvas=canvas, row=row)
        for row, sample in enumerate(samples)
    ]


def forked(state: State) -> State:
    """The same state for another continuation. Keys and values are shared: only places behind the prefix are written."""
    layers = tuple(
        layer if isinstance(layer, KVState) else type(layer)(*(tensor.clone() for tensor in vars(layer).values()))
        for layer in state.layers
    )
    return State(layers, state.length.clone(), state.max_length, state.block_length)


def _canvas(samples: list[Sample], size: int, *, eos: int) -> _Canvas:
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
    return _Canvas(first, start, tokens, is_open, scored, answers)


def _given_the_truth(
    model: Denoiser, canvas: _Canvas, state: State, *, answering: Answering, keys: list[str]
) -> tuple[Tensor, list[float]]:
    """(B, n*G) whether each place's likeliest token is the target's, and the bound of every row.

    Block after block, the earlier ones with their true tokens.
    """
    config, device = model.config, model.embed.weight.device
    size = config.block_length
    right = torch.zeros_like(canvas.open)
    nats = [0.0] * len(canvas.tokens)
    for low in range(0, canvas.tokens.shape[1], size):
        here = slice(low, low + size)
        block, is_open, scored = canvas.tokens[:, here], canvas.open[:, here], canvas.scored[:, here]
        logits = model.denoise(block.masked_fill(is_open, config.mask_token_id).to(device), state)
        right[:, here] = logits.argmax(dim=-1).cpu() == block
        standing = block.masked_fill(is_open & ~scored, config.mask_token_id)  # behind an answer no text is known
        jobs = [
            Job(standing[row], places, answering.draws.of(len(places), key=f"{key}/{low // size}", twin=False), row)
            for row, key in enumerate(keys)
            if len(places := scored[row].nonzero()[:, 0])
        ]
        for job, sums in zip(jobs, measure(model, jobs, state, batch=answering.draws.batch) if jobs else []):
            nats[job.row] += sums.bound(job.draws)
        if not bool(canvas.scored[:, low + size :].any()):
            break
        state = model.commit(block.to(device), state)
    return right, nats


def _write(
    model: Denoiser, canvas: _Canvas, state: State, *, answering: Answering, key: str
) -> tuple[Tensor, list[int]]:
    """Fill the open places by the reveal rule; (B, n*G) tokens and the passes of every row."""
    digest = hashlib.blake2b(f"{answering.seed}/{key}".encode(), digest_size=7).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    answers = _Answers(canvas, model)
    denoise_all(model, answers, state, reveal=answering.reveal, sampler=answering.sampler, generator=noise)
    return answers.out, answers.passes


class _Answers:
    """The canvases of a batch while they are written: prompt and given tokens stand, all else is masks.

    A row is over with the block in which it writes <eos>, unless given tokens are still to come; its rest is <eos>.
    """

    def __init__(self, canvas: _Canvas, model: Denoiser) -> None:
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


def _scored(
    sample: Sample, written: Tensor, *, nfe: int, right: Tensor, nats: float, canvas: _Canvas, row: int
) -> Scored:
    start = canvas.start
    tokens = written[start : start + sample.room].tolist()
    answers = canvas.answers[row]
    return Scored(
        written=tokens,
        ended=sample.target[-1] in tokens,
        nfe=nfe,
        argmax=float(right[answers].float().mean()),
        nats=nats,
        answer_tokens=int(canvas.scored[row].sum()),
    )
