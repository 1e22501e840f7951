"""Training text of tasks: which task, length and difficulty each row gets, and the documents that fill it exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.catalog import HELDOUT, TRAIN, make_sample, named, with_option
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.sample import Task
from mezzotint.data.tasks.vocabulary import Vocabulary

FORMAT = 2  # of rows: raised when they are put together in another way from the same samples
STAGE_STEP = 2**40  # sample numbers of one stage, so that stages share none


@dataclass(frozen=True)
class Item:
    """One task of a mixture: its share of the rows, and for length and options the values a document chooses from."""

    task: Task
    weight: float
    lengths: tuple[int, ...]
    choices: tuple[tuple[str, tuple[str, ...]], ...]  # (option, values), easy ones first
    text: str  # as it was written


def parse_item(text: str, *, row_length: int) -> Item:
    """`mqar:pairs=2/4/8:queries=32:length=64/128:weight=3`. Raises InputError naming what is wrong."""
    name, *parts = text.strip().split(":")
    task = named(name)
    weight = 1.0
    lengths: tuple[int, ...] = (row_length,)
    choices = []
    for part in parts:
        key, _, value = part.partition("=")
        values = tuple(value.split("/"))
        if key == "weight":
            weight = _number(value, text)
        elif key == "length":
            lengths = tuple(_whole(one, text) for one in values)
        else:
            for one in values:
                with_option(task, key, one)
            choices.append((key, values))
    if not 0 < weight < math.inf:
        raise InputError(f"{text}: weight is {weight}; give a positive number")
    for length in lengths:
        if length < 1 or row_length % length:
            raise InputError(f"{text}: length {length} does not divide the rows of {row_length} tokens: take a divisor")
    return Item(task, weight, lengths, tuple(choices), text.strip())


def _whole(value: str, text: str) -> int:
    if not value.isdecimal():
        raise InputError(f"{text}: length {value!r} is no whole number")
    return int(value)


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{text}: {value!r} is no number") from None


@dataclass(frozen=True)
class Mixture:
    """What rows are made of. Every row is a pure function of (this, split, number of the row).

    A row of `row_length` tokens is filled by documents of one task and one length, so that once they are filled up to
    whole blocks rows and documents begin together. `block`: of the models that will read them; a document's last block
    is left with 0 to block - 1 tokens of fill, so that answers end anywhere in a block. stage (k, n): only the first
    k/n of every list of lengths and values is used: a curriculum is one folder a stage.
    """

    items: tuple[Item, ...]
    row_length: int
    block: int
    seed: int
    stage: tuple[int, int] = (1, 1)

    def row(self, split: str, number: int, vocabulary: Vocabulary) -> Iterator[list[int]]:
        """The documents of row `number`, each ended by <eos>. `split` is TRAIN or HELDOUT: no samples are shared."""
        assert split in (TRAIN, HELDOUT)
        draws = Keyed(split, self.seed, "row", *self.stage, number)
        item = self._item(draws.uniform())
        length = self._reached(item.lengths)[draws.below(len(self._reached(item.lengths)))]
        count = self.row_length // length
        for place in range(count):
            task = item.task
            for key, values in item.choices:
                allowed = self._reached(values)
                task = with_option(task, key, allowed[draws.below(len(allowed))])
            sample = make_sample(
                task,
                length=length - draws.below(self.block),
                seed=self.seed,
                index=self.stage[0] * STAGE_STEP + number * self.row_length + place,
                depth=min(1.0, max(0.0, 1.25 * draws.uniform() - 0.125)),  # a tenth of all at either end, as tests have
                vocabulary=vocabulary,
                purpose=split,
                exact=True,
            )
            yield sample.tokens + sample.target

    def check(self, vocabulary: Vocabulary) -> None:
        """Raises InputError where some document could not be made."""
        if self.row_length % self.block or any(n % self.block for item in self.items for n in item.lengths):
            raise InputError(
                f"rows and documents must be whole blocks of {self.block} tokens: change --block or lengths"
            )
        for item in self.items:
            for task in _extremes(item):
                least = task.minimum(vocabulary) + self.block - 1
                if min(item.lengths) < least:
                    raise InputError(
                        f"{item.text}: documents of {min(item.lengths)} tokens are too short, {least} are needed"
                    )
                make_sample(
                    task, length=least, seed=0, index=0, depth=0.5, vocabulary=vocabulary, purpose=TRAIN, exact=True
                )

    def _item(self, share: float) -> Item:
        total = math.fsum(item.weight for item in self.items)
        reached = 0.0
        for item in self.items:
            reached += item.weight / total
            if share < reached:
                return item
        return self.items[-1]

    def _reached(self, values: tuple) -> tuple:
        """The part of a list that the stage has reached."""
        now, stages = self.stage
        return values[: max(1, math.ceil(len(values) * now / stages))]


def _extremes(item: Item) -> Iterator[Task]:
    """The task with every choice at its last value, and with each single value of each."""
    last = item.task
    for key, values in item.choices:
        last = with_option(last, key, values[-1])
    yield last
    for key, values in item.choices:
        for value in values:
            yield with_option(last, key, value)
