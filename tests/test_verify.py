"""Damage of every kind is named with file and offset, and `inspect` shows rows as they are."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_support import small_tokenizer
from token_files import write_arrow, write_megatron, write_parquet

from mezzotint.data.__main__ import main
from mezzotint.data.adopt import AdoptConfig, adopt
from mezzotint.data.digest import Digest, digest_of, first_difference
from mezzotint.data.manifest import Manifest, read_manifest
from mezzotint.data.shards import ShardWriter
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.verify import verify

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer):
    """A prepared folder of three shards of 40 documents, two of them of one size; blocks of CRCs are 64 bytes long."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mezzotint.data.digest.BLOCK", 64)
        write(folder, tokenizer)
    return folder


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr("mezzotint.data.digest.BLOCK", 64)
    monkeypatch.setattr("mezzotint.data.verify.BLOCK", 64)


def documents_of(shard, size=9):
    return [[*(4 + (shard * 31 + n * 7 + k) % 120 for k in range(size)), EOS] for n in range(40)]


def write(folder, tokenizer, sizes=(9, 9, 11)):
    opened = load_tokenizer(tokenizer)
    infos = []
    for n, size in enumerate(sizes):
        writer = ShardWriter(folder, f"part-{n:05d}", "uint16")
        for document in documents_of(n, size):
            ids = np.array(document)
            writer.add(ids, np.array([len(ids)]), text_bytes=int(opened.token_bytes[ids].sum()))
        infos.append(writer.close())
    shutil.copy(tokenizer / "tokenizer.model", folder / "tokenizer.model")
    Manifest(
        folder=folder,
        source="test",
        dtype="uint16",
        vocab_size=opened.vocab_size,
        mask_id=opened.mask_id,
        eos_id=opened.eos_id,
        pad_id=opened.pad_id,
        tokenizer="tokenizer.model",
        tokenizer_sha256=opened.sha256,
        shards=tuple(infos),
    ).write()


def copy_of(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "data"))


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x20
    path.write_bytes(content)


def command(*arguments):
    """(exit code, standard output, lines of standard error)"""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), errors.getvalue().splitlines()


def test_whole_folder_is_right(whole):
    code, said, errors = command("verify", whole)
    assert (code, errors) == (0, []) and "sizes, hashes, ids and indexes are right" in said
    assert "1,280 tokens in 120 documents" in said


@pytest.mark.parametrize(
    ("name", "byte", "places"),
    [("part-00001.bin", 0, "0 and 64"), ("part-00001.bin", 799, "768 and 800"), ("part-00002.idx", 300, "256 and 320")],
)
def test_flipped_byte_is_named_by_file_and_block(whole, tmp_path, name, byte, places):
    folder = copy_of(whole, tmp_path)
    flip(folder / name, byte)
    code, said, errors = command("verify", folder)
    assert (code, said) == (2, "")
    assert len(errors) == 1 and f"{name} is not what was written: it first differs between bytes {places}" in errors[0]
    read_manifest(folder)  # sizes alone do not see it


@pytest.mark.parametrize("name", ["part-00000.bin", "part-00002.idx"])
@pytest.mark.parametrize("kept", [0, 1, 64, 777])
def test_truncated_file_is_named_by_file_and_byte(whole, tmp_path, name, kept):
    folder = copy_of(whole, tmp_path)
    size = (folder / name).stat().st_size
    (folder / name).write_bytes((folder / name).read_bytes()[:kept])
    assert [
        name in line and f"truncated at byte {kept} of {size}" in line for line in command("verify", folder)[2]
    ] == [True]


def test_longer_missing_and_truncated_after_a_flip(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    with open(folder / "part-00000.bin", "ab") as file:
        file.write(b"x")
    (folder / "part-00001.idx").unlink()
    path = folder / "part-00002.bin"
    flip(path, 70)
    path.write_bytes(path.read_bytes()[:-100])
    errors = command("verify", folder)[2]
    assert len(errors) == 3
    assert "part-00000.bin goes on after byte 800, to 801" in errors[0]
    assert "part-00001.idx is missing" in errors[1]
    assert "part-00002.bin is not what was written: it first differs between bytes 64 and 128, and has 860" in errors[2]


def test_swapped_files_are_named_with_whose_they_are(whole, tmp_path):
    """Two of one size, which sizes cannot tell, and two of different sizes."""
    folder = copy_of(whole, tmp_path)
    for one, two in (("part-00000.bin", "part-00001.bin"), ("part-00001.idx", "part-00002.idx")):
        (folder / one).rename(folder / "x")
        (folder / two).rename(folder / one)
        (folder / "x").rename(folder / two)
    errors = command("verify", folder)[2]
    # the first two indexes are alike, so either may be named
    assert "part-00000.bin holds what belongs to" in errors[0] and "part-00001.bin, from byte 0 on" in errors[0]
    assert f"what belongs to it is in {folder / 'part-00001.bin'}" in errors[0]
    assert any("part-00001.bin holds what belongs to" in line and "part-00000.bin" in line for line in errors)
    assert any("part-00001.idx holds what belongs to" in line and "part-00002.idx, from" in line for line in errors)
    assert len(errors) == 4


def test_copied_over_file_is_named_and_its_own_is_gone(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    shutil.copy(folder / "part-00002.bin", folder / "part-00000.bin")
    errors = command("verify", folder)[2]
    assert len(errors) == 1 and "its own is in none of the folder's files" in errors[0]


def test_manifest_or_tokenizer_that_was_changed(whole, tmp_path, tokenizer):
    folder = copy_of(whole, tmp_path)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | {"sha256": "0"}))
    assert "the hashes in" in command("verify", folder)[2][0]
    content["shards"][1]["bytes"] += 1
    (folder / "manifest.json").write_text(json.dumps(content))
    assert "part-00001.bin has bytes 360" in command("verify", folder)[2][0]
    (folder / "tokenizer.model").unlink()
    assert "no tokenizer at" in command("verify", folder)[2][0]


