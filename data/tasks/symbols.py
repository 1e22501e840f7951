"""Tasks of plain symbols, for any vocabulary: multi-query associative recall and copying."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.sample import Order, Sample
from mezzotint.data.tasks.vocabulary import Vocabulary

MOST_SYMBOLS = 8192  # that a prompt chooses from, as in zoology
FILLERS = 64  # symbols of random filler


@dataclass(frozen=True)
class Alphabet:
    """Symbols by what they are for, apart from each other: no filler is ever a key."""

    filler: np.ndarray
    marker: int
    keys: np.ndarray
    values: np.ndarray


def alphabet(vocabulary: Vocabulary, symbols: int, *, task: str) -> Alphabet:
    """The first `symbols` ordinary ids of the vocabulary (0: up to MOST_SYMBOLS), shared out.

    Half of what marker and filler leave are keys, half values. Raises InputError where there are too few.
    """
    own = vocabulary.symbols[: symbols or MOST_SYMBOLS]
    if len(own) < max(symbols, 8):
        raise InputError(f"{task}: {max(symbols, 8)} symbols are asked for, the vocabulary has {len(own)}: take fewer")
    fillers = min(FILLERS, max(1, len(own) // 4))
    half = (len(own) - 1 - fillers) // 2
    rest = own[1 + fillers :]
    return Alphabet(own[1 : 1 + fillers], int(own[0]), rest[:half], rest[half : 2 * half])


@dataclass(frozen=True, kw_only=True)
class Mqar:
    """Multi-query associative recall (Arora et al. 2023): pairs of key and value in filler, then keys asked in turn.

    Of several queries the first asks for the pair at the depth; pairs are asked again where there are more queries.
    queries 0: as many as fill half of the prompt, which teaches fastest. noise: random filler; else one symbol over and
    over. symbols: of the vocabulary that are used, 0 for up to 8192.
    """

    name: str = "mqar"
    placed: bool = True
    pairs: int = 8
    queries: int = 8
    symbols: int = 0
    noise: bool = False

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise InputError(f"{self.name}: pairs is {self.pairs}; give 1 or more")

    def minimum(self, vocabulary: Vocabulary) -> int:
        return 2 * self.pairs + 2 * self.queries + 2 if self.queries else 4 * self.pairs + 4

    def lay(self, order: Order) -> Sample:
        signs = alphabet(order.vocabulary, self.symbols, task=self.name)
        if self.pairs > len(signs.keys):
            raise InputError(f"{self.name}: {self.pairs} pairs, but only {len(signs.keys)} keys: take fewer pairs")
        keys = signs.keys[list(islice(order.draws.part("keys").distinct(len(signs.keys)), self.pairs))]
        drawn = order.draws.part("values").distinct(len(signs.values))
        values = signs.values[list(islice(drawn, self.pairs))]
        queries = self.queries or order.length // 4
        asked = self._asked(order, queries)
        target = np.stack([keys[asked], values[asked]], axis=1).flatten().tolist()
        context = order.length - len(target) - 1
        tokens = _filler(signs, context, noise=self.noise, draws=order.draws.part("filler"))
        for place, pair in zip(self._places(order, context), range(self.pairs)):
            if order.needle or pair not in asked:
                tokens[place : place + 2] = keys[pair], values[pair]
        return Sample(
            task=self.name,
            tokens=tokens.tolist(),
            target=[*target, order.vocabulary.eos_id],
            given=[True, False] * queries + [False],
            spans=[(2 * n + 1, 2 * n + 2) for n in range(queries)],
            room=len(target) + 1,
            depth=order.depth,
            kind="symbols",
            texts=[],
            ordered=True,
            choices=len(signs.values),
        )

    def _asked(self, order: Order, queries: int) -> list[int]:
        """The pair of each query: pair 0, then all others in random order, then again."""
        draws = order.draws.part("queries")
        first = [0, *(1 + draws.order(self.pairs - 1)).tolist()]
        more = draws.many_below(self.pairs, max(0, queries - self.pairs)).tolist()
        return [*first, *more][:queries]

    def _places(self, order: Order, context: int) -> list[int]:
        """Where each pair starts, none over another: pair 0 at the depth, the others anywhere."""
        draws = order.draws.part("places")
        slots = context // 2
        shift = draws.below(context - 2 * slots + 1)
        depth = draws.uniform() if order.depth is None else order.depth
        first = min(slots - 1, round(depth * (slots - 1)))
        others = (slot for slot in draws.distinct(slots) if slot != first)
        return [shift + 2 * slot for slot in (first, *islice(others, self.pairs - 1))]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A marker and `count` symbols in filler; behind the marker at the end the symbols are to be written again."""

    name: str = "copy"
    placed: bool = True
    count: int = 16
    symbols: int = 0
    noise: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"{self.name}: count is {self.count}; give 1 or more")

    def minimum(self, vocabulary: Vocabulary) -> int:
        return 2 * self.count + 4

    def lay(self, order: Order) -> Sample:
        signs = alphabet(order.vocabulary, self.symbols, task=self.name)
        letters = np.concatenate([signs.keys, signs.values])
        text = letters[order.draws.part("text").many_below(len(letters), self.count)].tolist()
        context = order.length - self.count - 2  # the marker at the end, and <eos>
        tokens = _filler(signs, context, noise=self.noise, draws=order.draws.part("filler"))
        depth = order.draws.part("places").uniform() if order.depth is None else order.depth
        place = round(depth * (context - self.count - 1))
        if order.needle:
            tokens[place : place + self.count + 1] = [signs.marker, *text]
        return Sample(
            task=self.name,
            tokens=[*tokens.tolist(), signs.marker],
            target=[*text, order.vocabulary.eos_id],
            given=[False] * (self.count + 1),
            spans=[(0, self.count)],
            room=self.count + 1,
            depth=order.depth,
            kind="symbols",
            texts=[],
            ordered=True,
            choices=len(letters) ** self.count,
        )


def _filler(signs: Alphabet, count: int, *, noise: bool, draws: Keyed) -> np.ndarray:
    if noise:
        return signs.filler[draws.many_below(len(signs.filler), count)]
    return np.full(count, signs.filler[0])
