"""Marks of what was written: the first answers strictly, RULER's substring match beside it."""

import dataclasses

import pytest
from tasks_support import byte_tokenizer, sample

from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.eval.scoring import Marks, mark_symbols, mark_text


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Vocabulary:
    return Vocabulary.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def with_texts(words, task: str, texts: list[str]):
    return dataclasses.replace(sample(task, words), texts=texts)


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        (" 1234567.", Marks(True, 1.0, 1.0)),
        ("1234567", Marks(True, 1.0, 1.0)),
        (" the number 1234567, I think", Marks(True, 1.0, 1.0)),
        (" 91234567.", Marks(False, 0.0, 1.0)),  # RULER counts it
        (" 123456.", Marks(False, 0.0, 0.0)),
        (" 7654321, 1234567", Marks(False, 0.0, 1.0)),  # a list of guesses: only the first counts
        ("", Marks(False, 0.0, 0.0)),
    ],
)
def test_one_number(words, text, marks):
    assert mark_text(with_texts(words, "niah_single", ["1234567"]), text) == marks


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        (" 11, 22, 33, 44.", Marks(True, 1.0, 1.0)),
        (" 11, 22, 44, 33.", Marks(False, 0.5, 1.0)),  # the order is that of the keys
        (" 99, 11, 22, 33, 44.", Marks(False, 0.0, 1.0)),
        (" 11, 22.", Marks(False, 0.5, 0.5)),
    ],
)
def test_several_numbers_in_order(words, text, marks):
    assert mark_text(with_texts(words, "niah_multiquery", ["11", "22", "33", "44"]), text) == marks


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        (" 44, 11, 33, 22.", Marks(True, 1.0, 1.0)),  # values of one key have no order
        (" 44, 44, 33, 22.", Marks(False, 0.75, 0.75)),
        (" 44, 55, 33, 22, 11", Marks(False, 0.75, 1.0)),
    ],
)
def test_several_numbers_in_any_order(words, text, marks):
    assert mark_text(with_texts(words, "niah_multivalue", ["11", "22", "33", "44"]), text) == marks


@pytest.mark.parametrize(
    ("task", "answer", "right", "wrong"),
    [
        ("phonebook", "555-123-4567", " 555-123-4567.", " 555-123-456."),
        ("phonebook", "555-123-4567", "it is 555-123-4567", "555-1234567"),
        ("niah_single:values=words", "calm-river", " calm-river.", " calm-rivers."),
        ("niah_single:values=uuids", "ab-12-cd", " ab-12-cd.", " ab-12-cde."),
        ("passkey", "77", "77", "177"),
    ],
)
def test_other_kinds_of_answers(words, task, answer, right, wrong):
    asked = with_texts(words, task, [answer])
    assert mark_text(asked, right).correct and not mark_text(asked, wrong).correct


def test_words_and_variables(words):
    asked = with_texts(words, "variables", ["ABCDE", "FGHIJ"])
    assert mark_text(asked, " FGHIJ, ABCDE.").correct and not mark_text(asked, " FGHIJ, XABCDE.").correct
    asked = with_texts(words, "common_words", ["bado", "kimu"])
    assert mark_text(asked, " kimu, bado.").correct and mark_text(asked, " kimu, lo.").part == 0.5


def test_symbols_count_at_their_places(words):
    asked = sample("mqar:queries=4", words)
    written = list(asked.target)
    assert mark_symbols(asked, written) == Marks(True, 1.0, 1.0)
    written[7] += 1
    assert mark_symbols(asked, written) == Marks(True, 0.75, 0.75)
    written[1] += 1
    assert mark_symbols(asked, written) == Marks(False, 0.5, 0.5)
    copied = sample("copy:count=4", words)
    assert mark_symbols(copied, copied.target).correct
    assert not mark_symbols(copied, [*copied.target[:3], copied.target[3] + 1]).correct
