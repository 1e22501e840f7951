"""Small tokenizers and prepared folders for the tests of the data package."""

from pathlib import Path

import numpy as np

from mezzotint.data.manifest import Manifest
from mezzotint.data.shards import ShardWriter, token_dtype
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

PROSE = """def area(width, height):
    \"\"\"Width times height; <mask> and <eos> and <0x41> are only characters here.\"\"\"
    return width * height

The quick brown fox jumps over the lazy dog; the lazy dog does not mind.
"""


def write_text(folder: Path, count: int = 12) -> Path:
    """A folder of `count` short text files, each different."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        (folder / f"part{n:02d}.txt").write_text(PROSE * (1 + n % 3) + f"number {n}\n")
    return folder


def small_tokenizer(folder: Path) -> Path:
    """A trained tokenizer of some 300 ids; returns its folder."""
    from mezzotint.data.sources import SourceConfig

    text = write_text(folder / "sample")
    train_tokenizer(TrainTokenizerConfig(out=str(folder), source=SourceConfig(input=str(text)), vocab_size=340))
    return folder


def write_prepared(folder: Path, shards: list[list[list[int]]], vocab_size: int = 100, tokenizer: str = "t") -> Path:
    """A prepared folder straight from token documents that end with eos (1); pad is 0, mask 3; no tokenizer file."""
    infos = []
    dtype = token_dtype(vocab_size)
    for n, documents in enumerate(shards):
        writer = ShardWriter(folder, f"part-{n:05d}", dtype)
        for document in documents:
            writer.add(np.array(document), np.array([len(document)]), text_bytes=len(document) - 1)
        infos.append(writer.close())
    Manifest(
        folder=folder,
        source="test",
        dtype=dtype,
        vocab_size=vocab_size,
        mask_id=3,
        eos_id=1,
        pad_id=0,
        tokenizer="tokenizer.model",
        tokenizer_sha256=tokenizer,
        shards=tuple(infos),
    ).write()
    return folder


def open_small_tokenizer(folder: Path):
    """The tokenizer of `small_tokenizer`, opened."""
    return load_tokenizer(small_tokenizer(folder))
