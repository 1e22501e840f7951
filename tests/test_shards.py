"""The shard format byte by byte, and what is said when files or manifests are damaged."""

import json
import struct

import numpy as np
import pytest
from data_support import open_small_tokenizer, write_prepared
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzotint.data.errors import InputError
from mezzotint.data.manifest import check_tokenizer, check_vocabulary, read_manifest
from mezzotint.data.megatron import MegatronFile
from mezzotint.data.shards import ShardWriter, token_dtype

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9), min_size=1, max_size=9)


def write(folder, documents, dtype):
    writer = ShardWriter(folder, "s", dtype)
    for document in documents:
        writer.add(np.array(document), np.array([len(document)]), text_bytes=1)
    return writer.close()


def open_pair(folder):
    return MegatronFile(folder / "s.bin", folder / "s.idx")


@settings(max_examples=25, deadline=None)
@given(documents=DOCUMENTS, dtype=st.sampled_from(["uint16", "int32"]))
def test_documents_come_back(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("shard")
    info = write(folder, documents, dtype)
    reader = open_pair(folder)
    assert reader.read(0, info.tokens).tolist() == [token for document in documents for token in document]
    assert reader.sizes(0, reader.documents).tolist() == [len(document) for document in documents]
    assert reader.read(len(documents[0]), 1).tolist() == [document[0] for document in documents[1:2]]
    assert (info.tokens, info.documents) == (sum(map(len, documents)), len(documents))
    assert info.largest_id == max(map(max, documents))


def test_index_is_megatron_byte_for_byte(tmp_path):
    write(tmp_path, [[5, 6, 7], [8], [9, 10]], "uint16")
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "s.idx").read_bytes() == expected
    assert (tmp_path / "s.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)


def test_dtype_is_the_smallest_that_fits():
    assert [token_dtype(v) for v in (100, 65536, 65537)] == ["uint16", "uint16", "int32"]


def test_nothing_is_visible_before_close_or_after_abandon(tmp_path):
    writer = ShardWriter(tmp_path, "s", "uint16")
    writer.add(np.array([1, 2]), np.array([2]), text_bytes=1)
    assert not list(tmp_path.glob("*.bin")) and not list(tmp_path.glob("*.idx"))
    writer.abandon()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("suffix", "kept"), [("bin", 7), ("bin", 0), ("idx", 50), ("idx", 10)])
def test_truncated_pair_names_file_and_offset(tmp_path, suffix, kept):
    write(tmp_path, [[5, 6, 7], [8], [9, 10]], "uint16")
    path = tmp_path / f"s.{suffix}"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=rf"s\.{suffix} is truncated at byte {kept} of \d+"):
        open_pair(tmp_path)


def test_foreign_index_is_refused(tmp_path):
    write(tmp_path, [[5, 6, 7]], "uint16")
    content = (tmp_path / "s.idx").read_bytes()
    (tmp_path / "s.idx").write_bytes(b"SOMETHING" + content[9:])
    with pytest.raises(InputError, match="no Megatron index"):
        open_pair(tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_manifest_sees_truncated_missing_and_longer_files(tmp_path, suffix):
    folder = write_prepared(tmp_path, [[[4, 1]], [[5, 6, 1]]])
    path = folder / f"part-00001.{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(
        InputError, match=rf"part-00001\.{suffix} is truncated at byte {len(content) - 3} of {len(content)}"
    ):
        read_manifest(folder)
    path.write_bytes(content + b"x")
    with pytest.raises(InputError, match=f"goes on after byte {len(content)}"):
        read_manifest(folder)
    path.unlink()
    with pytest.raises(InputError, match="is missing"):
        read_manifest(folder)


def test_manifest_totals(tmp_path):
    manifest = read_manifest(write_prepared(tmp_path, [[[4, 1], [9, 9, 1]], [[5, 6, 7, 1]]]))
    assert (manifest.tokens, manifest.documents, manifest.bytes, manifest.largest_id) == (9, 3, 6, 9)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert (content["format"], content["tokens"], content["sha256"]) == (2, 9, manifest.sha256)


def test_manifest_hash_follows_content(tmp_path):
    one = read_manifest(write_prepared(tmp_path / "1", [[[4, 1]]])).sha256
    assert one == read_manifest(write_prepared(tmp_path / "2", [[[4, 1]]])).sha256
    assert one != read_manifest(write_prepared(tmp_path / "3", [[[5, 1]]])).sha256
    assert one != read_manifest(write_prepared(tmp_path / "4", [[[4, 1]]], tokenizer="other")).sha256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "format 3, and this version reads up to 2"),
        ({"format": None}, "format None"),
        ({"shards": []}, "lists no shard"),
        ({"shards": [{"name": "x"}]}, "damaged"),
    ],
)
def test_manifest_refusals(tmp_path, change, words):
    path = write_prepared(tmp_path, [[[4, 1]]]) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=words):
        read_manifest(tmp_path)


def test_folder_without_manifest(tmp_path):
    with pytest.raises(InputError, match="no prepared folder: it has no"):
        read_manifest(tmp_path)
    write_prepared(tmp_path / "train", [[[4, 1]]])
    with pytest.raises(InputError, match="its train/ or heldout/ is"):
        read_manifest(tmp_path)


def test_vocabulary_smaller_than_an_id(tmp_path):
    manifest = read_manifest(write_prepared(tmp_path, [[[4, 1]], [[57, 1]]], vocab_size=60))
    check_vocabulary(manifest, 60)
    with pytest.raises(InputError, match=r"part-00001\.bin holds token id 57, but the vocabulary has only 57"):
        check_vocabulary(manifest, 57)
    with pytest.raises(
        InputError, match="has 60 ids"
    ):  # no shard holds the last ids, but a control id may be among them
        check_vocabulary(manifest, 59)


def test_tokenizer_that_did_not_make_the_shards(tmp_path):
    tokenizer = open_small_tokenizer(tmp_path / "tok")
    check_tokenizer(read_manifest(write_prepared(tmp_path / "a", [[[4, 1]]], tokenizer=tokenizer.sha256)), tokenizer)
    with pytest.raises(InputError, match="did not make the shards"):
        check_tokenizer(read_manifest(write_prepared(tmp_path / "b", [[[4, 1]]])), tokenizer)
