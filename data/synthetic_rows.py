"""Owns the making of rows of a mixture, here or in spawned processes, in order and with a bounded backlog."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mezzotint.data.tasks.mixture import Mixture
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.workers import in_order

Job = tuple[int, str, int, int]  # part, split, first row, one past the last


def make_all(
    jobs: list[Job], mixture: Mixture, tokenizer: str, text: str, workers: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(part, tokens, sizes) of every job in order, made by `workers` processes (1: this one)."""
    if workers == 1 or len(jobs) < 2:
        _start(tokenizer, text)
        yield from (_make(mixture, job) for job in jobs)
        return
    asked = ((job, (mixture, job)) for job in jobs)
    yield from (made for _, made in in_order(_make, asked, workers=workers, start=_start, settings=(tokenizer, text)))


_vocabulary: Vocabulary | None = None  # of a process that makes rows, opened once when it starts


def _start(tokenizer: str, text: str) -> None:
    global _vocabulary
    _vocabulary = Vocabulary.load(tokenizer, text=text)


def _make(mixture: Mixture, job: Job) -> tuple[int, np.ndarray, np.ndarray]:
    number, split, first, end = job
    assert _vocabulary is not None
    documents = [document for row in range(first, end) for document in mixture.row(split, row, _vocabulary)]
    sizes = np.array([len(document) for document in documents], dtype=np.int32)
    tokens = np.fromiter((token for document in documents for token in document), dtype=np.int32, count=sizes.sum())
    return number, tokens, sizes
