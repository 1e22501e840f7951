"""`mezzotint-data` ends every user's mistake with one sentence and code 2, and helps at once."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from data_support import small_tokenizer, write_text

from mezzotint.data.__main__ import main
from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(small_tokenizer(tmp_path_factory.mktemp("tok")))


def run(capsys, *arguments):
    """(exit code, last line of standard error), checked to be one sentence when the code is 2."""
    code = main([str(argument) for argument in arguments])
    errors = capsys.readouterr().err.splitlines()
    if code == 2:
        assert len(errors) == 1 and errors[0].startswith("error: ") and "Traceback" not in errors[0], errors
    return code, errors[-1] if errors else ""


def test_from_text_to_shards(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    assert run(capsys, "train-tokenizer", "--input", text, "--vocab-size", 340, "--out", tmp_path / "tok")[0] == 0
    arguments = ("--input", text, "--tokenizer", tmp_path / "tok", "--heldout", 0.3, "--workers", 1)
    assert run(capsys, "prepare", *arguments, "--out", tmp_path / "data")[0] == 0
    made = sorted(str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*") if path.is_file())
    names = ["manifest.json", "part-00000.bin", "part-00000.idx", "tokenizer.model"]
    assert made == [*(f"heldout/{n}" for n in names), "prepare.json", *(f"train/{n}" for n in names)]


def bad_inputs(folder):
    """name: (arguments that replace or follow `--input good`, words of the sentence)"""
    (folder / "empty.txt").write_text("")
    (folder / "nothing").mkdir()
    (folder / "blank.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    (folder / "columns.jsonl").write_text('{"title": "a", "body": "b"}\n')
    (folder / "numbers.jsonl").write_text('{"text": 5}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "broken.parquet").write_bytes(b"PAR1 no parquet")
    (folder / "broken.json.zst").write_bytes(b"no zstd")
    (folder / "cut.json.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00")
    (folder / "surrogate.jsonl").write_text(json.dumps({"text": "a\ud800b"}) + "\n")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "good.txt").write_text("good")
    (folder / "mixed" / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "both").mkdir()
    (folder / "both" / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "both" / "a.parquet").write_bytes(b"x")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.doc").write_text("mine")
    good = write_text(folder / "good", 3)
    return {
        "missing": (["--input", folder / "none.txt"], "no file or folder"),
        "empty file": (["--input", folder / "empty.txt"], "there is no text in"),
        "empty folder": (["--input", folder / "nothing"], "there is no text in"),
        "no match": (["--input", good, "--pattern", "*.rst"], "in files named *.rst"),
        "blank": (["--input", folder / "blank.jsonl"], "every document is empty"),
        "column": (["--input", folder / "columns.jsonl"], "no column 'text': its columns are title, body"),
        "numbers": (["--input", folder / "numbers.jsonl"], "holds int, not text"),
        "broken json": (["--input", folder / "broken.jsonl"], "broken.jsonl could not be read"),
        "broken parquet": (["--input", folder / "broken.parquet"], "broken.parquet could not be read"),
        "broken zst": (["--input", folder / "broken.json.zst"], "broken.json.zst could not be read"),
        "cut gz": (["--input", folder / "cut.json.gz"], "cut.json.gz could not be read"),
        "surrogate": (["--input", folder / "surrogate.jsonl"], "surrogate"),
        "encoding": (["--input", folder / "mixed"], "latin.txt could not be read"),
        "both": (["--input", folder / "both"], "both json and parquet"),
        "corpus": (["--corpus", "wikipedia"], "no corpus 'wikipedia'"),
        "twice": (["--corpus", "stdlib", "--input", good], "choose one"),
        "unit": (["--input", good, "--unit", "word"], "no text unit 'word'"),
        "tokenizer": (["--input", good, "--tokenizer", folder / "nowhere"], "no tokenizer at"),
        "heldout": (["--input", good, "--heldout", "1.5"], "heldout is 1.5"),
        "nothing held out": (["--input", folder / "mixed" / "good.txt", "--heldout", "0.001"], "fell into heldout"),
        "shards": (["--input", good, "--shard-mb", "0"], "shard_mb is 0.0"),
        "shards nan": (["--input", good, "--shard-mb", "nan"], "shard_mb is nan"),
        "empty name": (["--input", ""], "--input is empty"),
        "workers": (["--input", good, "--workers", "-1"], "workers is -1"),
        "taken": (["--input", good, "--out", folder / "taken"], "was not made by prepare"),
        "under a file": (["--input", good, "--out", folder / "empty.txt" / "x"], "cannot be written"),
        "a file": (["--input", good, "--out", folder / "empty.txt"], "was not made by prepare"),
    }


def test_bad_input_is_one_sentence_and_code_2(tmp_path, tokenizer, capsys):
    for name, (arguments, words) in bad_inputs(tmp_path).items():
        out = tmp_path / f"out {name}"
        code, sentence = run(capsys, "prepare", "--tokenizer", tokenizer, "--out", out, "--workers", 1, *arguments)
        if "--workers" in arguments:
            code, sentence = run(capsys, "prepare", "--tokenizer", tokenizer, "--out", out, *arguments)
        assert (code, words in sentence) == (2, True), (name, code, sentence)
        assert not out.exists(), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab-size", "100"], "vocab_size is 100: give more than 262"),
        (["--kind", "wordpiece"], "no tokenizer kind 'wordpiece'"),
        (["--heldout", "0.9999999"], "there is no text in"),
        (["--vocab-size", "263"], "sentencepiece cannot train"),
        (["--heldout", "1"], "heldout is 1.0"),
        (["--sample-mb", "nan"], "sample_mb is nan"),
        (["--sample-mb", "0"], "sample_mb is 0.0"),
    ],
)
def test_bad_tokenizer_training(tmp_path, capsys, arguments, words):
    text = write_text(tmp_path / "text")
    code, sentence = run(capsys, "train-tokenizer", "--input", text, "--out", tmp_path / "tok", *arguments)
    assert code == 2 and words in sentence
    assert not (tmp_path / "tok").exists()


@pytest.fixture
def hub(monkeypatch):
    """A stand-in hub on this machine that knows a gated dataset and nothing else."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            gated = "gated" in self.path
            self.send_response(403 if gated else 404)
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("name", "words"), [("some/gated", "is gated"), ("some/renamed", "there is no hub dataset")])
def test_hub_dataset_that_is_gated_or_gone(tmp_path, tokenizer, capsys, hub, name, words):
    code, sentence = run(capsys, "prepare", "--input", name, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert code == 2 and f"{name}" in sentence and words in sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_hub_that_cannot_be_reached_ends_quickly(tmp_path, tokenizer, capsys, monkeypatch, endpoint):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    start = time.monotonic()
    code, sentence = run(capsys, "prepare", "--input", "a/b", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert code == 2 and "the hub could not be asked" in sentence
    assert time.monotonic() - start < 15


def test_impossible_hub_name(tmp_path, tokenizer, capsys):
    code, sentence = run(capsys, "prepare", "--input", "a b!", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert code == 2 and "neither a file or folder nor a possible hub name" in sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "x/y"), "error: x/y cannot be read or written (Permission denied)"),
        (OSError(28, "No space left on device"), "error: a file cannot be written (No space left on device): free"),
        (MemoryError("3 TiB"), "error: not enough memory (3 TiB)"),
        (RuntimeError("CUDA out of memory. Tried\nand failed"), "error: not enough memory (CUDA out of memory. Tried)"),
    ],
)
def test_a_machine_that_says_no_is_one_sentence_and_code_2(capsys, error, sentence):
    def command():
        raise error

    assert run_command(command) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(sentence) and printed.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(10, "No child processes"), RuntimeError("shapes differ")])
def test_a_failure_that_is_not_the_users_is_not_hidden(error):
    def command():
        raise error

    with pytest.raises(type(error)):
        run_command(command)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_bytes(tmp_path / "new", b"x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"], ["train-tokenizer", "--help"]])
def test_help_shows_examples(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0 and "mezzotint-data prepare --corpus stdlib" in capsys.readouterr().out


def test_help_loads_nothing_heavy_and_data_never_loads_models():
    heavy = "{'numpy', 'torch', 'datasets', 'grain', 'sentencepiece', 'tokenizers', 'huggingface_hub'}"
    script = f"""
import sys
import mezzotint.data.__main__
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
import mezzotint.data.encode, mezzotint.data.prepare, mezzotint.data.train_tokenizer
assert not {{'torch', 'datasets', 'grain'}} & set(sys.modules)  # a spawned process loads these files
import mezzotint.data.loader
assert not [name for name in sys.modules if name.startswith(('mezzotint.models', 'mezzotint.training'))]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
