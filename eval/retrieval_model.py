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
from mezzotint.eval.retrieval_canvas import Answers, Canvas, canvas_of
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


@torch.inference_mode()
def score_batch(model: Denoiser, samples: list[Sample], *, answering: Answering, keys: list[str]) -> list[Scored]:
    """Score samples of one task and length, so that their prompts and rooms are equally long.

    The prompts are committed once. `keys` name the samples for the masks of the bound, the first of them the noise of
    the decoding.
    """
    size, device = model.config.block_length, model.embed.weight.device
    canvas = canvas_of(samples, size, eos=model.config.eos_token_id)
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


def _given_the_truth(
    model: Denoiser, canvas: Canvas, state: State, *, answering: Answering, keys: list[str]
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
    model: Denoiser, canvas: Canvas, state: State, *, answering: Answering, key: str
) -> tuple[Tensor, list[int]]:
    """Fill the open places by the reveal rule; (B, n*G) tokens and the passes of every row."""
    digest = hashlib.blake2b(f"{answering.seed}/{key}".encode(), digest_size=7).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    answers = Answers(canvas, model)
    denoise_all(model, answers, state, reveal=answering.reveal, sampler=answering.sampler, generator=noise)
    return answers.out, answers.passes


def _scored(
    sample: Sample, written: Tensor, *, nfe: int, right: Tensor, nats: float, canvas: Canvas, row: int
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
