"""Every text comes back unchanged, to the byte, and no text produces a control id."""

import json
import unicodedata

import numpy as np
import pytest
from data_support import PROSE, open_small_tokenizer, small_tokenizer, write_text
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzotint.data.errors import InputError
from mezzotint.data.sources import SourceConfig
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

LITERALS = ["<mask>", "<eos>", "<pad>", "<unk>", "<0x41>", "<0xE2>", "<s>", "</s>", "\u2581", "\u2581\u2581", "\u2585"]
CODE_POINTS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return open_small_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unigram")
    source = SourceConfig(input=str(write_text(folder / "sample")))
    return load_tokenizer(
        train_tokenizer(TrainTokenizerConfig(out=str(folder), source=source, vocab_size=320, kind="unigram"))
    )


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A byte-level BPE `tokenizer.json` with a special token of its own, as other projects make them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([PROSE], trainer)
    path = tmp_path_factory.mktemp("foreign") / "tokenizer.json"
    made.save(str(path))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    """A `tokenizer.json` with byte fallback and spaces written as U+2581."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "\u2581a", "\u2581\u2581"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a"), ("\u2581", "\u2581")], byte_fallback=True, fuse_unk=False)
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<bos>", special=True)])
    path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
    made.save(str(path))
    return load_tokenizer(path)


@pytest.fixture(params=["bpe", "unigram", "foreign", "fallback"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def assert_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert not {tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)


def test_every_code_point_comes_back(tokenizer):
    for start in range(0, len(CODE_POINTS), 512):
        assert_exact(tokenizer, "".join(CODE_POINTS[start : start + 512]))


def test_every_assigned_small_code_point_alone(bpe):
    for character in CODE_POINTS[:0x3000]:
        assert_exact(bpe, character)
        assert_exact(bpe, f"a{character} {character}")


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from([*LITERALS, " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "the", PROSE])
    )
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_any_text_comes_back(bpe, unigram, foreign, fallback, text):
    for tokenizer in (bpe, unigram, foreign, fallback):
        assert_exact(tokenizer, text)


def test_batch_is_encode_of_each(tokenizer):
    texts = ["", " a", "x\u2581y", PROSE]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_no_normalization(bpe):
    text = "e\u0301 \u00e9 \ufb01 \u2460 \u1e9b\u0323 \uff21"
    assert unicodedata.normalize("NFKC", text) != text
    assert_exact(bpe, text)


def test_control_ids_are_distinct_and_silent(tokenizer):
    control = [tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id]
    assert len(set(control)) == 3
    assert max(control) < tokenizer.vocab_size == len(tokenizer.token_bytes)
    assert tokenizer.decode(control) == ""
    assert tokenizer.token_bytes[control].tolist() == [0, 0, 0]
    assert tokenizer.token_bytes.dtype == np.int32


def test_foreign_ids_are_appended_and_its_special_token_is_text(foreign):
    own = len(json.loads(foreign.files[0].read_text())["model"]["vocab"])
    assert [foreign.mask_id, foreign.eos_id, foreign.pad_id] == [own, own + 1, own + 2]
    assert_exact(foreign, "a <|end|> b")
    assert 0 not in foreign.encode("<|end|>")  # the id of the file's special token


def test_runs_of_spaces_are_pieces(bpe):
    assert len(bpe.encode("    return")) < len("    return") - 3


def test_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")


def test_bytes_that_are_no_utf8_decode_to_the_replacement(bpe):
    lead = bpe.encode("\u2581")[0]
    assert bpe.decode([lead]) == "\ufffd"


def test_id_outside_the_vocabulary(tokenizer):
    for i in (-1, tokenizer.vocab_size):
        with pytest.raises(InputError, match="outside the vocabulary"):
            tokenizer.decode([i])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_without_a_single_space(tmp_path, kind):
    (tmp_path / "words.txt").write_text("abc\nabd\nabe\n" * 50)
    source = SourceConfig(input=str(tmp_path / "words.txt"))
    config = TrainTokenizerConfig(out=str(tmp_path), source=source, vocab_size=320, kind=kind)
    tokenizer = load_tokenizer(train_tokenizer(config))  # which refuses one that changes text
    assert tokenizer.decode(tokenizer.encode("a b  c")) == "a b  c" and len(tokenizer.encode(" ")) == 1


def test_training_is_deterministic(tmp_path):
    one, two = small_tokenizer(tmp_path / "one"), small_tokenizer(tmp_path / "two")
    assert load_tokenizer(one).sha256 == load_tokenizer(two).sha256


def test_training_text_full_of_taken_names(tmp_path):
    (tmp_path / "t.txt").write_text("<mask><eos><pad><unk><0x41> \u2581\u2585 " * 500 + PROSE * 20)
    source = SourceConfig(input=str(tmp_path / "t.txt"))
    made = load_tokenizer(train_tokenizer(TrainTokenizerConfig(out=str(tmp_path), source=source, vocab_size=330)))
    assert_exact(made, "<mask><eos><pad><unk><0x41> \u2581\u2585 ")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.model", b"not a model", "no sentencepiece model"),
        ("tokenizer.model", b"", "sentencepiece model"),
        ("tokenizer.json", b"{", "JSON"),
        ("tokenizer.json", b"{}", "no Hugging Face tokenizer"),
        ("tokenizer.txt", b"x", "is no tokenizer"),
    ],
)
def test_damaged_tokenizers(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        load_tokenizer(path)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(InputError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(InputError, match="neither"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_changes_text_is_refused(tmp_path):
    import sentencepiece

    (tmp_path / "t.txt").write_text(PROSE * 50)
    for name, options, words in [
        ("lossy", {"byte_fallback": False}, "no byte fallback"),
        ("prefixed", {"byte_fallback": True}, "changes text"),
    ]:
        prefix = str(tmp_path / name)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "t.txt"),
            model_prefix=prefix,
            vocab_size=330,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        with pytest.raises(InputError, match=words):
            load_tokenizer(f"{prefix}.model")
