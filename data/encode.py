"""Owns the tokenizing of batches of documents, here or in spawned processes, in order and with a bounded backlog."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.parts import Batch
from mezzotint.data.shards import token_dtype
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer

_tokenizer: Tokenizer | None = None  # of a worker process, opened once when it starts


@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch of documents, each ended by <eos>."""

    tokens: np.ndarray  # (n,) all documents, one after the other
    sizes: np.ndarray  # (documents,) int32 tokens of each, <eos> included


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """Tokenize `texts` and end each with <eos>."""
    documents = tokenizer.encode_batch(texts)
    dtype = token_dtype(tokenizer.vocab_size)
    ended = [np.array([*ids, tokenizer.eos_id], dtype=dtype) for ids in documents]
    tokens = np.concatenate(ended) if ended else np.zeros(0, dtype)
    return Encoded(tokens, np.array([len(ids) for ids in ended], dtype=np.int32))


def encode_all(path: Path, batches: Iterable[Batch], workers: int) -> Iterator[tuple[Batch, Encoded]]:
    """Every batch with its tokens, in the order of `batches`, by `workers` processes (1: this one).

    The result does not depend on `workers`. Raises InputError when a worker process dies.
    """
    if workers == 1:
        tokenizer = load_tokenizer(path)
        yield from ((batch, encode_documents(tokenizer, batch.texts)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")  # fork would copy the threads of whoever calls
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(path,))
    pending: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_encode, batch.texts)))
            if len(pending) > 2 * workers:
                yield _first_done(pending)
        while pending:
            yield _first_done(pending)
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process died, perhaps for lack of memory: run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _first_done(pending: deque[tuple[Batch, Future[Encoded]]]) -> tuple[Batch, Encoded]:
    """The oldest batch, waited for."""
    batch, future = pending.popleft()
    return batch, future.result()


def _start(path: Path) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the parent, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    _tokenizer = load_tokenizer(path)


def _end_with_parent() -> None:
    """End this worker when its parent is gone: a killed parent cannot say so, and the queue would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> Encoded:
    assert _tokenizer is not None
    return encode_documents(_tokenizer, texts)
