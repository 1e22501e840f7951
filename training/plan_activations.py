"""What one rank's forward and backward pass keeps and needs: the real pass on stand-ins, one layer of each kind."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

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
ROWS = (4, 8)  # rows of the passes that larger ones are extrapolated from


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer above what is alive before it."""

    kept: float  # until its backward pass: activations and its output; of a last layer activations and its input
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


Bytes = TypeVar("Bytes", EdgeBytes, LayerBytes)


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
    edge, inner, last = _measured(dataclasses.replace(p, engine=like), device)
    if p.engine.zero_stage == 3:
        # DeepSpeed's own linear keeps the weight itself, which ZeRO gathers again, and casts it each time
        inner = {letter: dataclasses.replace(layer, casts=0.0, cached=0.0) for letter, layer in inner.items()}
        last = dataclasses.replace(last, casts=0.0, cached=0.0)
        edge = dataclasses.replace(edge, casts=0.0)
    layers = [*(inner[letter] for letter in p.model.pattern[:-1]), last]
    kept = casts = cached = forward = backward = 0.0
    for layer in layers:
        forward = max(forward, kept + casts + cached + layer.forward)
        kept, casts, cached = kept + layer.kept, casts + layer.casts, cached + layer.cached
        backward = max(backward, kept + casts + layer.backward)  # the layers behind it have given theirs back
    shared = max(layer.shared for layer in layers)
    peaks = {
        "forward": edge.begin + shared + forward,
        "loss": shared + kept + casts + cached + edge.forward,
        "head": shared + kept + casts + edge.backward,
        "backward": shared + edge.pending + backward,
    }
    largest = max(peaks, key=lambda name: peaks[name])
    kept, casts = kept + shared + edge.kept, casts + edge.casts
    return PassBytes(kept=kept, casts=casts, work=max(0.0, peaks[largest] - kept - casts), largest=largest)


@functools.lru_cache(maxsize=64)
def _measured(p: Pass, device: str) -> tuple[EdgeBytes, dict[str, LayerBytes], LayerBytes]:
    """Bytes of the edge, of a layer of each kind, and of the last layer."""
    if p.rows > ROWS[-1]:
        return _more_rows(p, device)
    with kernels_of(device):
        edge = edge_bytes(p, micro_batch(p))
        inner = {letter: layer_bytes(p, letter, last=False) for letter in sorted(set(p.model.pattern[:-1]))}
        return edge, inner, layer_bytes(p, p.model.pattern[-1], last=True)


