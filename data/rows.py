"""Owns how documents become rows: filled to whole blocks, laid end to end, cut every T tokens, by prefix sums."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.manifest import read_manifest
from mezzotint.data.shards import ShardReader


@dataclass(frozen=True)
class Row:
    """One training row of T tokens."""

    tokens: np.ndarray  # (T,) int64
    documents: np.ndarray  # (T,) int64, 0 at the row's first document and rising by one at each start; -1 where padded
    fill: np.ndarray  # (T,) bool: <eos> added to fill a document's last block (ordinary tokens, but no bytes of text)
    blocks: int  # valid blocks; the rest of a short last row is <pad>


class RowSource:
    """The rows of one prepared folder, by number.

    Each document (ended by its `<eos>`) is filled up with `<eos>` to a multiple of `block_length`; the filled documents
    are laid end to end in shard order; row `i` is tokens `[iT, (i+1)T)`. A document cut by a row's end goes on in the
    next row as a document of its own. The last row may be short: it is padded with `<pad>`, and `blocks` says how many
    blocks are valid.

    With `align=False` (a block as long as the row) documents are not filled, and the tokens after the last whole row
    are left out, since a block that is partly padding has no place in the objective.

    Raises InputError for rows that are no multiple of the block, a folder without manifest and damaged shards.
    """

    def __init__(self, folder: str | Path, row_length: int, block_length: int, *, align: bool = True) -> None:
        _check_lengths(row_length, block_length)
        self.manifest = read_manifest(folder)
        self.row_length, self.block_length = row_length, block_length
        shards = [ShardReader(self.manifest.folder / shard.name) for shard in self.manifest.shards]
        self._tokens = [shard.tokens for shard in shards]
        sizes = np.concatenate([shard.sizes for shard in shards]).astype(np.int64)
        filled = -(-sizes // block_length) * block_length if align else sizes
        self._starts = _prefix_sums(filled)  # (documents + 1,) where each document starts in the laid-out tokens
        self._raw_starts = _prefix_sums(sizes)  # (documents + 1,) where it starts in the stored tokens
        self._shard_starts = _prefix_sums(np.array([len(tokens) for tokens in self._tokens]))  # (shards + 1,)
        total = int(self._starts[-1])
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
        high = min(low + self.row_length, int(self._starts[-1]))
        first = int(np.searchsorted(self._starts, low, side="right")) - 1
        last = int(np.searchsorted(self._starts, high, side="left"))  # one past the last document of the row
        edges = np.clip(self._starts[first : last + 1], low, high) - low  # (n + 1,) where documents start in the row
        # A document's stored tokens end before its fill, or where the row ends.
        lengths = np.diff(self._raw_starts[first : last + 1])
        real_ends = np.clip(self._starts[first:last] + lengths, low, high) - low  # (n,)

        documents = np.full(self.row_length, -1, dtype=np.int64)
        documents[: high - low] = np.repeat(np.arange(last - first), np.diff(edges))
        fill = np.zeros(self.row_length, dtype=bool)
        fill[: high - low] = np.arange(high - low) >= np.repeat(real_ends, np.diff(edges))
        tokens = np.full(self.row_length, self.manifest.eos_id, dtype=np.int64)
        tokens[high - low :] = self.manifest.pad_id
        # The stored tokens of a row lie side by side: only fill comes between them.
        raw = int(self._raw_starts[first]) + min(low - int(self._starts[first]), int(lengths[0]))
        real = ~fill
        real[high - low :] = False
        tokens[real] = self._stored(raw, int(real.sum()))
        return Row(tokens, documents, fill, -(-(high - low) // self.block_length))

    def _stored(self, start: int, count: int) -> np.ndarray:
        """Stored tokens [start, start + count) of all shards laid end to end."""
        pieces = []
        shard = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        while count > 0:
            offset = start - int(self._shard_starts[shard])
            piece = self._tokens[shard][offset : offset + count]
            pieces.append(piece)
            start, count, shard = start + len(piece), count - len(piece), shard + 1
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


def _prefix_sums(sizes: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: 0, then the running sum of `sizes` (n,)."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
