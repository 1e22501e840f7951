"""Preparing: all formats give the same shards, workers and interruptions change nothing, held out means held out."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_support import PROSE, small_tokenizer

from mezzotint.data.corpus import corpus_documents, corpus_files
from mezzotint.data.errors import InputError
from mezzotint.data.open_files import open_files
from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig, open_source
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.workspace import Workspace

TEXTS = [f"{PROSE * (1 + n % 3)}number {n} \u2581 <mask>\n" for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(small_tokenizer(tmp_path_factory.mktemp("tok")))


def documents_of(manifest):
    """The texts in a prepared folder, decoded; every document ends with its only <eos>."""
    tokenizer = load_tokenizer(manifest.folder)
    texts = []
    for file in open_files(manifest):
        sizes = file.sizes(0, file.documents)
        for ids in np.split(file.read(0, int(sizes.sum())), np.cumsum(sizes)[:-1]):
            assert ids[-1] == manifest.eos_id and (ids[:-1] != manifest.eos_id).all()
            texts.append(tokenizer.decode(ids))
    return texts


def contents(folder: Path):
    """Hash of every file below `folder` but the record of the run."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "prepare.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_as(kind: str, folder: Path) -> Path:
    """TEXTS in one of the formats that can be read."""
    import datasets
    import zstandard

    lines = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()
    table = datasets.Dataset.from_list([{"n": n, "text": text} for n, text in enumerate(TEXTS)])
    path = folder / f"data.{kind}"
    if kind == "folder":
        path.mkdir()
        for n, text in enumerate(TEXTS):
            (path / f"{n:02d}.md").write_text(text)
    elif kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "json.zst":
        path.write_bytes(zstandard.compress(lines))
    elif kind == "parquet":
        table.to_parquet(str(path))
    elif kind == "saved":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "other": table.select([0])}).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["folder", "jsonl", "json.gz", "json.zst", "parquet", "saved", "saved-splits"])
def test_every_format_gives_the_same_documents(tmp_path, tokenizer, kind):
    source = SourceConfig(input=str(write_as(kind, tmp_path)))
    train = prepare(PrepareConfig(tokenizer=tokenizer, out=str(tmp_path / "out"), source=source, workers=1)).train
    assert documents_of(train) == TEXTS
    assert train.bytes == sum(len(text.encode()) for text in TEXTS)
    assert train.documents == len(TEXTS) and train.tokens == sum(shard.tokens for shard in train.shards)
    token_bytes = load_tokenizer(tokenizer).token_bytes
    stored = np.concatenate([f.read(0, shard.tokens) for f, shard in zip(open_files(train), train.shards)])
    assert token_bytes[stored].sum() == train.bytes


def config_of(tmp_path, tokenizer, out, **options) -> PrepareConfig:
    path = tmp_path / "data.jsonl"
    source = SourceConfig(input=str(path if path.exists() else write_as("jsonl", tmp_path)))
    settings = {"heldout": 0.3, "shard_mb": 0.001, "workers": 1} | options
    return PrepareConfig(tokenizer=tokenizer, out=str(tmp_path / out), source=source, **settings)


def test_held_out_documents_are_apart_and_the_same_in_any_order(tmp_path, tokenizer):
    done = prepare(config_of(tmp_path, tokenizer, "out"))
    train, heldout = documents_of(done.train), documents_of(done.heldout)
    assert sorted(train + heldout) == sorted(TEXTS) and train and heldout
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(TEXTS)))
    assert documents_of(prepare(config_of(tmp_path, tokenizer, "reversed")).heldout) == heldout[::-1]


def test_copies_of_a_text_stay_together(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2))
    done = prepare(config_of(tmp_path, tokenizer, "out"))
    assert not set(documents_of(done.train)) & set(documents_of(done.heldout))


