"""Counting: the words that come up most often in a numbered list, or in a coded text with Zipf's frequencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.haystack import checked, encoded, front
from mezzotint.data.tasks.sample import Answers, Order, Sample, Task, assemble, text_minimum
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.words import MADE_UP, made_up_words

WORD = 6  # characters of a made-up word
OFTEN = ((30, 3), (6, 1))  # how often common words and all others come; the first whose common words take half at most
LIST_HEAD = "Below is a list of numbered words. Some of them come up more often than the others.\n"
LIST_TAIL = "Which {count} words come up most often in the list? The {count} most frequent words are"
CODED_HEAD = "Read the coded text below and count its words. The marks ... mean nothing.\n"
CODED_TAIL = "\nLeave the marks ... aside. Which {count} words come up most often? The {count} most frequent words are"
MARKS = " ..."
FEWEST = 80  # words of a coded text: with fewer the ranks asked for are too close
ASKED = 3  # ranks of a coded text that are asked for


@dataclass(frozen=True, kw_only=True)
class CommonWords:
    """`common` words that come up six or ten times as often as all others, in a shuffled list."""

    name: str = "common_words"
    placed: bool = False
    common: int = 10

    def __post_init__(self) -> None:
        if self.common < 1:
            raise InputError(f"{self.name}: common is {self.common}; give 1 or more")

    def minimum(self, vocabulary: Vocabulary) -> int:
        entry = WORD + 8  # with a number of up to five digits
        fixed = (LIST_HEAD, LIST_TAIL.format(count=self.common))
        answers = _answers([""] * self.common)
        return text_minimum(vocabulary, *fixed, drawn=2 * OFTEN[-1][0] * self.common * entry, answers=answers)

    def lay(self, order: Order) -> Sample:
        fresh = made_up_words(order.draws.part("words"))
        common = list(islice(fresh, self.common))

        def body(budget: int) -> list[int]:
            return _numbered_list(order, common, fresh, budget)

        return _lay(self, order, LIST_HEAD, body, LIST_TAIL.format(count=self.common), common)


def _numbered_list(order: Order, common: list[str], others: Iterator[str], budget: int) -> list[int]:
    """The shuffled list, `budget` tokens: common words, then as many others as fit."""
    words = order.vocabulary
    hot = words.encode_lines([f" {word}\n" for word in common])
    number = len(words.encode("1000."))
    hot_tokens = sum(map(len, hot)) + len(hot) * number
    often, seldom = next((pair for pair in OFTEN if 2 * pair[0] * hot_tokens <= budget), OFTEN[-1])
    entries = list(range(len(hot))) * often if order.needle else []  # places in `lines`
    lines = list(hot)
    numbers = encoded(words, budget // 3, (f"{n}." for n in count(1)))
    numbered = list(islice(numbers, len(entries)))
    left = checked(budget - often * sum(map(len, hot)) * order.needle - sum(map(len, numbered)))
    for line in encoded(words, budget // (2 * seldom), (f" {word}\n" for word in others)):
        more = list(islice(numbers, seldom))
        cost = seldom * len(line) + sum(map(len, more))
        if cost > left:
            break
        entries += [len(lines)] * seldom
        lines.append(line)
        numbered += more
        left -= cost
    shuffled = [entries[place] for place in order.draws.part("order").order(len(entries)).tolist()]
    # common words are named in the order in which they come up, so that their list is one a reader can know
    named = {entry: number for number, entry in enumerate(dict.fromkeys(e for e in shuffled if e < len(hot)))}
    out = front(words, left)
    for place, entry in zip(numbered, shuffled):
        out += place
        out += lines[named.get(entry, entry)]
    return out


@dataclass(frozen=True, kw_only=True)
class FrequentWords:
    """Made-up words whose frequency falls as rank^-2; rank 1 is a mark that means nothing, ranks 2 to 4 are asked for."""

    name: str = "frequent_words"
    placed: bool = False

    def minimum(self, vocabulary: Vocabulary) -> int:
        fixed = (CODED_HEAD, CODED_TAIL.format(count=ASKED))
        return text_minimum(vocabulary, *fixed, drawn=FEWEST * (WORD + 1), answers=_answers([""] * ASKED))

    def lay(self, order: Order) -> Sample:
        fresh = made_up_words(order.draws.part("words"))
        asked = list(islice(fresh, ASKED))

        def body(budget: int) -> list[int]:
            return _coded_text(order, asked, fresh, budget)

        return _lay(self, order, CODED_HEAD, body, CODED_TAIL.format(count=ASKED), asked)


def _coded_text(order: Order, asked: list[str], others: Iterator[str], budget: int) -> list[int]:
    """The shuffled text, `budget` tokens."""
    words = order.vocabulary
    marks = words.encode(MARKS)
    most = checked(budget) // min(len(marks), 2)  # words there could be
    ranks = max(10, most // 50)
    texts = [f" {word}" for word in (*asked, *islice(others, ranks))]
    lines = words.encode_lines(texts)
    lengths = np.array([len(line) for line in lines])
    size = most
    while True:
        counts = _zipf(size, len(lines))
        rest = size - int(counts.sum())  # marks
        total = int(counts @ lengths) + rest * len(marks)
        if total <= budget:
            break
        size -= max(1, (total - budget) // int(lengths.max() + 1))
    if not order.needle:
        counts[: len(asked)] = 0
    left = budget - int(counts @ lengths)
    entries = [line for line, times in zip(lines, counts.tolist()) for _ in range(times)]
    entries += [list(marks)] * (left // len(marks))
    out = front(words, left % len(marks))
    for entry in order.draws.part("order").order(len(entries)).tolist():
        out += entries[entry]
    return out


def _zipf(size: int, ranks: int) -> np.ndarray:
    """(ranks,) how often each word comes among `size`, from rank 2 on: size * rank^-2 / zeta(2), rounded down."""
    rank = np.arange(2, ranks + 2, dtype=np.float64)
    return np.floor(size * 6 / np.pi**2 / rank**2).astype(np.int64)


def _lay(task: Task, order: Order, head: str, body: Callable[[int], list[int]], tail: str, asked: list[str]) -> Sample:
    words = order.vocabulary
    return assemble(task, order, head=words.encode(head), body=body, tail=words.encode(tail), answers=_answers(asked))


def _answers(texts: list[str]) -> Answers:
    return Answers(texts=texts, kind="word", choices=MADE_UP, ordered=False, longest=WORD)
