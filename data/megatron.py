"""Owns reading of Megatron's `.bin`/`.idx` pairs, made here or elsewhere, by memory map.

`.bin` holds tokens; `.idx` says how long each sequence is and with which sequence each document starts. Format as in
Megatron-LM's `megatron/core/datasets/indexed_dataset.py`: header, then int32 size of each sequence, int64 byte offset of
each sequence, int64 number of the first sequence of each document and, last, the number of sequences.
"""

import struct
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.maps import FileView, view_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document boundaries
VERSION = 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floating point
CODES = {name: code for code, name in DTYPES.items()}


class MegatronFile:
    """A pair as a `TokenFile`. `documents` is how many it holds as the manifest knows it; None: they are counted.

    Where each sequence is a document, sizes stay in the index; else the starts of documents are kept in memory. An
    index whose writer never ended a document (its only boundary is 0) has one document a sequence. Empty documents
    are left out. Raises InputError that names file and offset when a file is missing, foreign or truncated.
    """

    def __init__(self, bin_path: Path, idx_path: Path, *, documents: int | None = None, adds_eos: int = 0) -> None:
        self.index = MegatronIndex(idx_path)
        self.adds_eos = adds_eos
        self.dtype = self.index.dtype
        self.view = view_file(bin_path)
        require_size(bin_path, self.index.tokens * self.dtype.itemsize)
        self._starts = None if documents == self.index.sequences else self.index.document_starts()
        self.documents = self.index.sequences if self._starts is None else len(self._starts) - 1

    def sizes(self, first: int, last: int) -> np.ndarray:
        if self._starts is None:
            return self.index.sizes(first, last)
        return np.diff(self._starts[first : last + 1])

    def read(self, start: int, count: int) -> np.ndarray:
        return self.view.array(self.dtype, start * self.dtype.itemsize, count)


class MegatronIndex:
    """An `.idx` file: `sequences`, `dtype` and `tokens`, and what lies where in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_size(path, HEADER.size, at_least=True)
        self.view: FileView = view_file(path)
        magic, version, code, self.sequences, self.boundary_count = HEADER.unpack(self.view.bytes(0, HEADER.size))
        if magic != MAGIC or version != VERSION:
            raise InputError(f"{path} is no Megatron index of version {VERSION}: name a .bin/.idx pair")
        if code not in DTYPES:
            raise InputError(f"{path} has tokens of dtype code {code}: only integers can be tokens ({_codes()})")
        self.dtype = np.dtype(DTYPES[code])
        self.pointers_at = HEADER.size + 4 * self.sequences
        self.boundaries_at = self.pointers_at + 8 * self.sequences
        require_size(path, self.boundaries_at + 8 * self.boundary_count, at_least=True)
        self.tokens = 0
        if self.sequences:
            last = int(self.pointers(self.sequences - 1, self.sequences)[0]) // self.dtype.itemsize
            self.tokens = last + int(self.sizes(self.sequences - 1, self.sequences)[0])

    def sizes(self, first: int, last: int) -> np.ndarray:
        """(last - first,) int64: tokens of sequences first .. last - 1."""
        return self.view.array(np.dtype("<i4"), HEADER.size + 4 * first, last - first).astype(np.int64)

    def pointers(self, first: int, last: int) -> np.ndarray:
        """(last - first,) int64: bytes before sequences first .. last - 1 in the `.bin`."""
        return self.view.array(np.dtype("<i8"), self.pointers_at + 8 * first, last - first)

    def boundaries(self) -> np.ndarray:
        """(documents + 1,) int64: first sequence of each document, and the number of sequences."""
        if self.boundary_count <= 1:  # never written: each sequence is a document
            return np.arange(self.sequences + 1, dtype=np.int64)
        return self.view.array(np.dtype("<i8"), self.boundaries_at, self.boundary_count)

    def document_starts(self) -> np.ndarray:
        """(documents + 1,) int64: stored tokens before each document that is not empty, and all tokens."""
        boundaries = self.boundaries()
        inner = boundaries[boundaries < self.sequences]
        starts = self.pointers(0, self.sequences)[inner] // self.dtype.itemsize
        return np.unique(np.append(starts, self.tokens))  # equal starts: an empty document

    def check(self) -> None:
        """InputError naming the first byte where sizes, offsets and boundaries contradict each other."""
        step, place = 1 << 20, 0
        for first in range(0, self.sequences, step):
            last = min(first + step, self.sequences)
            sizes = self.sizes(first, last)
            if (sizes < 0).any():
                self._refuse(HEADER.size + 4 * (first + int((sizes < 0).argmax())), "a size is negative")
            expected = (place + np.concatenate([[0], np.cumsum(sizes)])) * self.dtype.itemsize
            wrong = self.pointers(first, last) != expected[:-1]
            if wrong.any():
                self._refuse(
                    self.pointers_at + 8 * (first + int(wrong.argmax())),
                    "a sequence does not start where the one before it ends",
                )
            place = int(expected[-1]) // self.dtype.itemsize
        boundaries = self.boundaries()
        steps = np.diff(boundaries)
        if boundaries[0] != 0 or (steps < 0).any() or boundaries[-1] != self.sequences:
            bad = 0 if boundaries[0] != 0 else int((steps < 0).argmax()) + 1 if (steps < 0).any() else len(steps)
            self._refuse(self.boundaries_at + 8 * bad, f"document boundaries do not rise from 0 to {self.sequences}")

    def _refuse(self, byte: int, reason: str) -> None:
        raise InputError(f"{self.path} is wrong at byte {byte}: {reason}; write or copy the pair again")


def index_bytes(sizes: np.ndarray, dtype: str) -> bytes:
    """The whole `.idx` for documents of `sizes` (documents,) tokens, one sequence a document."""
    ends = np.cumsum(sizes, dtype=np.int64)
    pointers = (ends - sizes) * np.dtype(dtype).itemsize  # byte offset of each document in .bin
    boundaries = np.arange(len(sizes) + 1, dtype=np.int64)
    header = HEADER.pack(MAGIC, VERSION, CODES[dtype], len(sizes), len(boundaries))
    return (
        header + sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + boundaries.astype("<i8").tobytes()
    )


def file_size(path: Path) -> int:
    """Bytes of a file; InputError when it is missing."""
    return view_file(path).size


def require_size(path: Path, expected: int, *, at_least: bool = False) -> None:
    """InputError naming file and offset when `path` ends early (or, unless `at_least`, late)."""
    present = file_size(path)
    again = "copy it again, or prepare or adopt the folder again"
    if present < expected:
        raise InputError(f"{path} is truncated at byte {present} of {expected}: {again}")
    if present > expected and not at_least:
        raise InputError(f"{path} goes on after byte {expected}, to {present}: it belongs to another index; {again}")


def _codes() -> str:
    return ", ".join(f"{code} {name}" for code, name in DTYPES.items())