def rewrite_index(folder, change):
    """Rewrite a shard as `change(tokens, sizes)` and its hashes with it: content that no hash finds wrong."""
    from mezzotint.data.megatron import index_bytes

    content = json.loads((folder / "manifest.json").read_text())
    shard = content["shards"][0]
    tokens = np.fromfile(folder / "part-00000.bin", np.uint16)
    sizes = np.full(40, 10)
    change(tokens, sizes)
    tokens.tofile(folder / "part-00000.bin")
    (folder / "part-00000.idx").write_bytes(index_bytes(sizes, "uint16"))
    for suffix in ("bin", "idx"):
        digest = digest_of(folder / f"part-00000.{suffix}")
        shard |= {f"{suffix}_sha256": digest.sha256, f"{suffix}_blocks": digest.blocks}
    (folder / "manifest.json").write_text(json.dumps(content))
    content["sha256"] = read_manifest(folder).sha256
    (folder / "manifest.json").write_text(json.dumps(content))


def test_index_that_does_not_fit_the_content(whole, tmp_path):
    folder = copy_of(whole, tmp_path)

    def move_boundary(tokens, sizes):
        sizes[3:5] = (11, 9)

    rewrite_index(folder, move_boundary)
    assert "<eos> where no document ends" in command("verify", folder)[2][0]


def test_ids_outside_the_vocabulary(whole, tmp_path):
    folder = copy_of(whole, tmp_path)

    def large(tokens, sizes):
        tokens[25] = 5000

    rewrite_index(folder, large)
    assert "part-00000.bin holds token id 5000 in document 2" in command("verify", folder)[2][0]


def test_format_1_without_blocks_still_names_the_file_and_the_byte_of_an_index(whole, tmp_path):
    folder = copy_of(whole, tmp_path)
    content = json.loads((folder / "manifest.json").read_text()) | {"format": 1}
    for shard in content["shards"]:
        del shard["bin_blocks"], shard["idx_blocks"]
    (folder / "manifest.json").write_text(json.dumps(content))
    assert command("verify", folder)[0] == 0
    flip(folder / "part-00000.bin", 5)
    flip(folder / "part-00001.idx", 34 + 4 * 40 + 8 * 7)
    errors = command("verify", folder)[2]
    assert "part-00000.bin is not what was written (at a byte that cannot be told)" in errors[0]
    assert any(f"part-00001.idx is wrong at byte {34 + 4 * 40 + 8 * 7}" in line for line in errors)


def test_train_and_heldout_are_both_checked(whole, tmp_path):
    for split in ("train", "heldout"):
        shutil.copytree(whole, tmp_path / "both" / split)
    code, said, _ = command("verify", tmp_path / "both")
    assert code == 0 and len(said.splitlines()) == 2
    flip(tmp_path / "both" / "heldout" / "part-00000.bin", 3)
    code, said, errors = command("verify", tmp_path / "both")
    assert code == 2 and len(said.splitlines()) == 1 and "heldout/part-00000.bin" in errors[0]
    assert command("verify", tmp_path / "nothing")[0] == 2


