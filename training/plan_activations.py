"""What one rank's forward and backward pass keeps and needs: the real pass on stand-ins, one layer of each kind."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mezzotint.models.attention import AttentionPlan
from mezzotint.models.denoiser import Denoiser, Layer, LayerRun
from mezzotint.models.layout import Layout
from mezzotint.models.ops.tiles import TILE_TOKENS
from mezzotint.models.state import LayerState
from mezzotint.training.engine import EngineConfig
from mezzotint.training.layer_runs import layer_run
from mezzotint.training.objective import Objective, paint
from mezzotint.training.plan_ledger import Ledger, kernels_of
from mezzotint.training.plan_pass import Pass, Rows, micro_batch

SAMPLES = (32, 48, 64)  # blocks of the rows that longer ones are extrapolated from


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer above what is alive before it."""

    kept: float  # until its backward pass: activations and its output
    casts: float  # until its backward pass: weights in bfloat16
    cached: float  # until the end of the forward pass: casts that nothing keeps longer
    forward: float  # most while it runs forward
    backward: float  # most in its backward pass, above all that is kept
    shared: float  # tiles and tables that all layers of its kind share, alive all the time


@dataclass(frozen=True, kw_only=True)
class EdgeBytes:
    """Bytes of the pass without its layers: embedding, final norm, head and loss."""

    begin: float  # alive when the first layer begins
    kept: float  # for the backward pass, behind the layers
    casts: float
    forward: float  # most while the loss is computed
    backward: float  # most in its backward pass
    pending: float  # gradient of tied weights, from the head's backward pass until the embedding's


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Bytes of a micro-batch on one rank."""

    kept: float  # alive between forward and backward pass: activations of all layers, and of embedding and head
    casts: float  # alive there too: weights in bfloat16, for their backward products
    work: float  # on top of both at the worst moment: one layer's (or the head's) inside, casts that pass
    largest: str  # when that is: 'forward', 'loss', 'head' (its backward pass) or 'backward'

    @property
    def peak(self) -> float:
        return self.kept + self.casts + self.work


def pass_bytes(p: Pass, *, device: str = "cuda") -> PassBytes:
    """The whole pass from one measured layer of each kind; 'compile' counts as not compiled, which keeps no less."""
    like = EngineConfig(precision=p.engine.precision, activations=p.engine.activations)  # the stage changes no layer
    edge, layers = _measured(dataclasses.replace(p, engine=like), device)
    if p.engine.zero_stage == 3:
        # DeepSpeed's own linear keeps the weight itself, which ZeRO gathers again, and casts it each time
        layers = {letter: dataclasses.replace(layer, casts=0.0, cached=0.0) for letter, layer in layers.items()}
        edge = dataclasses.replace(edge, casts=0.0)
    counts = {letter: p.model.pattern.count(letter) for letter in layers}
    kept = sum(counts[k] * layer.kept for k, layer in layers.items())
    casts = sum(counts[k] * layer.casts for k, layer in layers.items())
    cached = sum(counts[k] * layer.cached for k, layer in layers.items())
    shared = max(layer.shared for layer in layers.values())
    above = kept + casts + cached  # what the layers leave while the forward pass lasts
    peaks = {
        "forward": edge.begin + shared + above + max(x.forward - x.kept - x.casts - x.cached for x in layers.values()),
        "loss": shared + above + edge.forward,
        "head": shared + kept + casts + edge.backward,
        "backward": shared + kept + casts + edge.pending + max(x.backward for x in layers.values()),
    }
    largest = max(peaks, key=lambda name: peaks[name])
    kept, casts = kept + shared + edge.kept, casts + edge.casts
    return PassBytes(kept=kept, casts=casts, work=max(0.0, peaks[largest] - kept - casts), largest=largest)


@functools.lru_cache(maxsize=64)
def _measured(p: Pass, device: str) -> tuple[EdgeBytes, dict[str, LayerBytes]]:
    with kernels_of(device):
        edge = edge_bytes(p, micro_batch(p))
        return edge, {letter: layer_bytes(p, letter) for letter in sorted(set(p.model.pattern))}


def layer_bytes(p: Pass, letter: str) -> LayerBytes:
    """One layer of that kind; long rows from shorter ones.

    Bytes are a polynomial in the number of blocks, of degree two for attention, where every tile of queries sees as many
    keys as it stands far from the row's start, and else of degree one.
    """
    blocks = p.row_length // p.model.block_length
    unit = max(1, TILE_TOKENS // (p.model.block_length * 16))  # whole tiles
    samples = [unit * n for n in (SAMPLES if letter == "A" else SAMPLES[1:])]
    if blocks <= samples[-1]:
        return _one_layer(p, letter)
    found = [_one_layer(_shorter(p, n, samples[0]), letter) for n in samples]
    values = {
        field.name: _polynomial(samples, [getattr(x, field.name) for x in found], blocks)
        for field in fields(LayerBytes)
    }
    return LayerBytes(**values)


def _shorter(p: Pass, blocks: int, fewest: int) -> Pass:
    """Rows of so many blocks, with as many frontiers as before, or in proportion where `fewest` blocks do not hold them."""
    k, objective = p.objective.frontiers, p.objective
    if isinstance(k, int) and k > fewest:
        objective = dataclasses.replace(objective, frontiers=k * blocks * p.model.block_length // p.row_length)
    return dataclasses.replace(p, row_length=blocks * p.model.block_length, objective=objective)


def _one_layer(p: Pass, letter: str) -> LayerBytes:
    ledger, rows = Ledger(), micro_batch(p)
    model = _stand_in(p, letter, ledger)
    watched = _Watched(layer_run(p.engine.activations, compiled=False), ledger)
    canvas = paint(rows.tokens, rows.documents, rows.noise, p.objective.noise_schedule(), p.model.block_length)
    clean = rows.tokens[:, : canvas.clean_tokens]
    weights = ledger.live
    with ledger:
        with _arithmetic(p):
            hidden = model.hidden(clean, canvas.targets, canvas.frontiers, rows.documents, run=watched)
            grown = ledger.live - watched.before
        casts = ledger.cast_bytes
        kept = ledger.live - watched.before
        start = ledger.start_phase()
        hidden.backward(ledger.empty(*hidden.shape, dtype=hidden.dtype))
    return LayerBytes(
        kept=kept - casts,
        casts=casts,
        cached=grown - kept,
        forward=watched.peak - watched.before,
        backward=ledger.peak - start,
        shared=watched.before - watched.stream - weights,
    )


def edge_bytes(p: Pass, rows: Rows) -> EdgeBytes:
    """The real objective on a model whose layers do nothing."""
    ledger = Ledger()
    model = _stand_in(p, "M", ledger)  # no attention: its tiles are counted with its layers
    watched = _Watched(_no_layer, ledger)
    objective = Objective(model, p.objective.noise_schedule(), loss_chunk=p.objective.loss_chunk, run=watched)
    weights = ledger.start_phase()
    with ledger:
        with _arithmetic(p):
            loss, _ = objective(rows.tokens, rows.documents, rows.noise)
        casts, kept, forward = ledger.cast_bytes, ledger.live - weights - watched.stream, ledger.peak - weights
        ledger.start_phase()
        loss.backward()
    return EdgeBytes(
        begin=watched.before - weights,
        kept=kept - casts,
        casts=casts,
        forward=forward,
        backward=ledger.peak - weights - watched.stream,
        pending=model.embed.weight.nbytes if p.model.tie_embeddings else 0.0,
    )


class _Watched:
    """A way to run layers that notes what is alive before and the most while they run, and holds on to the tiles."""

    def __init__(self, run: LayerRun, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger
        self.before = self.peak = self.stream = 0
        self.held: AttentionPlan | None = None

    def __call__(
        self, layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        self.held, self.stream = attention, h.untyped_storage().nbytes()
        self.before = self._ledger.start_phase()
        result = self._run(layer, h, layout, attention, state)
        self.peak = self._ledger.peak
        return result


def _no_layer(
    layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
) -> tuple[Tensor, LayerState | None]:
    """Cuts the stream: the embedding's backward pass comes last, when nothing of the head is left."""
    return h.detach().requires_grad_(), None


def _stand_in(p: Pass, pattern: str, ledger: Ledger) -> Denoiser:
    with torch.device("meta"):
        model = Denoiser(dataclasses.replace(p.model, pattern=pattern))
    ledger.materialize(model, torch.bfloat16 if p.engine.precision == "bf16" else torch.float32)
    return model


@contextmanager
def _arithmetic(p: Pass) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=p.engine.precision == "autocast"):
        yield


def _polynomial(places: list[int], values: list[float], at: int) -> float:
    """The polynomial through (places, values), at `at` (Lagrange's form)."""
    total = 0.0
    for i, value in enumerate(values):
        others = [x for j, x in enumerate(places) if j != i]
        total += value * math.prod((at - x) / (places[i] - x) for x in others)
    return total
