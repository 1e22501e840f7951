"""Token files made elsewhere give the same rows as shards of our own, and what cannot be read rightly is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from data_support import small_tokenizer, write_prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_arrow, write_megatron, write_parquet

from mezzotint.data.__main__ import main
from mezzotint.data.adopt import AdoptConfig, adopt
from mezzotint.data.errors import InputError
from mezzotint.data.loader import DataConfig, Loader
from mezzotint.data.manifest import read_manifest
from mezzotint.data.maps import _mapped
from mezzotint.data.megatron import DTYPES
from mezzotint.data.rows import RowSource
from mezzotint.data.shards import ShardInfo
from mezzotint.data.tables import GroupCache, ParquetFile
from mezzotint.data.token_file import EndsRenamed
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.workspace import Workspace

EOS = 1
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(small_tokenizer(tmp_path_factory.mktemp("tok")))


def documents_of(lengths, first=0, top=124):
    """Documents of these lengths, no two tokens in a row alike, without any <eos>."""
    ids = iter(range(first, 10**9))
    return [[4 + next(ids) % (top - 4) for _ in range(length)] for length in lengths]


def adopted(tokenizer, out, *inputs, **options):
    return adopt(AdoptConfig(inputs=tuple(map(str, inputs)), tokenizer=tokenizer, out=str(out), **options))


def assert_rows(folder, own, row_length=8, block_length=4):
    """Both folders give the same rows, aligned and not."""
    for align in (True, False):
        one, two = (RowSource(f, row_length, block_length, align=align) for f in (folder, own))
        assert len(one) == len(two)
        for n in range(len(one)):
            for name, value in vars(two[n]).items():
                assert np.array_equal(vars(one[n])[name], value), (align, n, name)


def write_kind(kind, path: Path, documents):
    """One of the formats, in an odd way: the file or folder to adopt."""
    if kind in DTYPES.values():
        return write_megatron(path, documents, kind)
    if kind == "sequences":
        return write_megatron(path, documents, "uint16", sequences=3)
    if kind == "no documents":  # a writer that never ended one
        return write_megatron(path, documents, "int64", boundaries=[0])
    if kind == "parquet":
        return write_parquet(path.with_suffix(".parquet"), [d or None for d in documents])
    if kind == "large parquet":
        return write_parquet(path.with_suffix(".parquet"), documents, value="int64", large=True, rows=2)
    if kind == "saved":
        import datasets

        table = datasets.Dataset.from_dict({"input_ids": documents})
        datasets.DatasetDict({"train": table, "other": table.select([0])}).save_to_disk(str(path))
        return path
    return write_arrow(path.with_suffix(".arrow"), documents, value="uint16", stream=kind == "arrow stream")


KINDS = [
    *DTYPES.values(),
    "sequences",
    "no documents",
    "parquet",
    "large parquet",
    "arrow stream",
    "arrow file",
    "saved",
]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_rows_of_our_own_shards(tmp_path, tokenizer, kind, ended):
    """Documents that end with <eos> in the file, and documents that get one as they are read; empty ones are left out."""
    lengths = [3, 0, 8, 1, 0, 0, 17, 4, 2, 30, 7] if kind != "no documents" else [3, 8, 1, 17, 4, 2, 30, 7]
    documents = documents_of(lengths)
    with_end = [[*document, EOS] for document in documents if document]
    written = [[*document, EOS] if document else [] for document in documents] if ended else documents
    manifest = adopted(tokenizer, tmp_path / "out", write_kind(kind, tmp_path / "there" / "x", written))
    assert_rows(tmp_path / "out", write_prepared(tmp_path / "own", [with_end]))
    assert (manifest.documents, manifest.tokens) == (len(with_end), sum(map(len, with_end)))
    token_bytes = load_tokenizer(tokenizer).token_bytes
    assert manifest.bytes == sum(int(token_bytes[d].sum()) for d in documents if d)
    assert main(["verify", str(tmp_path / "out")]) == 0


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    kind=st.sampled_from(["sequences", "parquet", "arrow file"]),
    ended=st.booleans(),
    block=st.sampled_from([1, 2, 4]),
)
def test_several_files_in_any_shape(tmp_path_factory, tokenizer, lengths, kind, ended, block):
    root = tmp_path_factory.mktemp("shapes")
    files = [documents_of([*of_file, 9], first=50 * n) for n, of_file in enumerate(lengths)]  # one row of 8 at least
    own = [[[*document, EOS] for document in file if document] for file in files]
    for n, file in enumerate(files):
        written = [[*document, EOS] if document else [] for document in file] if ended else file
        write_kind(kind, root / "there" / f"x{n}", written)
    adopted(tokenizer, root / "out", root / "there")
    assert_rows(root / "out", write_prepared(root / "own", own), row_length=2 * block, block_length=block)


def test_nothing_is_copied_and_files_may_be_given_one_by_one(tmp_path, tokenizer):
    paths = [write_megatron(tmp_path / name, documents_of([9, 4]), "uint16") for name in ("b.v1", "a")]
    adopted(tokenizer, tmp_path / "out", paths[0].with_suffix(".idx"), tmp_path / "a")
    there = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert there == ["adopt.json", "manifest.json", "tokenizer.model"]
    assert [shard.path for shard in read_manifest(tmp_path / "out").shards] == [str(path) for path in paths]


def test_links_are_followed_and_named_as_they_are(tmp_path, tokenizer):
    """A hub's cache keeps contents under names without suffix, with links to them."""
    path = write_parquet(tmp_path / "there" / "x.parquet", documents_of([9, 4]))
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    adopted(tokenizer, tmp_path / "out", tmp_path / "there")
    assert read_manifest(tmp_path / "out").shards[0].path == str(path)
    (tmp_path / "there" / "y.parquet").symlink_to(tmp_path / "blob")
    with pytest.raises(InputError, match="is named twice"):
        adopted(tokenizer, tmp_path / "twice", tmp_path / "there")


