"""Owns reading a token file from end to end, whole documents at a time, as `adopt` and `verify` do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.maps import view_file
from mezzotint.data.megatron import MegatronFile, MegatronIndex
from mezzotint.data.tables import LARGEST_GROUP, flat_ids, open_parquet

AT_ONCE = 1 << 20  # tokens of a piece, about
ROWS = 1024  # of a parquet file decoded at once


class Piece(NamedTuple):
    """Whole documents of a file, in order, without the empty ones."""

    tokens: np.ndarray  # (n,) ids of all documents, one after the other
    sizes: np.ndarray  # (documents,) int64 ids of each
    group: int = 0  # parquet row group or arrow record batch
    offset: int = 0  # byte of an arrow file at which the ids start


def megatron_pieces(path: Path, idx_path: Path) -> Iterator[Piece]:
    """The documents of a `.bin`/`.idx` pair, mapped; InputError for an index that contradicts itself."""
    MegatronIndex(idx_path).check()
    file, start = MegatronFile(path, idx_path), 0
    for first in range(0, file.documents, 1 << 16):
        sizes = file.sizes(first, min(first + (1 << 16), file.documents))
        cuts = np.unique(np.cumsum(sizes) // AT_ONCE, return_index=True)[1][1:]
        for part in np.split(sizes, cuts):
            count = int(part.sum())
            yield Piece(file.read(start, count), part)
            start += count


def parquet_pieces(path: Path, column: str) -> Iterator[Piece]:
    """The rows of a parquet file; InputError for a column that is missing or holds no ids, and for huge row groups."""
    file = open_parquet(view_file(path))
    require_ids(path, file.schema_arrow, column)
    for group in range(file.metadata.num_row_groups):
        of_group = file.metadata.row_group(group)
        paths = [of_group.column(i) for i in range(of_group.num_columns)]
        ids = max(part.num_values for part in paths if part.path_in_schema.split(".")[0] == column)
        if ids > LARGEST_GROUP:
            raise InputError(
                f"row group {group} of {path} holds {ids:,} ids, and one row needs a whole group decoded: write it "
                "again in row groups of some 1,000 documents, e.g. pyarrow.parquet.write_table(..., row_group_size=1000)"
            )
        try:
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False):
                lists = batch.column(0)
                sizes = _lengths(lists)
                _require_no_holes(path, lists.flatten())
                yield Piece(flat_ids(lists), sizes[sizes > 0], group)
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or ["damaged"])[0]
            raise InputError(
                f"row group {group} of {path} cannot be read ({reason}): copy or write it again"
            ) from error


def arrow_pieces(path: Path, column: str) -> Iterator[Piece]:
    """The rows of an arrow file, stream or IPC file; InputError also for one whose buffers are compressed."""
    import pyarrow as pa

    if view_file(path).size == 0:
        raise InputError(f"{path} is empty: copy or write it again")
    try:
        with pa.memory_map(str(path)) as source:
            whole = source.read_buffer(source.size())
            source.seek(0)
            reader, batches = _batches(pa, source, whole)
            require_ids(path, reader.schema, column)
            for group, batch in enumerate(batches):
                yield _mapped_piece(path, batch.column(batch.schema.get_field_index(column)), group, whole)
    except pa.ArrowInvalid as error:
        reason = (str(error).splitlines() or ["damaged"])[0]
        raise InputError(f"{path} cannot be read as arrow ({reason}): copy or write it again") from error


def _batches(pa: Any, source: Any, whole: Any) -> tuple[Any, Iterator[Any]]:
    if whole[:6].to_pybytes() == b"ARROW1":
        reader = pa.ipc.open_file(source)
        return reader, (reader.get_batch(i) for i in range(reader.num_record_batches))
    stream = pa.ipc.open_stream(source)
    return stream, iter(stream)


def _mapped_piece(path: Path, lists: Any, group: int, whole: Any) -> Piece:
    """A batch's ids where they lie in the file."""
    sizes = _lengths(lists)
    values = lists.values
    if hasattr(lists, "offsets"):
        first, end = int(lists.offsets[0].as_py()), int(lists.offsets[-1].as_py())
        sizes = np.diff(lists.offsets.to_numpy())  # a missing row may still cover ids
    else:  # fixed-size lists: rows without value cover ids too
        first, end = lists.offset * lists.type.list_size, (lists.offset + len(lists)) * lists.type.list_size
        sizes = np.full(len(lists), lists.type.list_size, np.int64)
    values = values.slice(first, end - first)
    _require_no_holes(path, values)
    if len(values) == 0:
        return Piece(np.zeros(0, np.int64), np.zeros(0, np.int64), group)
    place = values.buffers()[1].address + values.offset * (values.type.bit_width // 8) - whole.address
    if not 0 <= place < whole.size:
        raise InputError(f"{path} is compressed inside, so its ids cannot be mapped: write it uncompressed, or parquet")
    sizes = sizes.astype(np.int64)
    return Piece(values.to_numpy(), sizes[sizes > 0], group, place)


def require_ids(path: Path, schema: Any, column: str) -> None:
    """InputError unless `column` holds lists of integers."""
    import pyarrow as pa

    if column not in schema.names:
        raise InputError(f"{path} has no column {column!r}: its columns are {', '.join(schema.names)}; use --column")
    kind = schema.field(column).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not pa.types.is_integer(kind.value_type):
        raise InputError(f"column {column!r} of {path} holds {kind}, not lists of token ids: use --column")


def _lengths(lists: Any) -> np.ndarray:
    """(rows,) int64 ids of each row; none where the row has no value."""
    import pyarrow.compute as pc

    return pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _require_no_holes(path: Path, values: Any) -> None:
    if values.null_count:
        raise InputError(f"{path} has missing values among its token ids: write it again without them")
