"""Passkey: one number in repeated sentences, in the form of landmark attention (Mohtashami and Jaggi 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from mezzotint.data.tasks.haystack import REPEATED, repeated
from mezzotint.data.tasks.sample import Answers, Needle, Order, Sample, lay_text, text_minimum
from mezzotint.data.tasks.vocabulary import Vocabulary

LARGEST = 50_000
HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
TAIL = "What is the pass key? The pass key is"


@dataclass(frozen=True, kw_only=True)
class Passkey:
    """A number from 1 to 50,000."""

    name: str = "passkey"
    placed: bool = True

    def minimum(self, vocabulary: Vocabulary) -> int:
        haystack = 2 * len(vocabulary.encode(REPEATED))
        return text_minimum(vocabulary, HEAD, NEEDLE, TAIL, drawn=10, answers=_answers(0), haystack=haystack)

    def lay(self, order: Order) -> Sample:
        key = 1 + order.draws.below(LARGEST)
        needles = [Needle(NEEDLE.format(key=key), order.depth)] if order.needle else []
        return lay_text(
            self,
            order,
            head=HEAD,
            bed=lambda budget: repeated(order.vocabulary, budget),
            needles=needles,
            tail=TAIL,
            answers=_answers(key),
        )


def _answers(key: int) -> Answers:
    return Answers(texts=[str(key)], kind="number", choices=LARGEST, longest=5)