def test_end_of_text_of_another_vocabulary_is_read_as_eos(tmp_path, tokenizer):
    """Id 2, which no text produces, ends the documents: refused at first, then read as <eos>, or kept."""
    documents = documents_of([5, 6, 3])
    path = write_megatron(tmp_path / "x", [[*document, 2] for document in documents], "uint16")
    with pytest.raises(InputError, match=r"ends with id 2 .*give --end-id 2"):
        adopted(tokenizer, tmp_path / "out", path)
    assert not (tmp_path / "out").exists()
    adopted(tokenizer, tmp_path / "out", path, end_id=2)
    assert_rows(tmp_path / "out", write_prepared(tmp_path / "own", [[[*d, EOS] for d in documents]]))
    adopted(tokenizer, tmp_path / "added", path, eos="add")
    assert_rows(tmp_path / "added", write_prepared(tmp_path / "both", [[[*d, 2, EOS] for d in documents]]))
    with pytest.raises(InputError, match=r"no document of .* ends with id 9"):
        adopted(tokenizer, tmp_path / "other", path, end_id=9)
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_mixed_endings_are_refused_or_taken_by_a_flag(tmp_path, tokenizer):
    one, two = documents_of([5, 6])
    path = write_parquet(tmp_path / "x.parquet", [[*one, EOS], two])
    with pytest.raises(InputError, match=r"document 0 of .*x\.parquet ends with <eos> and document 1 does not"):
        adopted(tokenizer, tmp_path / "out", path)
    adopted(tokenizer, tmp_path / "kept", path, eos="keep")
    row = RowSource(tmp_path / "kept", 16, 8)[0]
    assert row.tokens.tolist() == [*one, EOS, EOS, EOS, *two, EOS, EOS]
    adopted(tokenizer, tmp_path / "added", path, eos="add")
    assert_rows(tmp_path / "added", write_prepared(tmp_path / "own", [[[*one, EOS, EOS], [*two, EOS]]]))


