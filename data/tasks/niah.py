"""Needles in a haystack: single, of several keys, of several values, of several queries; wording as in RULER."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.haystack import KINDS, REPEATED, Bed, filled, repeated, running_text
from mezzotint.data.tasks.sample import Answers, Needle, Order, Sample, lay_text, text_minimum
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.words import KINDS as WORD_KINDS
from mezzotint.data.tasks.words import LONGEST, keys

# as published (Hsieh et al. 2024, arXiv 2404.06654), so that scores can be set beside each other
NEEDLE = "One of the special magic {type_v} for {key} is: {value}."
HEAD = (
    "Some special magic {type_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_v} afterwards."
)
QUESTION = "What are all the special magic {type_v} for {query} mentioned in the provided text?"
PREFIX = " The special magic {type_v} for {query} mentioned in the provided text are"
HEAD_OF_ONE = (
    "A special magic {type_v} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_v} afterwards."
)
QUESTION_OF_ONE = "What is the special magic {type_v} for {query} mentioned in the provided text?"
PREFIX_OF_ONE = " The special magic {type_v} for {query} mentioned in the provided text is"


@dataclass(frozen=True, kw_only=True)
class Niah:
    """`pairs` keys with `per_key` values each, of which `queries` keys are asked for."""

    name: str
    placed: bool = True
    haystack: str = "repeat"  # repeat, needle (lines of other keys and values) or text
    keys: str = "words"  # words (adjective-noun), numbers or uuids
    values: str = "numbers"
    pairs: int = 1
    per_key: int = 1
    queries: int = 1

    def __post_init__(self) -> None:
        if self.haystack not in KINDS:
            raise InputError(f"{self.name}: no haystack {self.haystack!r}; one of {', '.join(KINDS)}")
        for option, value in (("keys", self.keys), ("values", self.values)):
            if value not in WORD_KINDS:
                raise InputError(f"{self.name}: {option} is {value!r}; one of {', '.join(WORD_KINDS)}")
        if not 1 <= self.queries <= self.pairs or self.per_key < 1:
            raise InputError(
                f"{self.name}: {self.queries} queries of {self.pairs} keys with {self.per_key} values each: "
                "ask for one key or more, and for no more than there are"
            )

    def minimum(self, vocabulary: Vocabulary) -> int:
        count = self.pairs * self.per_key
        answers = self._answers([""] * (self.queries * self.per_key))
        needle = self._needle("", "")
        drawn = count * (LONGEST[self.keys] + LONGEST[self.values]) + 2 * self.queries * (LONGEST[self.keys] + 8)
        haystack = 2 * max(len(vocabulary.encode(REPEATED)), len(vocabulary.encode(needle)))
        head, tail = self._frame([""])
        return text_minimum(vocabulary, head, tail, *[needle] * count, drawn=drawn, answers=answers, haystack=haystack)

    def lay(self, order: Order) -> Sample:
        own = keys(self.keys, order.draws.part("keys"))  # goes on in the haystack, so that no key comes twice
        values = keys(self.values, order.draws.part("values"))
        pairs = [(key, list(islice(values, self.per_key))) for key in islice(own, self.pairs)]
        asked, others = pairs[: self.queries], pairs[self.queries :]
        needles = self._hidden(order, asked) if order.needle else []
        needles += [Needle(self._needle(key, value)) for key, found in others for value in found]
        lines = (self._needle(key, value) for key, value in zip(own, values))
        head, tail = self._frame([key for key, _ in asked])
        return lay_text(
            self,
            order,
            head=head,
            bed=lambda budget: self._bed(order, budget, lines),
            needles=needles,
            tail=tail,
            answers=self._answers([value for _, found in asked for value in found]),
        )

    def _hidden(self, order: Order, asked: list[tuple[str, list[str]]]) -> list[Needle]:
        """Needles of the keys asked for, one of the first key's at the depth; values of a key in their order."""
        places = order.draws.part("depths")
        needles = []
        for number, (key, found) in enumerate(asked):
            depths = [places.uniform() for _ in found]
            if number == 0 and order.depth is not None:
                depths[0] = order.depth
            needles += [Needle(self._needle(key, value), depth) for value, depth in zip(found, sorted(depths))]
        return needles

    def _bed(self, order: Order, budget: int, lines: Iterator[str]) -> Bed:
        if self.haystack == "needle":
            return filled(order.vocabulary, budget, lines)
        if self.haystack == "text":
            return running_text(order.vocabulary, budget, order.draws.part("text"))
        return repeated(order.vocabulary, budget)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_v=self.values, key=key, value=value) + "\n"

    def _frame(self, queries: list[str]) -> tuple[str, str]:
        """What stands before the haystack and behind it."""
        query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        one = self.queries * self.per_key == 1
        type_v = self.values.removesuffix("s") if one else self.values
        parts = (HEAD_OF_ONE, QUESTION_OF_ONE, PREFIX_OF_ONE) if one else (HEAD, QUESTION, PREFIX)
        head, question, prefix = (part.format(type_v=type_v, query=query) for part in parts)
        return head + "\n", question + prefix

    def _answers(self, texts: list[str]) -> Answers:
        """Values of one key come in any order; those of several keys in the order of the keys."""
        return Answers(
            texts=texts,
            kind=self.values.removesuffix("s") if self.values != "words" else "words",
            choices=WORD_KINDS[self.values],
            ordered=self.per_key == 1,
            longest=LONGEST[self.values],
        )