@pytest.mark.parametrize("kind", ["megatron", "parquet", "arrow"])
def test_damage_of_adopted_files_is_named(tmp_path, tokenizer, kind):
    documents = documents_of(0)
    if kind == "megatron":
        path = write_megatron(tmp_path / "x", documents, "uint16", sequences=2)
    elif kind == "parquet":
        path = write_parquet(tmp_path / "x.parquet", documents, rows=7)
    else:
        path = write_arrow(tmp_path / "x.arrow", documents, rows=7)
    adopt(AdoptConfig(inputs=(str(path),), tokenizer=str(tokenizer), out=str(tmp_path / "out")))
    assert command("verify", tmp_path / "out")[0] == 0
    size = path.stat().st_size
    flip(path, size // 2)
    start = size // 2 // 64 * 64
    errors = command("verify", tmp_path / "out")[2]
    assert (
        len(errors) == 1 and f"{path} is not what was written: it first differs between bytes {start} and" in errors[0]
    )
    flip(path, size // 2)
    index = path.with_suffix(".idx") if kind == "megatron" else tmp_path / "out" / "part-00000.sizes"
    flip(index, 100)
    errors = command("verify", tmp_path / "out")[2]
    assert len(errors) == 1 and f"{index} is not what was written: it first differs between bytes 64" in errors[0]


def test_digest_does_not_depend_on_the_pieces(monkeypatch):
    content = bytes(range(256)) * 3
    whole, pieces = Digest(), Digest()
    whole.update(content)
    for start in range(0, len(content), 7):
        pieces.update(content[start : start + 7])
    assert (whole.sha256, whole.blocks) == (pieces.sha256, pieces.blocks) and len(whole.blocks) == 8 * 12
    assert first_difference(whole.blocks, whole.blocks) is None
    assert first_difference(whole.blocks[:-8], whole.blocks) == 11 * 64


def test_verify_is_a_function_too(whole):
    assert verify(whole).problems == [] and verify(whole).manifest.tokens == 1280


def write_text_rows(folder, tokenizer):
    """Documents of text: `ab\\n`, a long one and one that holds a bell."""
    opened = load_tokenizer(tokenizer)
    texts = ["ab\n", "The quick brown fox jumps over the lazy dog; " * 2, "x\x07\u2028y"]
    documents = [[*opened.encode(text), opened.eos_id] for text in texts]
    path = write_megatron(folder / "x", documents, "uint16")
    adopt(AdoptConfig(inputs=(str(path),), tokenizer=str(tokenizer), out=str(folder / "out")))
    return folder / "out", [len(document) for document in documents]


def test_inspect_shows_blocks_documents_fill_and_padding(tmp_path, tokenizer):
    folder, sizes = write_text_rows(tmp_path, tokenizer)
    code, said, _ = command("inspect", folder, "--rows", 99, "--row-length", 24, "--block", 4)
    lines = said.splitlines()
    assert code == 0 and "\x1b" not in said and "\x07" not in said
    assert lines[0].startswith("row 0 of ") and "24 tokens, 6 blocks of 4, 2 documents" in lines[0]
    assert lines[1] == "-- document 0 --" and lines[2].split() == ["0", "0", "ab\\n⟨eos⟩"]
    assert lines[3] == "-- document 1 --"
    assert any(line == "-- document 0 (goes on from the row before) --" for line in lines)
    fills = sum(int(part.split("⟩")[0]) for part in said.split("⟨fill x ")[1:])
    pads = sum(int(part.split("⟩")[0]) for part in said.split("⟨pad x ")[1:])
    rows = sum(line.startswith("row ") for line in lines)
    assert fills == sum(-size % 4 for size in sizes) and pads == rows * 24 - sum(sizes) - fills > 0
    assert "\\x07" in said and said.count("⟨eos⟩") == 3
    assert "x\\x07\\u2028y⟨eos⟩" in command("inspect", folder, "--row", 1, "--row-length", 96, "--block", 16)[1]
    text = "".join(line[15:] for line in lines if line[:1] == " ")
    assert "The quick brown fox" in text


def test_inspect_with_a_block_as_long_as_the_row(tmp_path, tokenizer):
    folder, _ = write_text_rows(tmp_path, tokenizer)
    said = command("inspect", folder, "--row-length", 12, "--block", "row")[1]
    assert "1 block of 12" in said and "fill x" not in said and "-- document 1 --" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--row", 99), "has no row 99: at this length its rows are 0 to"),
        (("--row", -1), "has no row -1"),
        (("--rows", 0), "--rows is 0"),
        (("--block", 5), "row_length 16 is no multiple of block_length 5"),
        (("--block", "x"), "--block is 'x'"),
        (("--row-length", 100000, "--block", "row"), "less than one row of 100000"),
    ],
)
def test_inspect_refuses_in_a_sentence(tmp_path, tokenizer, options, words):
    folder, _ = write_text_rows(tmp_path, tokenizer)
    code, said, errors = command("inspect", folder, "--row-length", 16, "--block", 4, *options)
    assert (code, said, len(errors)) == (2, "", 1) and words in errors[0]


def test_inspect_into_a_pipe_that_closes(tmp_path, tokenizer):
    folder, _ = write_text_rows(tmp_path, tokenizer)
    options = "--rows 99 --row-length 4 --block 1"
    for reader, shown in (("head -1", "row 0 of"), ("true", "")):
        script = f"{sys.executable} -m mezzotint.data inspect {folder} {options} | {reader}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(shown) and done.stderr == ""