def _more_rows(p: Pass, device: str) -> tuple[EdgeBytes, dict[str, LayerBytes], LayerBytes]:
    """From passes of few rows: beyond them the bytes of a layer grow by the same amount with every row.

    So do those of the edge, once its loss is computed in several pieces; before, they are measured.
    """
    few, many = (_measured(dataclasses.replace(p, rows=rows), device) for rows in ROWS)
    size = p.model.block_length
    pieces = -(-4 * p.objective.loss_chunk // (p.objective.slots(p.row_length // size) * size))  # rows of two of them
    places = [n if n < p.rows else p.rows for n in (pieces, 2 * pieces)]
    with kernels_of(device):
        edges = [_edge(dataclasses.replace(p, rows=rows)) for rows in places]
    edge = edges[-1] if p.rows in places else _by_rows(places, edges, p.rows)
    inner = {k: _by_rows(ROWS, [few[1][k], many[1][k]], p.rows) for k in few[1]}
    return edge, inner, _by_rows(ROWS, [few[2], many[2]], p.rows)


@functools.lru_cache(maxsize=64)
def _edge(p: Pass) -> EdgeBytes:
    return edge_bytes(p, micro_batch(p))


def _by_rows(places: Sequence[int], found: list[Bytes], rows: int) -> Bytes:
    """The line through what was found at `places`, at so many rows."""
    values = {f.name: _polynomial(places, [getattr(x, f.name) for x in found], rows) for f in fields(found[0])}
    return type(found[0])(**values)


def layer_bytes(p: Pass, letter: str, *, last: bool) -> LayerBytes:
    """One layer of that kind; `last`: it finishes the noisy stream alone. Long rows from shorter ones.

    Bytes are a polynomial in the number of blocks, of degree two for attention, where every tile of queries sees as many
    keys as it stands far from the row's start, and else of degree one.
    """
    blocks = p.row_length // p.model.block_length
    unit = max(1, TILE_TOKENS // (p.model.block_length * 16))  # whole tiles
    samples = [unit * n for n in (SAMPLES if letter == "A" else SAMPLES[1:])]
    if blocks <= samples[-1]:
        return _one_layer(p, letter, last=last)
    found = [_one_layer(_shorter(p, n, samples[0]), letter, last=last) for n in samples]
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


def _one_layer(p: Pass, letter: str, *, last: bool) -> LayerBytes:
    ledger, rows = Ledger(), micro_batch(p)
    model = _stand_in(p, letter, ledger)
    run = layer_run(p.engine.activations, compiled=False)
    watched = _Watched(run if last else partial(_whole, run), ledger)
    canvas = paint(rows.tokens, rows.documents, rows.noise, p.objective.noise_schedule(), p.model.block_length)
    clean = rows.tokens[:, : canvas.clean_tokens]
    weights = ledger.live
    with ledger:
        with _arithmetic(p):
            hidden = model.hidden(clean, canvas.targets, canvas.frontiers, rows.documents, run=watched)
            grown = ledger.live - watched.before
        casts = ledger.cast_bytes
        kept = ledger.live - watched.before
        # the first layer's input counts as the last one's, whose own output is not kept
        exchanged = watched.stream - watched.out if last else 0
        start = ledger.start_phase()
        hidden.backward(ledger.empty(*hidden.shape, dtype=hidden.dtype))
    return LayerBytes(
        kept=kept + exchanged - casts,
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
        forward=forward - watched.stream + watched.out,
        backward=ledger.peak - weights - watched.stream,
        pending=model.embed.weight.nbytes if p.model.tie_embeddings else 0.0,
    )


class _Watched:
    """A way to run layers that notes what is alive before and the most while they run, and holds on to the tiles."""

    def __init__(self, run: LayerRun, ledger: Ledger) -> None:
        self._run, self._ledger = run, ledger
        self.before = self.peak = self.stream = self.out = 0
        self.held: AttentionPlan | None = None

    def __call__(
        self, layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
    ) -> tuple[Tensor, LayerState | None]:
        self.held, self.stream = attention, h.untyped_storage().nbytes()
        self.before = self._ledger.start_phase()
        result = self._run(layer, h, layout, attention, state)
        self.peak, self.out = self._ledger.peak, result[0].nbytes
        return result


def _no_layer(
    layer: Layer, h: Tensor, layout: Layout, attention: AttentionPlan | None, state: LayerState | None
) -> tuple[Tensor, LayerState | None]:
    """Cuts the stream: the embedding's backward pass comes last, when nothing of the head is left."""
    return layout.outputs(h).detach().requires_grad_(), None


def _whole(
    run: LayerRun,
    layer: Layer,
    h: Tensor,
    layout: Layout,
    attention: AttentionPlan | None,
    state: LayerState | None,
) -> tuple[Tensor, LayerState | None]:
    """Runs the only layer of a stand-in, which is its last, as one with others behind it."""
    layout = dataclasses.replace(layout, clean_output=True)
    attention = None if attention is None else dataclasses.replace(attention, layout=layout)
    h, state = run(layer, h, layout, attention, state)
    return h[:, layout.clean_tokens :], state


def _stand_in(p: Pass, pattern: str, ledger: Ledger) -> Denoiser:
    with torch.device("meta"):
        model = Denoiser(dataclasses.replace(p.model, pattern=pattern))
    ledger.materialize(model, torch.bfloat16 if p.engine.precision == "bf16" else torch.float32)
    return model


@contextmanager
def _arithmetic(p: Pass) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=p.engine.precision == "autocast"):
        yield


def _polynomial(places: Sequence[int], values: list[float], at: int) -> float:
    """The polynomial through (places, values), at `at` (Lagrange's form)."""
    total = 0.0
    for i, value in enumerate(values):
        others = [x for j, x in enumerate(places) if j != i]
        total += value * math.prod((at - x) / (places[i] - x) for x in others)
    return total
