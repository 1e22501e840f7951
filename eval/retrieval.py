"""Runs a retrieval sweep: batches of samples through a model, one results row a sample as they come, resumed by key."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mezzotint.data.tasks.catalog import make_sample
from mezzotint.data.tasks.sample import Sample
from mezzotint.eval.bound import Draws
from mezzotint.eval.cells import DTYPES
from mezzotint.eval.memory import available_bytes, is_out_of_memory
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.retrieval_model import Answering, Scored, score_batch
from mezzotint.eval.retrieval_plan import Cell
from mezzotint.eval.retrieval_subjects import build_variant, positions
from mezzotint.eval.scoring import mark_symbols, mark_text
from mezzotint.eval.subjects import Subject
from mezzotint.models.denoiser import Denoiser

SHOWN = 200  # characters of what was written that a row keeps


@dataclass(frozen=True)
class Progress:
    """What has been done since the last one: rows that are new or were there, and the tokens they stand for."""

    cell: Cell
    rows: list[dict]
    tokens: int


def sweep(cells: list[Cell], results: ResultsFile) -> Iterator[Progress]:
    """Score the samples that `results` lacks, writing each row as it comes; yields progress batch by batch.

    Batches are the same whatever is done already, so that a run that was killed ends with the same figures. A cell that
    is predicted not to fit, or runs out of memory, is one row without an index.
    """
    held: tuple[Subject | None, Denoiser | None] = (None, None)
    for cell in cells:
        count = cell.config.samples
        if all(results.done(cell.identity(index)) for index in range(count)):
            yield Progress(cell, _rows(cell, range(count), results), cell.length * count)
            continue
        if results.done(cell.identity(None)):
            yield Progress(cell, [], cell.length * count)
            continue
        if held[0] is not cell.subject:
            held = (None, None)
            _release_memory()
        size = cell.largest_batch(loaded=held[0] is not None)
        if size == 0:
            values = {"needed_bytes": cell.needed_bytes(1), "available_bytes": available_bytes(cell.config.device)}
            results.append(cell.identity(None), status="skipped_predicted_oom", values=values)
            yield Progress(cell, [], cell.length * count)
            continue
        if held[0] is None:
            dtype = DTYPES[cell.config.dtype]
            held = (cell.subject, build_variant(cell.subject, dtype=dtype, device=cell.config.device))
        yield from _run_cell(cell, held[1], size, results)


def _rows(cell: Cell, indices: range, results: ResultsFile) -> list[dict]:
    rows = [results.get(cell.identity(index)) for index in indices]
    return [row for row in rows if row is not None]


def _run_cell(cell: Cell, model: Denoiser | None, size: int, results: ResultsFile) -> Iterator[Progress]:
    """Batch after batch of `size` samples."""
    assert model is not None
    count = cell.config.samples
    for first in range(0, count, size):
        indices = range(first, min(first + size, count))
        if not all(results.done(cell.identity(index)) for index in indices):
            try:
                _run_batch(cell, model, indices, results)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                values = {"needed_bytes": cell.needed_bytes(size), "message": str(error).splitlines()[0][:200]}
                results.append(cell.identity(None), status="oom", values=values)
                _release_memory()
                yield Progress(cell, [], cell.length * (count - first))
                return
        yield Progress(cell, _rows(cell, indices, results), cell.length * len(indices))


def _run_batch(cell: Cell, model: Denoiser, indices: range, results: ResultsFile) -> None:
    """Score the samples of `indices` together and append the rows that are missing."""
    config = cell.config
    samples = [
        make_sample(
            cell.task,
            length=cell.length,
            seed=config.seed,
            index=index,
            depth=cell.depth(index),
            vocabulary=cell.vocabulary,
            needle=cell.needle,
        )
        for index in indices
    ]
    answering = Answering(
        reveal=config.rule(),
        sampler=config.sampler(),
        draws=Draws(per_block=config.draws, seed=config.seed, batch=config.draws),
        chunk=config.chunk,
        seed=config.seed,
    )
    keys = [f"{cell.task.name}/{cell.length}/{index}" for index in indices]
    began = time.perf_counter()
    scored = score_batch(model, samples, answering=answering, keys=keys)
    seconds = (time.perf_counter() - began) / len(samples)
    for index, sample, found in zip(indices, samples, scored):
        identity = cell.identity(index)
        if not results.done(identity):
            results.append(identity, status="ok", values=_values(cell, sample, found, seconds=seconds))


def _values(cell: Cell, sample: Sample, found: Scored, *, seconds: float) -> dict[str, object]:
    text, marks = "", None
    if sample.kind == "symbols":
        marks = mark_symbols(sample, found.written)
    else:
        eos = sample.target[-1]
        written = found.written[: found.written.index(eos)] if found.ended else found.written
        control = (cell.vocabulary.mask_id, cell.vocabulary.pad_id)
        text = cell.vocabulary.decode([token for token in written if token not in control])
        marks = mark_text(sample, text)
    return {
        "correct": marks.correct,
        "part": marks.part,
        "substring": marks.substring,
        "argmax": found.argmax,
        "nats": found.nats if math.isfinite(found.nats) else None,
        "answer_tokens": found.answer_tokens,
        "prompt_tokens": len(sample.tokens),
        "fill": sample.length / cell.length,
        "prompt": sample.sha256,
        "written": text[:SHOWN] if sample.texts else found.written[:SHOWN],
        "wanted": sample.texts or sample.answer,
        "ended": found.ended,
        "nfe": found.nfe,
        "seconds": round(seconds, 4),
        "trained": cell.trained,
        "positions": positions(cell.subject),
    }


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
