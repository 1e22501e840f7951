"""Owns one shard: token documents in Megatron's `.bin`/`.idx` pair, written atomically and read by memory map.

`.bin` holds the tokens of all documents, one after the other; `.idx` says how long each is. Every document ends with
`<eos>` inside the shard (Megatron's append-eod); the fill of a last block is not stored, `rows` adds it.
"""

import hashlib
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.files import partial_path, publish

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document boundaries
VERSION = 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
DTYPES = {code: name for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard."""

    name: str  # of the pair, without .bin / .idx
    tokens: int  # one <eos> a document included
    documents: int
    bytes: int  # of text, UTF-8
    largest_id: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str

    def as_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)


def token_dtype(vocab_size: int) -> str:
    """`uint16` when every id fits, else `int32`."""
    return "uint16" if vocab_size <= 2**16 else "int32"


class ShardWriter:
    """Writes `folder/name.bin` and `.idx`; neither name exists before `close()`."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._bin, self._idx = folder / f"{name}.bin", folder / f"{name}.idx"
        self._name, self._dtype = name, np.dtype(dtype)
        self._sizes: list[np.ndarray] = []
        self._hash = hashlib.sha256()
        self._bytes = self._largest = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(partial_path(self._bin), "wb")  # noqa: SIM115  (lives until close)

    def add(self, tokens: np.ndarray, sizes: np.ndarray, text_bytes: int) -> None:
        """Append whole documents: `tokens` (n,) of all of them, `sizes` (documents,) tokens of each, <eos> included."""
        raw = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self._sizes.append(np.asarray(sizes, dtype=np.int32))
        self._bytes += text_bytes
        self._largest = max(self._largest, int(tokens.max()))

    def abandon(self) -> None:
        """Drop what was written so far, after a failure."""
        self._file.close()
        partial_path(self._bin).unlink(missing_ok=True)

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
        return ShardInfo(
            name=self._name,
            tokens=tokens,
            documents=len(sizes),
            bytes=self._bytes,
            largest_id=self._largest,
            bin_bytes=tokens * self._dtype.itemsize,
            idx_bytes=len(index),
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
        )

    @staticmethod
    def _flush(file) -> None:
        file.flush()
        os.fsync(file.fileno())


def index_bytes(sizes: np.ndarray, dtype: str) -> bytes:
    """The whole `.idx` for documents of `sizes` (documents,) tokens, one sequence a document."""
    ends = np.cumsum(sizes, dtype=np.int64)
    pointers = (ends - sizes) * np.dtype(dtype).itemsize  # byte offset of each document in .bin
    boundaries = np.arange(len(sizes) + 1, dtype=np.int64)
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], len(sizes), len(boundaries))
    return (
        header + sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + boundaries.astype("<i8").tobytes()
    )


class ShardReader:
    """Memory-mapped `.bin`/`.idx` pair: `.sizes` (documents,) int32 and `.tokens` (n,), documents one after the other.

    Raises InputError that names file and offset when a file is missing, foreign or truncated.
    """

    def __init__(self, prefix: Path) -> None:
        idx, self._bin = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
        require_size(idx, HEADER.size, at_least=True)
        with open(idx, "rb") as file:
            magic, version, code, documents, boundaries = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            raise InputError(f"{idx} is no Megatron index of version {VERSION} with uint16 or int32 tokens")
        require_size(idx, HEADER.size + 12 * documents + 8 * boundaries, at_least=True)
        self.sizes = np.memmap(idx, dtype="<i4", mode="r", offset=HEADER.size, shape=(documents,))
        self.tokens_count = int(self.sizes.sum(dtype=np.int64))
        self._dtype = np.dtype(DTYPES[code])
        require_size(self._bin, self.tokens_count * self._dtype.itemsize, at_least=False)
        self.tokens = np.memmap(self._bin, dtype=self._dtype, mode="r", shape=(self.tokens_count,))


def file_size(path: Path) -> int:
    """Bytes of a file; InputError when it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: copy it again or run `mezzotint-data prepare` again") from error


def require_size(path: Path, expected: int, *, at_least: bool = False) -> None:
    """InputError naming file and offset when `path` ends early (or, unless `at_least`, late)."""
    present = file_size(path)
    again = "copy it again or run `mezzotint-data prepare` into a new folder"
    if present < expected:
        raise InputError(f"{path} is truncated at byte {present} of {expected}: {again}")
    if present > expected and not at_least:
        raise InputError(f"{path} goes on after byte {expected}, to {present}: it belongs to another index; {again}")
