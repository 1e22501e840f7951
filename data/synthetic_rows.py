"""Owns the making of rows of a mixture, here or in spawned processes, in order and with a bounded backlog."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.mixture import Mixture
from mezzotint.data.tasks.vocabulary import Vocabulary

Job = tuple[int, str, int, int]  # part, split, first row, one past the last


def make_all(
    jobs: list[Job], mixture: Mixture, tokenizer: str, text: str, workers: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(part, tokens, sizes) of every job in order, made by `workers` processes (1: this one)."""
    if workers == 1 or len(jobs) < 2:
        _start(tokenizer, text, child=False)
        yield from (_make(mixture, job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy the threads of whoever calls
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(tokenizer, text))
    pending: deque[Future[tuple[int, np.ndarray, np.ndarray]]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(_make, mixture, job))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process died, perhaps for lack of memory: run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_vocabulary: Vocabulary | None = None  # of a worker process, opened once when it starts


def _start(tokenizer: str, text: str, child: bool = True) -> None:
    global _vocabulary
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the parent, once
        threading.Thread(target=_end_with_parent, daemon=True).start()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _vocabulary = Vocabulary.load(tokenizer, text=text)


def _end_with_parent() -> None:
    """A killed parent cannot say so, and the queue would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(mixture: Mixture, job: Job) -> tuple[int, np.ndarray, np.ndarray]:
    number, split, first, end = job
    assert _vocabulary is not None
    documents = [document for row in range(first, end) for document in mixture.row(split, row, _vocabulary)]
    sizes = np.array([len(document) for document in documents], dtype=np.int32)
    tokens = np.fromiter((token for document in documents for token in document), dtype=np.int32, count=sizes.sum())
    return number, tokens, sizes
