"""Rows found by prefix sums equal rows built literally, token by token, from the sentence in the design."""

import os
import tempfile
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from data_support import write_prepared
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzotint.data.errors import InputError
from mezzotint.data.maps import OPEN_FILES
from mezzotint.data.rows import RowSource
from mezzotint.data.spans import STEP

EOS, PAD = 1, 0


def literal_rows(documents, row_length, block_length, align):
    """(tokens, documents, fill, blocks) of every row, one token at a time."""
    laid_out = []  # (token, document, fill)
    for number, document in enumerate(documents):
        laid_out += [(token, number, False) for token in document]
        while align and len(laid_out) % block_length:
            laid_out.append((EOS, number, True))
    rows = []
    for start in range(0, len(laid_out), row_length):
        piece = laid_out[start : start + row_length]
        if len(piece) < row_length and not align:
            break
        first = piece[0][1]
        short = row_length - len(piece)
        rows.append(
            (
                [token for token, _, _ in piece] + [PAD] * short,
                [number - first for _, number, _ in piece] + [-1] * short,
                [fill for _, _, fill in piece] + [False] * short,
                -(-len(piece) // block_length),
            )
        )
    return rows


def source_of(shards, row_length, block_length, align=True):
    """A RowSource over a folder that goes with it."""
    folder = tempfile.TemporaryDirectory()
    source = RowSource(write_prepared(Path(folder.name), shards), row_length, block_length, align=align)
    weakref.finalize(source, folder.cleanup)
    return source


SHARDS = st.lists(
    st.lists(st.lists(st.integers(4, 99), max_size=20).map(lambda ids: [*ids, EOS]), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    shards=SHARDS,
    block_length=st.sampled_from([1, 2, 3, 4, 8]),
    blocks=st.integers(1, 6),
    align=st.booleans(),
    step=st.sampled_from([1, 2, 3, 256]),
)
def test_rows_equal_the_literal_builder(shards, block_length, blocks, align, step):
    with mock.patch("mezzotint.data.spans.STEP", step), mock.patch("mezzotint.data.spans.AT_ONCE", 2 * step):
        check_rows(shards, block_length, blocks, align)


def check_rows(shards, block_length, blocks, align):
    row_length = block_length * blocks
    expected = literal_rows([document for shard in shards for document in shard], row_length, block_length, align)
    if not expected:
        with pytest.raises(InputError, match="less than one row"):
            source_of(shards, row_length, block_length, align)
        return
    source = source_of(shards, row_length, block_length, align)
    assert len(source) == len(expected)
    for i, (tokens, documents, fill, valid) in enumerate(expected):
        row = source[i]
        assert (row.tokens.tolist(), row.documents.tolist(), row.fill.tolist(), row.blocks) == (
            tokens,
            documents,
            fill,
            valid,
        )
        assert (row.tokens.dtype, row.documents.dtype, row.fill.dtype) == (np.int64, np.int64, np.bool_)


@settings(max_examples=50, deadline=None)
@given(shards=SHARDS, block_length=st.sampled_from([2, 4]), blocks=st.integers(1, 5))
def test_no_token_is_lost_and_no_block_holds_two_documents(shards, block_length, blocks):
    source = source_of(shards, block_length * blocks, block_length)
    rows = [source[i] for i in range(len(source))]
    kept = [row.tokens[~row.fill & (row.documents >= 0)] for row in rows]
    assert np.concatenate(kept).tolist() == [t for shard in shards for document in shard for t in document]
    for row in rows:
        of_block = row.documents.reshape(-1, block_length)
        assert (of_block == of_block[:, :1]).all()
        assert ((of_block[:, 0] >= 0) == (np.arange(len(of_block)) < row.blocks)).all()


def test_a_cut_document_goes_on_as_its_own():
    source = source_of([[[10, 11, 12, 13, 14, EOS], [20, EOS]]], 4, 2)
    assert [source[i].tokens.tolist() for i in range(2)] == [[10, 11, 12, 13], [14, EOS, 20, EOS]]
    assert [source[i].documents.tolist() for i in range(2)] == [[0, 0, 0, 0], [0, 0, 1, 1]]


def test_fill_begins_after_the_true_end():
    row = source_of([[[10, EOS], [20, 21, 22, 23, EOS]]], 12, 4)[0]
    assert row.tokens.tolist() == [10, EOS, EOS, EOS, 20, 21, 22, 23, EOS, EOS, EOS, EOS]
    assert row.fill.tolist() == [False, False, True, True, False, False, False, False, False, True, True, True]
    assert row.blocks == 3


@pytest.mark.parametrize("i", [-1, 2])
def test_rows_outside_are_refused(i):
    source = source_of([[[10, 11, 12, EOS]]], 2, 2)
    with pytest.raises(IndexError):
        source[i]


def test_row_no_multiple_of_the_block():
    with pytest.raises(InputError, match="row_length 100 is no multiple of block_length 32: set row_length to 96"):
        source_of([[[10, EOS]]], 100, 32)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_more_shards_than_files_may_be_open(tmp_path):
    """Each mapped file holds a descriptor; a process has some 1024 of them."""
    folder = write_prepared(tmp_path, [[[10 + n % 80, 11, 12, EOS]] for n in range(OPEN_FILES)])
    source = RowSource(folder, 8, 4)
    assert [source[n].tokens[0] for n in range(len(source))] == [10 + 2 * n % 80 for n in range(len(source))]
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_open(fd)]
    assert sum(str(tmp_path) in path for path in held) <= OPEN_FILES


def fd_is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_index_in_memory_is_coarse():
    """What grows with the documents is 32 bytes for each STEP of them."""
    source = source_of([[[10, EOS]] * 5000, [[11, 12, EOS]] * 3000], 8, 4)
    spans = source._spans
    entries = -(-5000 // STEP) - (-3000 // STEP)
    arrays = [value for value in vars(spans).values() if isinstance(value, np.ndarray)]
    assert len(arrays) == 4 and all(len(array) <= entries + 1 for array in arrays)


def test_truncated_shard_names_file_and_offset(tmp_path):
    folder = write_prepared(tmp_path, [[[10, 11, 12, EOS]]])
    path = folder / "part-00000.bin"
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(InputError, match=r"part-00000\.bin is truncated at byte 5 of 8"):
        RowSource(folder, 2, 2)
