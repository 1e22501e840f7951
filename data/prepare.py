"""Owns the way from text to a prepared folder: read, cut, tokenize in processes, write shards, resume by part."""

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mezzotint.data.encode import encode_all
from mezzotint.data.errors import InputError
from mezzotint.data.files import sha256_of, write_bytes
from mezzotint.data.manifest import Manifest, read_manifest
from mezzotint.data.parts import HELDOUT, TRAIN, Batch, cut
from mezzotint.data.shards import ShardInfo, ShardWriter, token_dtype
from mezzotint.data.sources import START, Source, SourceConfig, open_source
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.data.workspace import Part, Workspace

SMALL = 4 << 20  # bytes of text below which starting processes costs more than it saves


@dataclass(frozen=True)
class PrepareConfig:
    """What to tokenize, with what, into which folder."""

    tokenizer: str  # file or folder
    out: str
    source: SourceConfig = field(default_factory=SourceConfig)
    heldout: float = 0.0  # share of documents held out, chosen by hash; then `out` gets train/ and heldout/
    shard_mb: float = 64.0  # MiB of text in one part, that is one shard a split
    workers: int = 0  # processes; 0: one a core. Does not change what is written


@dataclass(frozen=True)
class Prepared:
    """The folders that were written."""

    train: Manifest
    heldout: Manifest | None


def prepare(config: PrepareConfig) -> Prepared:
    """Turn text into token shards; a run that was killed goes on where it was, a finished one returns at once.

    What is written depends on text, tokenizer, held-out share and shard size alone: to the byte the same for any number
    of workers and after any number of interruptions. Each document ends with `<eos>` in its shard. Raises InputError.
    """
    _check(config)
    tokenizer = load_tokenizer(config.tokenizer)
    source = open_source(config.source)
    splits = (TRAIN, HELDOUT) if config.heldout else (TRAIN,)
    space = Workspace(Path(config.out), splits, _settings(config, tokenizer, source))
    parts = space.open()
    if not space.finished():
        try:
            for folder in space.folders.values():
                write_bytes(folder / tokenizer_name(tokenizer), tokenizer.files[0].read_bytes())
            _write_parts(config, source, tokenizer, space, parts)
            _write_manifests(config, source, tokenizer, space, parts)
        except OSError as error:
            space.discard_if_useless()
            raise InputError(
                f"{config.out} cannot be written ({error.strerror}): free some space, then run again"
            ) from error
        except InputError:
            space.discard_if_useless()
            raise
    space.close()
    manifests = {split: read_manifest(folder) for split, folder in space.folders.items()}
    return Prepared(manifests[TRAIN], manifests[HELDOUT] if config.heldout else None)


def _check(config: PrepareConfig) -> None:
    """InputError for values no prepare can work with."""
    if not 0 <= config.heldout < 1:
        raise InputError(f"heldout is {config.heldout}: give a share of the documents from 0 up to, not including, 1")
    if not 0 < config.shard_mb < math.inf:
        raise InputError(f"shard_mb is {config.shard_mb}: give a positive number of MiB")
    if config.workers < 0:
        raise InputError(f"workers is {config.workers}: give a number of processes, or 0 for one a core")


def _settings(config: PrepareConfig, tokenizer: Tokenizer, source: Source) -> dict[str, Any]:
    """Everything that decides what is written."""
    return {
        **asdict(config.source),
        "heldout": config.heldout,
        "shard_mb": config.shard_mb,
        "tokenizer": tokenizer.sha256,
        "text": sha256_of("\n".join(source.signature).encode("utf-8", "surrogateescape")),
    }


def _write_parts(
    config: PrepareConfig, source: Source, tokenizer: Tokenizer, space: Workspace, parts: list[Part]
) -> None:
    """Write the shards of every part that is not in `parts` yet, and append it."""
    from tqdm import tqdm

    documents = source.read(parts[-1].position if parts else START)
    part_bytes = max(1, int(config.shard_mb * 2**20))
    batches = cut(documents, heldout=config.heldout, part_bytes=part_bytes, first_part=len(parts))
    done = sum(info.bytes for part in parts for info in part.shards.values())
    encoded = encode_all(tokenizer.files[0], batches, _workers(config, source))
    bar = tqdm(
        total=source.total_bytes,
        initial=done,
        unit="B",
        unit_scale=True,
        desc="tokenizing",
        mininterval=0.5,
        disable=None,
    )
    writers: dict[str, ShardWriter] = {}
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        for batch, tokens in encoded:
            if batch.ends_part:
                parts.append(_close_part(batch, writers, space))
                continue
            if batch.split not in writers:
                writers[batch.split] = ShardWriter(space.folders[batch.split], f"part-{batch.part:05d}", dtype)
            writers[batch.split].add(tokens.tokens, tokens.sizes, batch.bytes)
            bar.update(batch.bytes)
    finally:
        bar.close()
        for writer in writers.values():
            writer.abandon()


def _close_part(batch: Batch, writers: dict[str, ShardWriter], space: Workspace) -> Part:
    """Put the shards of a part in place, then record it."""
    part = Part(batch.ends_part, batch.position, {split: writer.close() for split, writer in sorted(writers.items())})
    space.add(batch.part, part)
    writers.clear()
    return part


def _write_manifests(
    config: PrepareConfig, source: Source, tokenizer: Tokenizer, space: Workspace, parts: list[Part]
) -> None:
    """One manifest a split, the training split's last; InputError, and nothing left, when a split got no document."""
    shards: dict[str, list[ShardInfo]] = {
        split: [part.shards[split] for part in parts if split in part.shards] for split in space.folders
    }
    if not all(shards.values()):
        space.discard()
        if not any(shards.values()):
            raise InputError(f"there is no text in {source.name}: every document is empty")
        empty = next(split for split, members in shards.items() if not members)
        raise InputError(
            f"no document of {source.name} fell into {empty} with heldout = {config.heldout}: change the share, "
            "or cut the text into more documents"
        )
    for split in reversed(list(space.folders)):
        Manifest(
            folder=space.folders[split],
            source=source.name,
            dtype=token_dtype(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            mask_id=tokenizer.mask_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            tokenizer=tokenizer_name(tokenizer),
            tokenizer_sha256=tokenizer.sha256,
            shards=tuple(shards[split]),
        ).write()


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """Name of the tokenizer's copy in a prepared folder."""
    return "tokenizer" + tokenizer.files[0].suffix


def _workers(config: PrepareConfig, source: Source) -> int:
    """How many processes tokenize."""
    if config.workers:
        return config.workers
    if source.total_bytes is not None and source.total_bytes < SMALL:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
