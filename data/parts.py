"""Owns how a stream of documents is cut: parts (one shard each), train and held out, batches of work."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mezzotint.data.sources import START, Document, Position
from mezzotint.data.tokenizer import utf8

TRAIN, HELDOUT = "train", "heldout"
BATCH_BYTES = 1 << 20  # of text given to a process at once; does not change what is written


@dataclass
class Batch:
    """Documents of one split of one part, in order, to be tokenized together."""

    part: int
    split: str
    texts: list[str] = field(default_factory=list)
    bytes: int = 0
    ends_part: int = 0  # on the last (empty) batch of a part: documents read for the part, empty ones included
    position: Position = START  # on that batch: the place behind the part


def is_heldout(key: str, share: float) -> bool:
    """Whether the document `key` is held out: by hash, so the same in any order, and copies of a text stay together."""
    digest = hashlib.blake2b(utf8(key), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def cut(documents: Iterable[Document], *, heldout: float, part_bytes: int, first_part: int) -> Iterator[Batch]:
    """Batches of all documents; a part ends with the document that brings it to `part_bytes` of text.

    Empty documents are counted and left out. Depends on nothing but the documents and the arguments.
    """
    part, read, size, place = first_part, 0, 0, START
    open_batches = {split: Batch(part, split) for split in (TRAIN, HELDOUT)}
    for text, key, place in documents:
        read += 1
        length = len(utf8(text))
        size += length
        if length:
            split = HELDOUT if is_heldout(key, heldout) else TRAIN
            batch = open_batches[split]
            batch.texts.append(text)
            batch.bytes += length
            if batch.bytes >= BATCH_BYTES:
                yield batch
                open_batches[split] = Batch(part, split)
        if size >= part_bytes:
            yield from _close_part(open_batches, read, place)
            part, read, size = part + 1, 0, 0
            open_batches = {split: Batch(part, split) for split in (TRAIN, HELDOUT)}
    if read:
        yield from _close_part(open_batches, read, place)


def _close_part(open_batches: dict[str, Batch], read: int, place: Position) -> Iterator[Batch]:
    """What is left of a part, then the batch that says it is whole."""
    yield from (batch for batch in open_batches.values() if batch.texts)
    yield Batch(open_batches[TRAIN].part, TRAIN, ends_part=read, position=place)