def bad_files(folder: Path):
    """name: (path, options, words of the sentence)"""
    good = documents_of([5, 6])
    (folder / "text.txt").write_text("a")
    (folder / "nothing").mkdir()
    (folder / "broken.parquet").write_bytes(b"PAR1 no parquet")
    (folder / "broken.arrow").write_bytes(b"no arrow at all")
    write_megatron(folder / "both" / "a", good)
    write_parquet(folder / "both" / "b.parquet", good)
    alone = write_megatron(folder / "alone", good)
    alone.with_suffix(".idx").unlink()
    short = write_megatron(folder / "short", good)
    short.write_bytes(short.read_bytes()[:-3])
    floats = write_megatron(folder / "floats", good)
    content = bytearray(floats.with_suffix(".idx").read_bytes())
    content[17] = 7
    floats.with_suffix(".idx").write_bytes(content)
    pointers = write_megatron(folder / "pointers", good)
    content = bytearray(pointers.with_suffix(".idx").read_bytes())
    content[34 + 8 + 8] += 4
    pointers.with_suffix(".idx").write_bytes(content)
    ends = write_megatron(folder / "ends", good, boundaries=[0, 2, 1])
    return {
        "missing": (folder / "none.bin", {}, "no file or folder"),
        "foreign": (folder / "text.txt", {}, "is no token file"),
        "empty folder": (folder / "nothing", {}, "there are no token files in"),
        "both": (folder / "both", {}, "hold both megatron and parquet files: choose with --pattern"),
        "no index": (alone, {}, "alone.idx is missing"),
        "truncated": (short, {}, "short.bin is truncated at byte 41 of 44"),
        "floats": (floats, {}, "has tokens of dtype code 7"),
        "pointers": (pointers, {}, "pointers.idx is wrong at byte 50"),
        "boundaries": (ends, {}, "ends.idx is wrong at byte 74: document boundaries do not rise"),
        "broken parquet": (folder / "broken.parquet", {}, "broken.parquet is no parquet file"),
        "broken arrow": (folder / "broken.arrow", {}, "broken.arrow cannot be read as arrow"),
        "column": (
            write_parquet(folder / "c.parquet", good, column="ids"),
            {},
            "no column 'input_ids': its columns are",
        ),
        "no list": (folder / "c.parquet", {"column": "url"}, "holds string, not lists of token ids"),
        "too large": (write_megatron(folder / "large", [[5, 400, EOS]]), {}, "holds token id 400 in document 0"),
        "negative": (write_megatron(folder / "minus", [[5], [7, -2]]), {}, "holds token id -2 in document 1"),
        "mask": (write_megatron(folder / "mask", [[5, 6], [3, 8]]), {}, "holds <mask> (id 3) in document 1"),
        "padding": (write_megatron(folder / "pad", [[5, EOS, 0, 0]]), {}, "holds <pad> (id 0) in document 0"),
        "holes": (write_parquet(folder / "h.parquet", [[5, None, 7]]), {}, "missing values among its token ids"),
        "compressed": (write_arrow(folder / "z.arrow", [[5] * 4000], compression="zstd"), {}, "compressed inside"),
        "empty": (write_megatron(folder / "zero", [[]]), {}, "holds no tokens"),
        "rule": (folder / "c.parquet", {"column": "ids", "eos": "maybe"}, "no rule 'maybe' for <eos>"),
        "end id": (folder / "c.parquet", {"column": "ids", "end_id": 9999}, "end_id is 9999"),
    }


def test_bad_files_are_one_sentence_and_leave_nothing(tmp_path, tokenizer):
    for name, (path, options, words) in bad_files(tmp_path).items():
        with pytest.raises(InputError) as refused:
            adopted(tokenizer, tmp_path / f"out {name}", path, **options)
        assert words in str(refused.value), (name, str(refused.value))
        assert not (tmp_path / f"out {name}").exists(), name


def test_huge_row_groups_are_refused_with_the_mend(tmp_path, tokenizer, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", documents_of([5] * 9), rows=9)
    monkeypatch.setattr("mezzotint.data.pieces.LARGEST_GROUP", 44)
    with pytest.raises(InputError, match=r"row group 0 of .* holds 45 ids.*row_group_size"):
        adopted(tokenizer, tmp_path / "out", path)


def test_killed_scan_goes_on_with_the_next_file(tmp_path, tokenizer, monkeypatch):
    for n in range(4):
        write_parquet(tmp_path / "there" / f"{n}.parquet", documents_of([5, 6], first=n))
    straight = adopted(tokenizer, tmp_path / "straight", tmp_path / "there")
    add, added = Workspace.add, []

    def add_two(space, number, part):
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(number)
        add(space, number, part)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Workspace, "add", add_two)
        adopted(tokenizer, tmp_path / "killed", tmp_path / "there")
    scanned = []
    monkeypatch.setattr(Workspace, "add", lambda space, n, part: (scanned.append(n), add(space, n, part)))
    resumed = adopted(tokenizer, tmp_path / "killed", tmp_path / "there")
    assert scanned == [2, 3]
    assert (tmp_path / "killed/manifest.json").read_bytes() == (tmp_path / "straight/manifest.json").read_bytes()
    assert resumed.sha256 == straight.sha256
    adopted(tokenizer, tmp_path / "killed", tmp_path / "there")
    assert scanned == [2, 3]
    write_parquet(tmp_path / "there" / "3.parquet", documents_of([7]))
    with pytest.raises(InputError, match="other files, or ones that have changed since"):
        adopted(tokenizer, tmp_path / "killed", tmp_path / "there")


def test_file_that_is_moved_or_changed_is_named(tmp_path, tokenizer):
    path = write_megatron(tmp_path / "x", documents_of([9, 9]), "uint16")
    adopted(tokenizer, tmp_path / "out", path)
    path.rename(tmp_path / "y.bin")
    with pytest.raises(InputError, match=r"x\.bin is missing"):
        RowSource(tmp_path / "out", 8, 4)
    (tmp_path / "y.bin").rename(path)
    source = RowSource(tmp_path / "out", 8, 4)
    _mapped.cache_clear()
    write_megatron(tmp_path / "x", documents_of([9, 9], first=5), "uint16")
    with pytest.raises(InputError, match=r"x\.(bin|idx) has changed since it was opened"):
        source[0]


