"""Connections that break change nothing: shards from a web server or the hub equal those from local files, to the byte."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from data_support import PROSE, small_tokenizer
from flaky_server import FlakyHub, FlakyServer

from mezzotint.data.__main__ import main
from mezzotint.data.errors import InputError
from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.remote import ResumedFile, describe, fetch
from mezzotint.data.sources import SourceConfig

TEXTS = [f"{PROSE * (1 + n % 3)}number {n}\n" for n in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(small_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("mezzotint.data.remote.WAITS", (0.001,) * 4)
    monkeypatch.setattr(ResumedFile, "DEFAULT_BLOCK_SIZE", 2000)


def lines(texts):
    return "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def parquet(texts, folder):
    import datasets

    datasets.Dataset.from_list([{"n": n, "text": text} for n, text in enumerate(texts)]).to_parquet(str(folder / "x"))
    return (folder / "x").read_bytes()


def prepared(tokenizer, out, name, **options):
    settings = {"heldout": 0.2, "shard_mb": 0.003, "workers": 1} | options
    return prepare(PrepareConfig(tokenizer=tokenizer, out=str(out), source=SourceConfig(input=name), **settings))


def shards(folder):
    """Content of all token files below `folder`."""
    files = sorted(path for path in folder.rglob("part-*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["data.jsonl", "data.json.gz", "data.parquet", "data.txt"])
@pytest.mark.parametrize("ranges", [True, False])
def test_dropped_connections_change_no_byte(tmp_path, tokenizer, kind, ranges):
    content = {
        "data.jsonl": lines(TEXTS),
        "data.json.gz": gzip.compress(lines(TEXTS), mtime=0),
        "data.parquet": parquet(TEXTS, tmp_path),
        "data.txt": "".join(TEXTS).encode(),
    }[kind]
    (tmp_path / kind).write_bytes(content)
    prepared(tokenizer, tmp_path / "local", str(tmp_path / kind), heldout=0.0)
    # cut off at a third, a server without ranges would never get beyond it when every answer breaks
    with FlakyServer({f"/a b/{kind}": content}, drop_every=2 if ranges else 3, ranges=ranges) as server:
        prepared(tokenizer, tmp_path / "remote", f"{server.address}/a%20b/{kind}?key=1&of=[2]", heldout=0.0)
        assert server.drops > (0 if kind == "data.txt" else 1)  # a text is asked for at once
    assert shards(tmp_path / "remote") == shards(tmp_path / "local") != {}


def test_busy_server_is_asked_again(tmp_path, tokenizer):
    with FlakyServer({"/x.jsonl": lines(TEXTS)}, busy=3) as server:
        prepared(tokenizer, tmp_path / "out", f"{server.address}/x.jsonl")
        assert server.busy == 0


def test_several_files_resume_after_the_server_stayed_away(tmp_path, tokenizer, capsys):
    """The work stops in a sentence, keeps its parts, and goes on without fetching files again that were read whole."""
    contents = {f"/{n}.jsonl": lines(TEXTS[15 * n : 15 * n + 15]) for n in range(4)}
    for name, content in contents.items():
        (tmp_path / name[1:]).write_bytes(content)
    prepared(tokenizer, tmp_path / "local", str(tmp_path), shard_mb=0.003)
    with FlakyServer(contents) as server:
        addresses = [server.address + name for name in contents]

        server.leaves = lambda path: path == "/3.jsonl" and server.sent["/2.jsonl"] > 2000
        command = ["prepare", "--input", *addresses, "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
        command += ["--heldout", "0.2", "--shard-mb", "0.003", "--workers", "1"]
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "stays away" in said and "run the same command again later to go on" in said
        parts = len(list((tmp_path / "out" / "progress").iterdir()))
        assert parts > 3 and not list((tmp_path / "out").rglob("manifest.json"))
        server.away, server.leaves = False, lambda path: False
        server.sent.clear()
        assert main(command) == 0
        assert server.sent["/1.jsonl"] == 1 and server.sent["/3.jsonl"] > 1  # its size was asked for
    assert shards(tmp_path / "out") == shards(tmp_path / "local")


def test_file_that_changes_while_it_is_read(tmp_path, tokenizer):
    with FlakyServer({"/x": bytes(5000)}, drop_every=1) as server:
        file = describe(f"{server.address}/x")
        server.files["/x"] = bytes(4999) + b"1"
        with pytest.raises(InputError, match="has changed while it was read"):
            fetch(file, 0, 5000)


def test_missing_file_and_mixed_kinds(tmp_path, tokenizer):
    with FlakyServer({"/x.jsonl": b"{}", "/y.parquet": b"{}"}) as server:
        with pytest.raises(InputError, match=r"/none\.jsonl cannot be had \(404"):
            prepared(tokenizer, tmp_path / "out", f"{server.address}/none.jsonl")
        with pytest.raises(InputError, match="are of several kinds"):
            prepared(tokenizer, tmp_path / "out", f"{server.address}/x.jsonl {server.address}/y.parquet")
    assert not (tmp_path / "out").exists()


def test_server_that_was_never_there(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"the server of http://127\.0\.0\.1:9/x\.jsonl stays away"):
        prepared(tokenizer, tmp_path / "out", "http://127.0.0.1:9/x.jsonl")


def test_broken_content_is_not_taken_for_a_broken_connection(tmp_path, tokenizer):
    with (
        FlakyServer({"/x.jsonl": b'{"text": "a"}\n{"text": \n'}) as server,
        pytest.raises(InputError, match="repair it and run"),
    ):
        prepared(tokenizer, tmp_path / "out", f"{server.address}/x.jsonl", heldout=0.0)


@pytest.mark.parametrize("drop_every", [1, 2, 5])
@pytest.mark.parametrize("span", [(0, 10_000), (17, 9_999), (5, 6), (3, 3)])
def test_fetched_range_is_the_range(drop_every, span):
    content = os.urandom(10_000)
    with FlakyServer({"/x": content}, drop_every=drop_every) as server:
        file = describe(f"{server.address}/x")
        assert (file.size, fetch(file, *span)) == (10_000, content[slice(*span)])


def on_hub(hub, home, *arguments, patient=False):
    """`mezzotint-data` in a process of its own, for which `hub` is the hub; retries do not wait."""
    script = f"import sys, time; {'' if patient else 'time.sleep = lambda s: None;'} "
    script += "from mezzotint.data.__main__ import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json.gz", "parquet"])
def test_hub_dataset_over_dropped_connections(tmp_path, tokenizer, kind):
    """Equal to local files; when the hub stays away the work stops in a sentence, and goes on later."""
    files = {}
    for n in range(3):
        texts = TEXTS[20 * n : 20 * n + 20]
        packed = {"jsonl": lines(texts), "json.gz": gzip.compress(lines(texts), mtime=0)}
        files[f"data/train-{n}.{kind}"] = packed.get(kind) or parquet(texts, tmp_path)
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"train-{n}.{kind}").write_bytes(files[f"data/train-{n}.{kind}"])
    prepared(tokenizer, tmp_path / "local", str(tmp_path / "data"), shard_mb=0.003)
    options = ["--tokenizer", tokenizer, "--heldout", "0.2", "--shard-mb", "0.003", "--workers", "1"]
    with FlakyHub("some/name", files, drop_every=2, busy=1) as hub:
        command = ["prepare", "--input", "some/name", *options, "--out"]
        done = on_hub(hub, tmp_path / "home", *command, tmp_path / "remote")
        assert (done.returncode, hub.drops > 2) == (0, True), done.stderr
        assert shards(tmp_path / "remote") == shards(tmp_path / "local")

        hub.leaves = lambda path: path.endswith(f"train-2.{kind}")
        stopped = on_hub(hub, tmp_path / "home", *command, tmp_path / "stopped")
        assert stopped.returncode == 2 and stopped.stderr.count("\n") == 1, stopped.stderr
        assert "stays away" in stopped.stderr and "run the same command again later to go on" in stopped.stderr
        assert len(list((tmp_path / "stopped" / "progress").iterdir())) > 3
        hub.away, hub.leaves = False, lambda path: False
        assert on_hub(hub, tmp_path / "home", *command, tmp_path / "stopped").returncode == 0
        assert shards(tmp_path / "stopped") == shards(tmp_path / "local")

        hub.publish("f" * 40)
        newer = on_hub(hub, tmp_path / "home", *command, tmp_path / "stopped")
        assert newer.returncode == 2 and "another text, or one that has changed since" in newer.stderr
