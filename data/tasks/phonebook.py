"""Phonebook: one line of many is asked for, named at the end or, reversed, before the list as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.haystack import filled
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.sample import Answers, Needle, Order, Sample, lay_text, text_minimum
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.words import names, phone_number

LONGEST_NAME, LONGEST_NUMBER = 11, 12  # characters
LINE = "{name}: {number}\n"
HEAD = "This is a phone book. I will ask you for numbers from it.\n"
HEAD_REVERSED = "This is a phone book. I will ask you for the number of {name}.\n"
SHOT = "The number of {name} is {number}.\n"
TAIL = "The number of {name} is"


@dataclass(frozen=True, kw_only=True)
class Phonebook:
    """`shots` other lines of the book are asked for and answered before the question (Waleffe et al. 2024)."""

    name: str
    placed: bool = True
    reversed: bool = False
    shots: int = 2

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise InputError(f"{self.name}: shots is {self.shots}; give 0 or more")

    def minimum(self, vocabulary: Vocabulary) -> int:
        line = len(vocabulary.encode(LINE.format(name="", number="")))
        lines, drawn = 2 + 2 * self.shots, (2 + 2 * self.shots) * (LONGEST_NAME + LONGEST_NUMBER)
        fixed = (HEAD_REVERSED, *[SHOT] * self.shots, TAIL)
        return text_minimum(vocabulary, *fixed, drawn=drawn, answers=_answers(""), haystack=lines * line + 32)

    def lay(self, order: Order) -> Sample:
        book = _entries(order.draws.part("book"))
        target, *shots = [next(book) for _ in range(1 + self.shots)]
        share = 1 / max(1, self.shots)
        needles = [Needle(LINE.format(**entry), (n + 0.5) * share) for n, entry in enumerate(shots)]
        if order.needle:
            needles.append(Needle(LINE.format(**target), order.depth))
        asked = "".join(SHOT.format(**entry) for entry in shots)
        return lay_text(
            self,
            order,
            head=HEAD_REVERSED.format(name=target["name"]) if self.reversed else HEAD,
            bed=lambda budget: filled(order.vocabulary, budget, (LINE.format(**entry) for entry in book)),
            needles=needles,
            tail=asked + TAIL.format(name=target["name"]),
            answers=_answers(target["number"]),
        )


def _entries(draws: Keyed) -> Iterator[dict[str, str]]:
    numbers = draws.part("numbers")
    for name in names(draws):
        yield {"name": name, "number": phone_number(numbers)}


def _answers(number: str) -> Answers:
    return Answers(texts=[number], kind="phone", choices=10**7, longest=LONGEST_NUMBER)
