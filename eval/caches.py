"""Runs a comparison of cache policies: batches of prompts under each, one results row a sample as they come."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import torch

from mezzotint.eval.bound import Draws
from mezzotint.eval.caches_bound import written_bound
from mezzotint.eval.caches_plan import BIDIRECTIONAL, Cell
from mezzotint.eval.caches_prompts import Prompt, Prompts, make_prompts, marks_of, stacked
from mezzotint.eval.cells import DTYPES
from mezzotint.eval.memory import is_out_of_memory
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject, build
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.policies.bidirectional import Decoded, decode_canvas
from mezzotint.models.policies.causal import decode_blocks
from mezzotint.models.policies.cost import Cost
from mezzotint.models.policies.none import NoCache
from mezzotint.models.policies.store import Store


def sweep(cells: list[Cell], prompts: dict[str, Prompts], results: ResultsFile) -> Iterator[tuple[Cell, list[dict]]]:
    """Decode what `results` lacks, writing each row as it is done; yields every batch's cell and rows.

    A batch is decoded whole or not at all, so its costs are those of full batches, whatever was done before.
    """
    held: tuple[Subject | None, Denoiser | None] = (None, None)
    for cell in cells:
        source = prompts[cell.subject.name]
        asked, store = make_prompts(source, cell.config, length=cell.length), Store()
        for first in range(0, cell.config.samples, cell.batch):
            indices = range(first, first + cell.batch)
            if not all(results.done(cell.identity(index)) for index in indices):
                if held[0] is not cell.subject:
                    held = (None, None)
                    gc.collect()
                    held = (cell.subject, _warm(cell, asked))
                assert held[1] is not None
                _run_batch(cell, held[1], asked, indices, store, source, results)
            yield cell, [row for index in indices if (row := results.get(cell.identity(index))) is not None]


def _warm(cell: Cell, asked: list[Prompt]) -> Denoiser:
    """The model, after a decode that nobody times: first calls set up what later ones find."""
    model = build(cell.subject, dtype=DTYPES[cell.config.dtype], device=cell.config.device)
    decode(model, cell.baseline, asked[:1], Store())
    return model


def decode(model: Denoiser, cell: Cell, prompts: list[Prompt], store: Store) -> Decoded:
    """One batch under the cell's policy."""
    config = cell.config
    tokens, standing = stacked(prompts)
    spans = config.spans(len(tokens[0])) if cell.policy.spans else ()
    new_tokens, rule = len(standing[0]), config.rule()
    if cell.kind == BIDIRECTIONAL:
        return decode_canvas(
            model,
            tokens,
            policy=cell.policy,
            new_tokens=new_tokens,
            block=min(config.block, new_tokens),
            reveal=rule,
            spans=spans,
            store=store,
            standing=standing,
        )
    return decode_blocks(
        model,
        tokens,
        policy=cell.policy,
        new_tokens=new_tokens,
        block=config.sub_block,
        reveal=rule,
        spans=spans,
        store=store,
        standing=standing,
    )


def _run_batch(
    cell: Cell,
    model: Denoiser,
    asked: list[Prompt],
    indices: range,
    store: Store,
    source: Prompts,
    results: ResultsFile,
) -> None:
    """Decode one batch and append its rows."""
    prompts = [asked[index] for index in indices]
    try:
        found = decode(model, cell, prompts, store)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        for index in indices:
            if not results.done(cell.identity(index)):
                results.append(cell.identity(index), status="oom", values={"message": str(error).splitlines()[0][:200]})
        return
    common = cost_values(found.cost, cell.batch) | {"tokens_per_s": _rate(found), "group": indices.start // cell.batch}
    for index, prompt, written in zip(indices, prompts, found.tokens):
        if results.done(cell.identity(index)):
            continue
        values: dict[str, object] = dict(common)
        values |= {"agreement": _agreement(cell, index, prompt, written, results), "written": written}
        values |= {"nats": _nats(cell, model, prompt, written, index), "written_tokens": prompt.standing.count(
            cell.subject.config.mask_token_id)}  # fmt: skip
        marks = marks_of(prompt, written, source.vocabulary)
        values |= {"correct": marks and marks.correct, "part": marks and marks.part}
        results.append(cell.identity(index), status="ok", values=values)


def cost_values(cost: Cost, batch: int) -> dict[str, object]:
    """What a row keeps of its batch's cost: counts a sample, bytes and seconds of all of them together."""
    layers = cost.layers
    return {
        "nfe": cost.passes,
        "tokens_recomputed": cost.token_layers / layers / batch,
        "tokens_uncached": cost.full_token_layers / layers / batch,
        "prefill_tokens": cost.prefill_token_layers / layers / batch,
        "commit_tokens": cost.commit_token_layers / layers / batch,
        "shared_tokens": cost.shared_token_layers / layers,
        "peak_bytes": cost.peak_bytes,
        "held_bytes": cost.held_bytes,
        "seconds": cost.seconds,
        "prepare_seconds": cost.prepare_seconds,
        "decision_seconds": cost.decision_seconds,
        "decision_operations": cost.decision_operations,
        "effective": {name: _plain(value) for name, value in cost.effective.items()},
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, str, list)) else _number(value)


def _number(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _rate(found: Decoded) -> float:
    """Tokens a second of all rows, prompts included: what prepares a decode is part of it."""
    return sum(map(len, found.tokens)) / max(found.cost.seconds, 1e-9)


def _agreement(cell: Cell, index: int, prompt: Prompt, written: list[int], results: ResultsFile) -> float | None:
    """The share of tokens that were to be written and are those of the uncached decode, which runs first."""
    if isinstance(cell.policy, NoCache):
        return 1.0
    row = results.get(cell.baseline.identity(index))
    if row is None or row["status"] != "ok":
        return None
    mask = cell.subject.config.mask_token_id
    pairs = zip(prompt.standing, written, row["values"]["written"])
    same = [ours == theirs for stood, ours, theirs in pairs if stood == mask]
    return sum(same) / max(len(same), 1)


def _nats(cell: Cell, model: Denoiser, prompt: Prompt, written: list[int], index: int) -> float | None:
    """The bound of what was written; None where it was not asked for, or the text is longer than a bidirectional row."""
    config, size = cell.config, cell.subject.config.block_length
    if config.draws == 0 or (cell.kind == BIDIRECTIONAL and cell.length > size):
        return None
    draws = Draws(per_block=config.draws, seed=config.seed, batch=config.draws)
    with torch.inference_mode():
        nats = written_bound(model, prompt.tokens, written, draws=draws, key=f"caches/{cell.length}/{index}")
    return nats if math.isfinite(nats) else None
