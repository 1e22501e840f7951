"""Owns how documents become rows: filled to whole blocks, laid end to end, cut every T tokens, by prefix sums."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.manifest import read_manifest
from mezzotint.data.open_files import open_files
from mezzotint.data.spans import Spans

STRETCH = 1 << 20  # tokens of neighbouring row groups that are read together where reading one row decodes a group


@dataclass(frozen=True)
class Row:
    """One training row of T tokens."""

    tokens: np.ndarray  # (T,) int64
    documents: np.ndarray  # (T,) int64, 0 at the row's first document and rising by one at each start; -1 where padded
    fill: np.ndarray  # (T,) bool: <eos> added to fill a document's last block (ordinary tokens, but no bytes of text)
    blocks: int  # valid blocks; the rest of a short last row is <pad>


class RowSource:
    """The rows of one prepared or adopted folder, by number.

    Each document (ended by its `<eos>`) is filled up with `<eos>` to a multiple of `block_length`; the filled documents
    are laid end to end in the manifest's order; row `i` is tokens `[iT, (i+1)T)`. A document cut by a row's end goes on
    in the next row as a document of its own. The last row may be short: it is padded with `<pad>`, and `blocks` says
    how many blocks are valid.

    With `align=False` (a block as long as the row) documents are not filled, and the tokens after the last whole row
    are left out, since a block that is partly padding has no place in the objective.

    Raises InputError for rows that are no multiple of the block, a folder without manifest and damaged files.
    """

    def __init__(self, folder: str | Path, row_length: int, block_length: int, *, align: bool = True) -> None:
        _check_lengths(row_length, block_length)
        self.manifest = read_manifest(folder)
        self.row_length, self.block_length = row_length, block_length
        self._files = open_files(self.manifest)
        self._spans = Spans(self._files, block_length if align else 1)
        self._file_starts = self._spans.file_starts()  # (files + 1,)
        self._adds_eos = any(file.adds_eos for file in self._files)
        total = self._spans.total
        self._length = -(-total // row_length) if align else total // row_length
        if self._length == 0:
            raise InputError(f"{folder} holds {total} tokens, less than one row of {row_length}: take shorter rows")

    def __len__(self) -> int:
        """Number of rows."""
        return self._length

    def __getitem__(self, i: int) -> Row:
        """Row `i`, 0 <= i < len(self); cost grows with the documents inside it, not with its tokens."""
        if not 0 <= i < self._length:
            raise IndexError(f"row {i} of {self._length}")
        low = i * self.row_length
        high = min(low + self.row_length, self._spans.total)
        span = self._spans.between(low, high)
        starts = span.starts[:-1]
        widths = np.diff(np.clip(span.starts, low, high))  # (n,) tokens of each document in the row, fill included

        def before(lengths: np.ndarray) -> np.ndarray:
            """(high - low,) bool: whether each token comes before its document's token number `lengths` (n,)."""
            return place < np.repeat(np.clip(starts + lengths, low, high) - low, widths)

        place = np.arange(high - low)
        documents = np.full(self.row_length, -1, dtype=np.int64)
        documents[: high - low] = np.repeat(np.arange(len(starts)), widths)
        fill = np.zeros(self.row_length, dtype=bool)
        fill[: high - low] = ~before(span.lengths)
        stored = before(span.stored) if self._adds_eos else ~fill[: high - low]
        tokens = np.full(self.row_length, self.manifest.eos_id, dtype=np.int64)
        tokens[high - low :] = self.manifest.pad_id
        # The stored tokens of a row lie side by side: only fill, and <eos> that is not stored, comes between them.
        raw = span.first_stored + min(low - int(starts[0]), int(span.stored[0]))
        tokens[: high - low][stored] = self._stored(raw, int(stored.sum()))
        return Row(tokens, documents, fill, -(-(high - low) // self.block_length))

    def goes_on(self, i: int) -> bool:
        """Whether the first document of row `i` began in an earlier row."""
        low = i * self.row_length
        return int(self._spans.between(low, low + 1).starts[0]) < low

    def stretches(self) -> np.ndarray | None:
        """(n + 1,) int64: first row of each stretch of about STRETCH tokens that is cheap to read as a whole.

        None where any row is as cheap as any other: only parquet is decoded a row group at a time.
        """
        if not any(shard.kind == "parquet" for shard in self.manifest.shards):
            return None
        kept = [0]
        for number, shard in enumerate(self.manifest.shards):
            groups = np.cumsum([0, *shard.groups] if shard.groups else [0, shard.documents])
            for start in self._spans.starts_in(number, groups).tolist():
                if start - kept[-1] >= STRETCH:
                    kept.append(start)
        rows = -(-np.array(kept, dtype=np.int64) // self.row_length)
        return np.unique(np.append(rows[rows < self._length], self._length))

    def _stored(self, start: int, count: int) -> np.ndarray:
        """Stored tokens [start, start + count) of all files laid end to end."""
        number = int(np.searchsorted(self._file_starts, start, side="right")) - 1
        pieces = []
        while count > 0:
            take = min(count, int(self._file_starts[number + 1]) - start)
            pieces.append(self._files[number].read(start - int(self._file_starts[number]), take))
            start, count, number = start + take, count - take, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def _check_lengths(row_length: int, block_length: int) -> None:
    """InputError unless the row is a whole number of blocks."""
    if block_length < 1 or row_length < 1:
        raise InputError(f"row_length {row_length} and block_length {block_length} must be positive")
    if row_length % block_length:
        nearest = max(1, round(row_length / block_length)) * block_length
        raise InputError(
            f"row_length {row_length} is no multiple of block_length {block_length}: set row_length to {nearest}"
        )
