"""Owns the tokenizing of batches of documents, here or in spawned processes, in order and with a bounded backlog."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.parts import Batch
from mezzotint.data.shards import token_dtype
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.data.workers import in_order

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
    jobs = ((batch, (batch.texts,)) for batch in batches)
    yield from in_order(_encode, jobs, workers=workers, start=_start, settings=(path,))


def _start(path: Path) -> None:
    global _tokenizer
    _tokenizer = load_tokenizer(path)


def _encode(texts: list[str]) -> Encoded:
    assert _tokenizer is not None
    return encode_documents(_tokenizer, texts)
