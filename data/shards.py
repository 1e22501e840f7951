"""Owns one shard: token documents in Megatron's `.bin`/`.idx` pair, written atomically, and what a manifest says of it.

`.bin` holds the tokens of all documents, one after the other; `.idx` says how long each is. Every document ends with
`<eos>` inside the shard (Megatron's append-eod); the fill of a last block is not stored, `rows` adds it.
"""

import contextlib
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from mezzotint.data.digest import Digest
from mezzotint.data.files import partial_path, publish
from mezzotint.data.megatron import index_bytes


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard: a pair in the folder, or token files made elsewhere that stay where they lie.

    `bin` is the file that holds the tokens, whatever its format; `idx` the one that holds the sizes of its documents:
    the pair's `.idx`, or for parquet and arrow `NAME.sizes` in the folder (int32, one a document).
    """

    name: str  # of the pair, without .bin / .idx
    tokens: int  # one <eos> a document included
    documents: int
    bytes: int  # of text, UTF-8
    largest_id: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str
    bin_blocks: str = ""  # CRC-32 of every MiB, 8 hexadecimal digits each; empty where not kept (format 1)
    idx_blocks: str = ""
    kind: str = "shard"  # or megatron, parquet, arrow: adopted
    path: str = ""  # of the token file, where it is adopted
    column: str = ""  # that holds the ids, of parquet and arrow
    adds_eos: int = 0  # 1: documents end with an <eos> that is not stored
    end_id: int = -1  # id that is read as <eos>; -1 for none
    groups: tuple[int, ...] = ()  # documents of each parquet row group or arrow record batch
    dtype: str = ""  # of the ids in an arrow file
    offsets: tuple[int, ...] = ()  # byte at which the ids of each record batch start in an arrow file

    def as_dict(self) -> dict:
        """Plain values for JSON, without those at their default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def bin_path(self, folder: Path) -> Path:
        """The file that holds the tokens."""
        return Path(self.path) if self.path else folder / f"{self.name}.bin"

    def idx_path(self, folder: Path) -> Path:
        """The file that holds the sizes of documents."""
        if self.kind == "megatron":
            return Path(self.path).with_suffix(".idx")
        return folder / f"{self.name}.idx" if self.kind == "shard" else folder / f"{self.name}.sizes"

    @property
    def reading(self) -> str:
        """What, beside the files, decides the tokens that are read; empty for a shard of our own."""
        if self.kind == "shard":
            return ""
        return f"{self.kind} column={self.column} adds_eos={self.adds_eos} end_id={self.end_id}"


def shard_info(values: dict) -> ShardInfo:
    """The entry of a manifest or of a record of progress; TypeError or KeyError for a damaged one."""
    lists = {name: tuple(values[name]) for name in ("groups", "offsets") if name in values}
    return ShardInfo(**values | lists)


def token_dtype(vocab_size: int) -> str:
    """`uint16` when every id fits, else `int32`."""
    return "uint16" if vocab_size <= 2**16 else "int32"


class ShardWriter:
    """Writes `folder/name.bin` and `.idx`; neither name exists before `close()`."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._bin, self._idx = folder / f"{name}.bin", folder / f"{name}.idx"
        self._name, self._dtype = name, np.dtype(dtype)
        self._sizes: list[np.ndarray] = []
        self._digest = Digest()
        self._bytes = self._largest = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(partial_path(self._bin), "wb")  # noqa: SIM115  (lives until close)

    def add(self, tokens: np.ndarray, sizes: np.ndarray, text_bytes: int) -> None:
        """Append whole documents: `tokens` (n,) of all of them, `sizes` (documents,) tokens of each, <eos> included."""
        raw = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._sizes.append(np.asarray(sizes, dtype=np.int32))
        self._bytes += text_bytes
        self._largest = max(self._largest, int(tokens.max()))

    def abandon(self) -> None:
        """Drop what was written so far, after a failure."""
        with contextlib.suppress(OSError):  # a full disk refuses what is still in the buffer
            self._file.close()
        partial_path(self._bin).unlink(missing_ok=True)
        partial_path(self._idx).unlink(missing_ok=True)

    def close(self) -> ShardInfo:
        """Put both files in place; at least one document must have been added."""
        self._flush(self._file)
        self._file.close()
        sizes = np.concatenate(self._sizes)
        index = index_bytes(sizes, self._dtype.name)
        with open(partial_path(self._idx), "wb") as file:
            file.write(index)
            self._flush(file)
        publish(self._bin)
        publish(self._idx)
        tokens = int(sizes.sum(dtype=np.int64))
        index_digest = Digest()
        index_digest.update(index)
        return ShardInfo(
            name=self._name,
            tokens=tokens,
            documents=len(sizes),
            bytes=self._bytes,
            largest_id=self._largest,
            bin_bytes=tokens * self._dtype.itemsize,
            idx_bytes=len(index),
            bin_sha256=self._digest.sha256,
            idx_sha256=index_digest.sha256,
            bin_blocks=self._digest.blocks,
            idx_blocks=index_digest.blocks,
        )

    @staticmethod
    def _flush(file) -> None:
        file.flush()
        os.fsync(file.fileno())
