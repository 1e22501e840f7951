"""Owns random access to the ids in parquet and arrow files: row groups decoded into a small cache, batches mapped."""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.maps import FileView, view_file
from mezzotint.data.shards import ShardInfo, token_dtype

CACHE_TOKENS = 36 << 20  # decoded tokens kept (72 or 144 MiB): two windows of the order, see `order`
LARGEST_GROUP = 1 << 25  # tokens of a row group that are still decoded to read one row
OPEN_PARQUET = 16  # files whose footers are kept

Sizes = np.dtype("<i4")


class GroupCache:
    """The decoded row groups that were used last, of all parquet files of one folder, up to CACHE_TOKENS tokens."""

    def __init__(self, limit: int = CACHE_TOKENS) -> None:
        self._limit, self._held = limit, 0
        self._groups: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._lock = threading.Lock()  # the prefetching thread reads, and so may the main one

    def get(self, key: tuple[str, int], decode: Callable[[], np.ndarray]) -> np.ndarray:
        """The tokens of row group `key`, decoded when they are not at hand."""
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
                return self._groups[key]
            tokens = self._groups[key] = decode()
            self._held += len(tokens)
            while self._held > self._limit and len(self._groups) > 1:
                self._held -= len(self._groups.popitem(last=False)[1])
            return tokens


class _Grouped(ABC):
    """Sizes of documents in a file of their own, and the groups that the tokens come in."""

    def __init__(self, sizes_path: Path, shard: ShardInfo) -> None:
        self.documents, self.adds_eos = shard.documents, shard.adds_eos
        self._sizes = view_file(sizes_path)
        self._shard = shard
        self._known_starts: np.ndarray | None = None

    def sizes(self, first: int, last: int) -> np.ndarray:
        return self._sizes.array(Sizes, Sizes.itemsize * first, last - first).astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        starts = self._group_starts()
        group = int(np.searchsorted(starts, start, side="right")) - 1
        pieces = []
        while count > 0:
            take = min(count, int(starts[group + 1]) - start)
            pieces.append(self._read_group(group, start - int(starts[group]), take))
            start, count, group = start + take, count - take, group + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _group_starts(self) -> np.ndarray:
        """(groups + 1,) int64: stored tokens before each group; found when the file is first read."""
        if self._known_starts is None:
            documents = np.cumsum([0, *self._shard.groups])
            before = np.concatenate([[0], np.cumsum(self.sizes(0, self.documents))])
            self._known_starts = before[documents]
        return self._known_starts

    @abstractmethod
    def _read_group(self, group: int, offset: int, count: int) -> np.ndarray:
        """(count,) ids of row group `group`, from its `offset`-th on."""


class ParquetFile(_Grouped):
    """A parquet file with a column of ids, as a `TokenFile`: one document a row, empty rows left out."""

    def __init__(self, path: Path, sizes_path: Path, shard: ShardInfo, cache: GroupCache) -> None:
        super().__init__(sizes_path, shard)
        self._view, self._cache = view_file(path), cache
        self._dtype = np.dtype(token_dtype(max(shard.largest_id, shard.end_id) + 1))

    def _read_group(self, group: int, offset: int, count: int) -> np.ndarray:
        tokens = self._cache.get((self._view.path, group), lambda: self._decode(group))
        return tokens[offset : offset + count]

    def _decode(self, group: int) -> np.ndarray:
        """(n,) ids of a row group, of the smallest dtype; InputError when it cannot be decoded or is another length."""
        try:
            column = open_parquet(self._view).read_row_group(group, columns=[self._shard.column], use_threads=False)
            tokens = flat_ids(column.column(0)).astype(self._dtype)
        except (OSError, ValueError) as error:
            raise _damaged(self._view.path, group, str(error)) from error
        starts = self._group_starts()
        if len(tokens) != starts[group + 1] - starts[group]:
            raise _damaged(self._view.path, group, f"it has {len(tokens)} ids")
        return tokens


class ArrowFile(_Grouped):
    """An arrow file (stream or IPC file, not compressed) as a `TokenFile`: ids are mapped where they lie."""

    def __init__(self, path: Path, sizes_path: Path, shard: ShardInfo) -> None:
        super().__init__(sizes_path, shard)
        self._view, self._dtype = view_file(path), np.dtype(shard.dtype)

    def _read_group(self, group: int, offset: int, count: int) -> np.ndarray:
        place = self._shard.offsets[group] + offset * self._dtype.itemsize
        return self._view.array(self._dtype, place, count).astype(np.int64, copy=False)


@lru_cache(maxsize=OPEN_PARQUET)
def open_parquet(view: FileView) -> Any:
    """The opened parquet file; InputError when it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(view.path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{view.path} is no parquet file, or a damaged one: copy or write it again") from error


def flat_ids(column: Any) -> np.ndarray:
    """(n,) the ids of all rows of a list column (a pyarrow ChunkedArray or Array), one after the other."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, parts[0].dtype if parts else np.int32)])


def _damaged(path: str, group: int, reason: str) -> InputError:
    return InputError(
        f"row group {group} of {path} cannot be read ({reason.splitlines()[0] if reason else 'damaged'}): "
        "see `mezzotint-data verify`, then copy or write the file again"
    )
