"""Whether what was written answers a sample: the first answers strictly, and the substring match of RULER beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mezzotint.data.tasks.sample import Sample

# what counts as one answer in a text, right or wrong, by the kind of answer
PATTERNS = {
    "number": re.compile(r"\d+"),
    "phone": re.compile(r"[\d-]*\d"),
    "uuid": re.compile(r"[\w-]+"),
    "words": re.compile(r"[\w-]+"),
    "variable": re.compile(r"\w+"),
    "word": re.compile(r"\w+"),
}


@dataclass(frozen=True)
class Marks:
    """correct: the first answers written, as many as were asked for, are those asked for (in their order, where it counts).

    part: the share of them that is right. substring: the share of answers that stand anywhere in the text, case ignored.
    """

    correct: bool
    part: float
    substring: float


def mark_text(sample: Sample, text: str) -> Marks:
    """Marks of a continuation."""
    wanted = sample.texts
    found = PATTERNS[sample.kind].findall(text)[: len(wanted)]
    in_order = sum(a == b for a, b in zip(found, wanted))
    right = in_order if sample.ordered else len(set(found) & set(wanted))
    low = text.lower()
    anywhere = sum(answer.lower() in low for answer in wanted)
    return Marks(right == len(wanted), right / len(wanted), anywhere / len(wanted))


def mark_symbols(sample: Sample, tokens: Sequence[int]) -> Marks:
    """Marks of a continuation in symbols, token for token at the answers' places; each is a question of its own.

    The first question decides: it is the one that has a depth.
    """
    right = [list(tokens[start:end]) == answer for (start, end), answer in zip(sample.spans, sample.answer)]
    share = sum(right) / len(right)
    return Marks(right[0], share, share)