def test_data_hash_knows_files_and_how_they_are_read_not_where_they_lie(tmp_path, tokenizer):
    documents = documents_of([9, 8, 30])
    one, two = (write_megatron(tmp_path / n / "x", documents, "uint16") for n in ("one", "two"))

    def digest(name, path, **options):
        adopted(tokenizer, tmp_path / name, path, **options)
        return Loader(DataConfig(sources=((str(tmp_path / name), 1.0),), row_length=8), block_length=4).hash

    assert digest("a", one) == digest("b", two) != digest("c", one, eos="keep")


def test_parquet_order_is_shuffled_in_windows_once_an_epoch(tmp_path, tokenizer, monkeypatch):
    """Rows of a window come from few row groups, any rank's share is the same, and each epoch holds each row once."""
    monkeypatch.setattr("mezzotint.data.rows.STRETCH", 32)
    monkeypatch.setattr("mezzotint.data.order.WINDOW", 128)
    for n in range(3):
        write_parquet(tmp_path / "there" / f"{n}.parquet", documents_of([7] * 50 + [90, 3], first=n), rows=4)
    adopted(tokenizer, tmp_path / "out", tmp_path / "there")
    data = Loader(DataConfig(sources=((str(tmp_path / "out"), 1.0),), row_length=8, seed=5), block_length=4)
    rows = len(data.sources[0])
    starts = data.sources[0].stretches()
    assert starts[0] == 0 and starts[-1] == rows and (np.diff(starts) > 0).all() and len(starts) > 10
    epochs = [data.row_ids(rows * epoch, rows) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    stretch_of = np.searchsorted(starts, epochs[0], side="right") - 1
    windows = [len(set(stretch_of[n : n + 16])) for n in range(0, rows, 16)]
    assert max(windows) <= 9 < len(starts) - 1  # two windows of four stretches at most
    assert set(epochs[0][:16]) != set(epochs[1][:16])  # other stretches come first
    visited = [np.array(epochs[0])[stretch_of == n] for n in range(len(starts) - 1)]
    assert sum((np.diff(of_stretch) > 0).all() for of_stretch in visited) < len(visited) / 2
    again = Loader(DataConfig(sources=((str(tmp_path / "out"), 1.0),), row_length=8, seed=5), block_length=4)
    assert again.hash == data.hash and again.row_ids(2 * rows - 3, 9) == data.row_ids(2 * rows - 3, 9)


def test_decoded_row_groups_are_bounded(tmp_path, tokenizer, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", documents_of([10] * 40), rows=4)
    adopted(tokenizer, tmp_path / "out", path)
    monkeypatch.setattr("mezzotint.data.tables.GroupCache.__init__.__defaults__", (100,))
    source = RowSource(tmp_path / "out", 8, 4)
    cache = source._files[0]._cache
    for n in range(len(source)):
        source[n]
        assert sum(map(len, cache._groups.values())) == cache._held <= 100


def test_ids_beyond_16_bits_that_are_read_as_eos(tmp_path):
    """The end id is in the file even where no other id is as large."""
    path = write_parquet(tmp_path / "x.parquet", [[5, 70_000]])
    (tmp_path / "x.sizes").write_bytes(np.array([2], "<i4").tobytes())
    info = ShardInfo("x", 2, 1, 1, 5, 0, 0, "", "", kind="parquet", column="input_ids", end_id=70_000, groups=(1,))
    file = EndsRenamed(ParquetFile(path, tmp_path / "x.sizes", info, GroupCache()), 70_000, EOS)
    assert file.read(0, 2).tolist() == [5, EOS]


def test_inner_ends_are_told(tmp_path, tokenizer, capsys):
    adopted(tokenizer, tmp_path / "out", write_megatron(tmp_path / "x", [[5, EOS, 6, EOS], [7, EOS]]))
    assert "1 <eos> inside documents" in capsys.readouterr().err


def test_command_says_what_it_took(tmp_path, tokenizer, capsys):
    path = write_megatron(tmp_path / "x", documents_of([9, 9]), "uint16")
    assert main(["adopt", "--input", str(path), "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]) == 0
    assert "20 tokens in 2 documents" in (said := capsys.readouterr().out) and "<eos> added to 2" in said
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["format"] == 2 and content["shards"][0]["kind"] == "megatron"
