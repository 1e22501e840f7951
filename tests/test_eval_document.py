"""Text files scored whole: tokens in pieces are the tokens of the text, the command prints what it should and refuses."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from data_support import PROSE, small_tokenizer

from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval import stream
from mezzotint.eval.__main__ import main
from mezzotint.eval.bound import Draws, document_bound
from mezzotint.eval.stream import open_document, token_pieces
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.weights import load_model, save_weights

STRANGE = "a\n\n\nb  \n\tc \r\nd;\n\n  e\n漢字\n😀 f\u2581g\n" + "x" * 90 + "\n9\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with releases `mamba` and `attention`, of the tokenizer in `tokenizer`."""
    folder = tmp_path_factory.mktemp("documents")
    tokenizer = load_tokenizer(small_tokenizer(folder / "tokenizer"))
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    for name, pattern in (("mamba", "M"), ("attention", "A")):
        config = preset("debug", "hybrid", pattern=pattern, vocab_size=tokenizer.vocab_size, **ids)
        save_weights(Denoiser(config, generator=torch.Generator().manual_seed(0)), folder / name)
        for file in tokenizer.files:
            shutil.copy(file, folder / name)
    return folder


def byte_level(folder: Path):
    """A byte-level BPE with the pattern of GPT-2, which keeps runs of spaces and line ends together."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([PROSE * 3, STRANGE * 3, "\n\n\n  \n" * 20], trainer)
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
@pytest.mark.parametrize("read, held", [(1, 40), (7, 200), (1 << 16, 1 << 18)])
def test_tokens_in_pieces_are_those_of_the_whole_text(made, tmp_path, monkeypatch, kind, read, held):
    tokenizer = load_tokenizer(made / "tokenizer") if kind == "sentencepiece" else byte_level(tmp_path)
    text = (STRANGE + PROSE) * 4
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(stream, "READ", read)
    monkeypatch.setattr(stream, "HELD", max(held, 200))
    document = open_document(path, tokenizer)
    pieces = list(token_pieces(document, tokenizer))
    assert torch.cat(pieces).tolist() == tokenizer.encode(text)
    assert document.tokens == len(tokenizer.encode(text)) and document.bytes == len(text.encode())
    assert len(pieces) > 10 or read > len(text)


def test_a_text_without_a_place_to_cut_is_cut_all_the_same(made, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(made / "tokenizer")
    path = tmp_path / "text.txt"
    path.write_text("ab c" * 500)
    monkeypatch.setattr(stream, "READ", 16)
    monkeypatch.setattr(stream, "HELD", 64)
    document = open_document(path, tokenizer)
    pieces = list(token_pieces(document, tokenizer))
    assert tokenizer.decode(torch.cat(pieces).tolist()) == "ab c" * 500
    assert max(map(len, pieces)) <= 64 + 16


def test_a_file_changed_while_it_is_scored_is_noticed(made, tmp_path):
    tokenizer = load_tokenizer(made / "tokenizer")
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    document = open_document(path, tokenizer)
    path.write_text(PROSE.replace("fox", "cat"))
    with pytest.raises(InputError, match="was changed while it was scored"):
        list(token_pieces(document, tokenizer))


@pytest.mark.parametrize("arm", ["mamba", "attention"])
def test_documents_are_scored_printed_and_resumed(made, tmp_path, capsys, arm):
    out = tmp_path / "results.jsonl"
    texts = [PROSE * 2 + STRANGE, PROSE]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    command = ["bound", str(made / arm), "--out", str(out), "--document"]
    assert main([*command, str(tmp_path / "0.txt")]) == 0
    printed = capsys.readouterr().out
    tokenizer, model = load_tokenizer(made / arm), load_model(made / arm)
    row = json.loads(out.read_text().splitlines()[1])
    tokens = torch.tensor(tokenizer.encode(texts[0]))
    found = document_bound(
        model, tokens, draws=Draws(per_block=8), key=open_document(tmp_path / "0.txt", tokenizer).sha256
    )
    assert row["values"]["nats"] == pytest.approx(found, rel=1e-6)
    assert row["values"]["bytes"] == len(texts[0].encode()) and row["values"]["tokens"] == len(tokens)
    assert row["identity"]["document"] == "0.txt" and row["identity"]["draws"] == 8
    error = row["values"]["monte_carlo_error"]
    assert f"  <= {found / len(tokens):.4f} nats/token, Monte-Carlo error {error / len(tokens):.4f}" in printed
    bits = len(texts[0].encode()) * math.log(2)
    assert f"  <= {found / bits:.4f} bits/byte,  Monte-Carlo error {error / bits:.4f}" in printed
    assert f"{arm}: 1 document, {len(tokens)} tokens" in printed

    before = out.read_text()
    assert main([*command, str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]) == 0
    printed = capsys.readouterr().out
    assert out.read_text().startswith(before) and len(out.read_text().splitlines()) == 3
    assert "2 documents" in printed and "standard error" in printed and "Monte-Carlo error" in printed


def test_several_releases_share_a_results_file(made, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(PROSE)
    out = tmp_path / "out.jsonl"
    releases = [str(made / "mamba"), str(made / "attention")]
    assert main(["bound", *releases, "--document", str(tmp_path / "text.txt"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "mamba: 1 document" in printed and "attention: 1 document" in printed
    assert [json.loads(line)["identity"]["subject"] for line in out.read_text().splitlines()[1:]] == [
        "mamba",
        "attention",
    ]
    assert main(["bound", releases[0], releases[0], "--document", str(tmp_path / "text.txt")]) == 2
    assert "have the same name" in capsys.readouterr().err


def test_what_cannot_be_scored_is_refused_in_a_sentence(made, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe")
    (tmp_path / "fine.txt").write_text(PROSE)
    (tmp_path / "notes").write_text("mine\n")
    long = [str(made / "attention"), "--document", str(tmp_path / "fine.txt")]
    for arguments, sentence in (
        ([str(made / "mamba"), "--document", str(tmp_path / "empty.txt")], "is empty"),
        ([str(made / "mamba"), "--document", str(tmp_path / "binary.txt")], "is no UTF-8 text"),
        ([str(made / "mamba"), "--document", str(tmp_path / "absent.txt")], "cannot read the document"),
        ([str(made / "tokenizer"), "--document", str(tmp_path / "fine.txt")], "no release folder"),
        ([*long, "--draws", "1"], "at least 2"),
        ([*long, "--dtype", "int3"], "unknown dtype"),
        ([*long, "--out", str(tmp_path / "notes")], "no results file"),
        ([*long, "--out", str(tmp_path / "fine.txt" / "x.jsonl")], "cannot write results"),
    ):
        assert main(["bound", *arguments]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err.strip().splitlines()[-1] and captured.out == ""
    assert (tmp_path / "notes").read_text() == "mine\n"
    monkeypatch.setattr("mezzotint.eval.bound.available_bytes", lambda device: 1000)
    assert main(["bound", *long, "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "the state of a text of" in capsys.readouterr().err
    assert main(["bound", str(made / "mamba"), *long[1:], "--out", str(tmp_path / "y.jsonl")]) == 2
