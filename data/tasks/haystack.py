"""What needles are hidden in: repeated sentences, running text or lines, cut to an exact number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.vocabulary import Vocabulary

KINDS = ("repeat", "needle", "text")
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FIRST_LINES = 64  # encoded before the number of lines that fill the haystack can be guessed


@dataclass(frozen=True)
class Bed:
    """Tokens of a haystack and the places, ascending, at which a line can be put in: behind the end of another."""

    tokens: list[int]
    gaps: np.ndarray  # (n,) int64


def repeated(words: Vocabulary, budget: int) -> Bed:
    """The same sentences over and over; the first line is cut at its front, so that all is `budget` tokens."""
    unit = words.encode(REPEATED)
    whole, rest = divmod(checked(budget), len(unit))
    gaps = np.unique(np.concatenate([[0], rest + len(unit) * np.arange(whole + 1)]))
    return Bed(front(words, budget), gaps.astype(np.int64))


def running_text(words: Vocabulary, budget: int, draws: Keyed) -> Bed:
    """A stretch of real text from anywhere, ending with a line; text shorter than that begins again at its start."""
    text = words.real_text
    count = len(text.tokens)
    ends = np.flatnonzero(text.ends_line) if text.ends_line.any() else np.arange(count)
    end = int(ends[draws.below(len(ends))]) + 1
    places = np.arange(end - checked(budget), end) % count
    tokens, closed = text.tokens[places].tolist(), text.ends_line[places]
    gaps = np.flatnonzero(closed) + 1 if closed.any() else np.arange(budget + 1)
    return Bed(tokens, np.unique(np.concatenate([[0], gaps])))


def filled(words: Vocabulary, budget: int, lines: Iterator[str]) -> Bed:
    """As many of `lines` as fit; what is left, less than a line, goes before them as the end of a repeated sentence."""
    taken: list[list[int]] = []
    left = checked(budget)
    for line in encoded(words, budget, lines):
        if len(line) > left:
            break
        taken.append(line)
        left -= len(line)
    gaps = np.cumsum([left, *map(len, taken)], dtype=np.int64)
    tokens = [*front(words, left), *(token for line in taken for token in line)]
    return Bed(tokens, np.unique(np.concatenate([[0], gaps])))


def front(words: Vocabulary, count: int) -> list[int]:
    """The last `count` tokens of the sentences over and over: they end with a line."""
    unit = words.encode(REPEATED)
    whole, rest = divmod(count, len(unit))
    return [*unit[len(unit) - rest :], *(unit * whole)]


def encoded(words: Vocabulary, budget: int, lines: Iterator[str]) -> Iterator[list[int]]:
    """Tokens of each line, encoded in batches of about as many as will be needed."""
    count, tokens, size = 0, 0, FIRST_LINES
    while batch := words.encode_lines(list(islice(lines, size))):
        yield from batch
        count, tokens = count + len(batch), tokens + sum(map(len, batch))
        size = max(8, int((budget - tokens) / (tokens / count)) + 8)


def insert(bed: Bed, needles: list[tuple[float, list[int]]]) -> list[int]:
    """The haystack with each needle at the gap nearest to its depth, a share of the haystack; equal ones in order."""
    placed = sorted(((_gap(bed, depth), line) for depth, line in needles), key=lambda item: item[0])
    out: list[int] = []
    start = 0
    for place, line in placed:
        out += bed.tokens[start:place]
        out += line
        start = place
    return out + bed.tokens[start:]


def _gap(bed: Bed, depth: float) -> int:
    """The place in `bed.gaps` nearest to `depth` of its tokens, the first of two that are as near."""
    wanted = depth * len(bed.tokens)
    after = int(np.searchsorted(bed.gaps, wanted))
    near = bed.gaps[max(0, after - 1) : after + 1]
    return int(near[np.argmin(np.abs(near - wanted))])


def checked(budget: int) -> int:
    """InputError where needles and question leave no room for a haystack."""
    if budget < 0:
        raise InputError(f"a prompt is {-budget} tokens too short for what must stand in it: take a longer one")
    return budget
