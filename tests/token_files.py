"""Token files as other programs write them, for the tests of `adopt`; nothing here uses the code under test."""

import struct
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix: Path, documents, dtype="int32", *, sequences=None, boundaries=None) -> Path:
    """A `.bin`/`.idx` pair; `sequences` cuts each document into several, by number."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    cut = [[part.tolist() for part in np.array_split(d, sequences or 1)] for d in map(np.array, documents)]
    flat = [sequence for document in cut for sequence in document]
    if boundaries is None:
        boundaries = np.cumsum([0, *map(len, cut)])
    sizes = np.array([len(sequence) for sequence in flat], np.int64)
    item = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * item if len(sizes) else sizes
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(flat), len(boundaries))
    body = sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(boundaries, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(header + body)
    tokens = np.array([token for sequence in flat for token in sequence], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    return prefix.with_name(prefix.name + ".bin")


def list_array(documents, value="int32", *, large=False):
    """A pyarrow list array; None is a row without value."""
    import pyarrow as pa

    item = getattr(pa, value)()
    return pa.array(documents, pa.large_list(item) if large else pa.list_(item))


def write_parquet(path: Path, documents, *, value="int32", rows=3, column="input_ids", large=False, **options) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    ids = list_array(documents, value, large=large)
    table = pa.table({"url": [f"u{n}" for n in range(len(documents))], column: ids})
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


def write_arrow(path: Path, documents, *, value="int32", rows=3, stream=True, compression=None) -> Path:
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"input_ids": list_array(documents, value), "n": list(range(len(documents)))})
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in table.to_batches(rows):
            writer.write_batch(batch)
    return path
