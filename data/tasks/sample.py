"""What a task makes: a prompt with the answers asked for, laid out to an exact number of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mezzotint.data.tasks.haystack import Bed, insert
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and what should follow it. Prompt and room together are `length` tokens, exactly.

    `target` is what a perfect model writes behind the prompt, `<eos>` last; `spans` are the (start, end) of the answers
    in it, in the order asked. Where `given` is True the target's token stands in the canvas from the start and is not
    to be written (the keys of mqar).
    """

    task: str
    tokens: list[int]  # the prompt
    target: list[int]
    given: list[bool]
    spans: list[tuple[int, int]]
    room: int  # tokens that the answer may take, at least those of the target
    depth: float | None
    kind: str  # of the answers: number, uuid, words, phone, variable, word or symbols
    texts: list[str]  # the answers as text; empty for symbols
    ordered: bool  # whether the answers must come in the order asked
    choices: int  # equally likely values of the first answer, for one who has not read the prompt

    @property
    def length(self) -> int:
        return len(self.tokens) + self.room

    @property
    def answer(self) -> list[list[int]]:
        """Tokens of each answer, in the order asked."""
        return [self.target[start:end] for start, end in self.spans]

    @property
    def sha256(self) -> str:
        """16 hex digits over prompt, target and room."""
        parts = [np.array(part, dtype="<i4").tobytes() for part in (self.tokens, self.target, [self.room])]
        return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked of a task: tokens in all, where the needle stands, and the draws that decide the rest.

    exact: the answer takes the room it needs, so that prompt and target fill `length` (a training document); else every
    sample of a task leaves the same room (a test). needle False: what is asked for is left out of the prompt.
    """

    vocabulary: Vocabulary
    draws: Keyed
    length: int
    depth: float | None
    exact: bool = False
    needle: bool = True


class Task(Protocol):
    """One kind of prompt; its fields are its difficulty. `placed` says whether a depth means anything to it."""

    @property
    def name(self) -> str: ...

    @property
    def placed(self) -> bool: ...

    def minimum(self, vocabulary: Vocabulary) -> int:
        """Tokens, prompt and room, from which on every sample can be made."""

    def lay(self, order: Order) -> Sample:
        """The sample; order.length is at least the minimum."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers in words, and the room a test leaves for them."""

    texts: list[str]
    kind: str
    choices: int
    ordered: bool = True
    longest: int  # characters of the longest answer there could be

    def room(self) -> int:
        """Tokens that suffice whatever the tokenizer: a byte is at most a token; two for each separator, one <eos>."""
        return len(self.texts) * (self.longest + 3) + 1

    def target(self, words: Vocabulary) -> tuple[list[int], list[tuple[int, int]]]:
        """` one, two.` and <eos>, with the places of the answers."""
        tokens: list[int] = []
        spans = []
        for number, text in enumerate(self.texts):
            if number:
                tokens += words.encode(",")
            start = len(tokens)
            tokens += words.encode_lines([f" {text}"])[0]
            spans.append((start, len(tokens)))
        return [*tokens, *words.encode("."), words.eos_id], spans


@dataclass(frozen=True)
class Needle:
    """A line to be put into the haystack, near `depth` (0 to 1) or, where that is None, anywhere."""

    text: str
    depth: float | None = None


class BedMaker(Protocol):
    def __call__(self, budget: int) -> Bed:
        """A haystack of exactly `budget` tokens."""


def lay_text(
    task: Task, order: Order, *, head: str, bed: BedMaker, needles: list[Needle], tail: str, answers: Answers
) -> Sample:
    """head, haystack with needles, tail, answers; the haystack takes what the others leave of order.length."""
    first, *lines, last = order.vocabulary.encode_lines([head, *(needle.text for needle in needles), tail])
    places = order.draws.part("places")
    depths = [needle.depth if needle.depth is not None else places.uniform() for needle in needles]

    def body(budget: int) -> list[int]:
        return insert(bed(budget - sum(map(len, lines))), list(zip(depths, lines)))

    return assemble(task, order, head=first, body=body, tail=last, answers=answers)


def assemble(
    task: Task,
    order: Order,
    *,
    head: Sequence[int],
    body: Callable[[int], list[int]],
    tail: Sequence[int],
    answers: Answers,
) -> Sample:
    """The sample of order.length tokens; `body` makes as many as head, tail and answers leave."""
    target, spans = answers.target(order.vocabulary)
    room = len(target) if order.exact else answers.room()
    return Sample(
        task=task.name,
        tokens=[*head, *body(order.length - room - len(head) - len(tail)), *tail],
        target=target,
        given=[False] * len(target),
        spans=spans,
        room=room,
        depth=order.depth,
        kind=answers.kind,
        texts=answers.texts,
        ordered=answers.ordered,
        choices=answers.choices,
    )


def text_minimum(words: Vocabulary, *fixed: str, drawn: int, answers: Answers, haystack: int = 0) -> int:
    """Tokens that suffice for text made of `fixed` pieces, `drawn` bytes that vary, the answers' room and a haystack."""
    return sum(len(words.encode(text)) for text in fixed) + drawn + answers.room() + haystack