@pytest.mark.parametrize("whole_parts", [0, 1, 4])
def test_interrupted_run_goes_on_and_ends_the_same(tmp_path, tokenizer, monkeypatch, whole_parts):
    prepare(config_of(tmp_path, tokenizer, "straight"))
    add = Workspace.add
    calls = []

    def add_then_stop(space, number, part):
        if len(calls) == whole_parts:
            raise KeyboardInterrupt
        calls.append(number)
        add(space, number, part)

    monkeypatch.setattr(Workspace, "add", add_then_stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(config_of(tmp_path, tokenizer, "stopped"))
    assert not list((tmp_path / "stopped").rglob("manifest.json"))
    resumed = []
    monkeypatch.setattr(
        Workspace, "add", lambda space, number, part: (resumed.append(number), add(space, number, part))
    )
    prepare(config_of(tmp_path, tokenizer, "stopped"))
    assert resumed[0] == whole_parts and len(resumed) > 1
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")
    assert not (tmp_path / "stopped" / "progress").exists()


def test_parts_of_a_version_that_kept_no_position_are_made_again(tmp_path, tokenizer, monkeypatch):
    prepare(config_of(tmp_path, tokenizer, "straight"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mezzotint.data.prepare._write_manifests", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare(config_of(tmp_path, tokenizer, "old"))
    for path in (tmp_path / "old" / "progress").iterdir():
        content = json.loads(path.read_text())
        del content["position"]
        path.write_text(json.dumps(content))
    prepare(config_of(tmp_path, tokenizer, "old"))
    assert contents(tmp_path / "old") == contents(tmp_path / "straight")


def test_finished_run_returns_at_once(tmp_path, tokenizer, monkeypatch):
    before = prepare(config_of(tmp_path, tokenizer, "out"))
    monkeypatch.setattr("mezzotint.data.prepare._write_parts", None)
    assert prepare(config_of(tmp_path, tokenizer, "out")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heldout": 0.2}, "heldout = 0.3, not 0.2"),
        ({"shard_mb": 1.0}, "shard_mb"),
        ({"tokenizer": ""}, "another tokenizer"),
    ],
)
def test_other_settings_are_refused(tmp_path, tokenizer, change, words):
    prepare(config_of(tmp_path, tokenizer, "out"))
    if "tokenizer" in change:
        change = {"tokenizer": other_tokenizer(tmp_path)}
    with pytest.raises(InputError, match=words):
        prepare(PrepareConfig(**vars(config_of(tmp_path, tokenizer, "out")) | change))


def other_tokenizer(tmp_path) -> str:
    """A tokenizer of another size than `small_tokenizer`."""
    from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

    source = SourceConfig(input=str(tmp_path / "data.jsonl"))
    return str(train_tokenizer(TrainTokenizerConfig(out=str(tmp_path / "t"), source=source, vocab_size=320)))


def test_text_that_has_changed_is_noticed(tmp_path, tokenizer):
    config = config_of(tmp_path, tokenizer, "out")
    prepare(config)
    with open(config.source.input, "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(InputError, match="another text, or one that has changed since"):
        prepare(config)


def test_empty_documents_are_left_out(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_text('{"text": ""}\n{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    done = prepare(config_of(tmp_path, tokenizer, "out", heldout=0.0))
    assert documents_of(done.train) == ["a", "b"] and done.heldout is None


def test_tokenizer_made_elsewhere(tmp_path):
    """A `tokenizer.json` of bytes: its own ids in the shards, ours beyond them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    train = prepare(config_of(tmp_path, str(tmp_path / "tokenizer.json"), "out", heldout=0.0)).train
    assert (train.vocab_size, train.mask_id, train.eos_id, train.pad_id) == (259, 256, 257, 258)
    assert train.tokenizer == "tokenizer.json" and train.tokens == train.bytes + train.documents
    assert documents_of(train) == TEXTS


@pytest.mark.parametrize("heldout", [0.0, 0.5])
def test_nothing_is_left_of_text_that_cannot_be_read(tmp_path, tokenizer, heldout):
    (tmp_path / "data.jsonl").write_text('{"text": 5}\n')
    with pytest.raises(InputError, match="holds int, not text"):
        prepare(config_of(tmp_path, tokenizer, "out", heldout=heldout))
    assert not (tmp_path / "out").exists()


def test_failure_that_can_be_mended_leaves_nothing_in_the_way(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(InputError, match=r"data\.jsonl could not be read"):
        prepare(config_of(tmp_path, tokenizer, "out", heldout=0.0))
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    assert documents_of(prepare(config_of(tmp_path, tokenizer, "out", heldout=0.0)).train) == ["a"]


def test_default_corpus_is_the_standard_library():
    names = [name for name, _ in corpus_files("stdlib")]
    assert names == sorted(names) and "json/decoder.py" in names and "argparse.py" in names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert len(corpus_files("stdlib+tests")) > len(names)
    documents = list(corpus_documents("stdlib", len(names) - 3))
    assert [name for name, _ in documents] == names[-3:]
    total = open_source(SourceConfig()).total_bytes
    assert 5e6 < total < 50e6


@pytest.mark.slow
def test_output_does_not_depend_on_workers(tmp_path, tokenizer):
    prepare(config_of(tmp_path, tokenizer, "one"))
    prepare(config_of(tmp_path, tokenizer, "two", workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_kill_9_then_the_same_command(tmp_path, tokenizer):
    def command(out):
        options = [
            "--corpus",
            "stdlib",
            "--tokenizer",
            tokenizer,
            "--heldout",
            "0.03",
            "--shard-mb",
            "1",
            "--workers",
            "2",
        ]
        return [sys.executable, "-m", "mezzotint.data", "prepare", *options, "--out", str(tmp_path / out)]

    killed = subprocess.Popen(command("killed"), stderr=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "progress" / "part-00001.json").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not list((tmp_path / "killed").rglob("manifest.json"))
    for out in ("killed", "straight"):
        subprocess.run(command(out), check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")
