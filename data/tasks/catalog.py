"""The tasks by name, how one is written on a command line, and the one function that makes a sample."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, cast

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.counting import CommonWords, FrequentWords
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.niah import Niah
from mezzotint.data.tasks.passkey import Passkey
from mezzotint.data.tasks.phonebook import Phonebook
from mezzotint.data.tasks.sample import Order, Sample, Task
from mezzotint.data.tasks.symbols import Copy, Mqar
from mezzotint.data.tasks.variables import Variables
from mezzotint.data.tasks.vocabulary import Vocabulary

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Passkey(),
        Niah(name="niah_single"),
        Niah(name="niah_multikey", pairs=4),
        Niah(name="niah_multivalue", per_key=4),
        Niah(name="niah_multiquery", pairs=4, queries=4),
        Mqar(),
        Phonebook(name="phonebook"),
        Phonebook(name="phonebook_reversed", reversed=True),
        Variables(),
        CommonWords(),
        FrequentWords(),
        Copy(),
    )
}
FIXED = ("name", "placed", "reversed")  # fields that make a task what it is, not its difficulty
TEST, TRAIN, HELDOUT = "test", "train", "heldout"  # purposes of samples: no two ever share a key
LONGEST = 2**24


def parse_task(text: str) -> Task:
    """`mqar:pairs=16:queries=4` as a task. Raises InputError naming the nearest task or option."""
    name, *options = text.strip().split(":")
    task = named(name)
    for option in options:
        key, _, value = option.partition("=")
        task = with_option(task, key, value)
    return task


def named(name: str) -> Task:
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise InputError(f"no task {name!r}; the nearest of {', '.join(TASKS)} is {near!r}")
    return TASKS[name]


def with_option(task: Task, key: str, value: str) -> Task:
    """The task with one field of its difficulty changed."""
    own = options(task)
    if key not in own:
        known = f"its options are {', '.join(own)}" if own else "it has none"
        raise InputError(f"{task.name} has no option {key!r}: {known}")
    parsed: object = value
    if isinstance(own[key], bool):
        if value not in ("true", "false"):
            raise InputError(f"{task.name}: {key} is {value!r}; write true or false")
        parsed = value == "true"
    elif isinstance(own[key], int):
        if not value.isdecimal():
            raise InputError(f"{task.name}: {key} is {value!r}; write a whole number")
        parsed = int(value)
    changed: Any = {key: parsed}
    return cast(Task, dataclasses.replace(cast(Niah, task), **changed))


def spelled(task: Task) -> str:
    """The inverse of `parse_task`: the name and the options that differ from the task's own."""
    usual = options(TASKS[task.name])
    changed = {key: value for key, value in options(task).items() if value != usual[key]}
    words = {True: "true", False: "false"}
    parts = (f"{key}={words[value] if isinstance(value, bool) else value}" for key, value in changed.items())
    return ":".join((task.name, *parts))


def options(task: Task) -> dict[str, object]:
    """The fields that decide how hard a task is."""
    values = dataclasses.asdict(cast(Niah, task))
    return {key: value for key, value in values.items() if key not in FIXED}


def make_sample(
    task: Task,
    *,
    length: int,
    seed: int,
    index: int,
    depth: float | None,
    vocabulary: Vocabulary,
    needle: bool = True,
    purpose: str = TEST,
    exact: bool = False,
) -> Sample:
    """Sample `index` of a task: a pure function of its arguments, `length` tokens of prompt and room.

    All draws are keyed by (purpose, seed, task, length, index); the depth only moves the needle, `needle=False` only
    leaves it out. exact: the room is what this answer needs (a training document). Raises InputError for a length below
    the task's minimum.
    """
    least = task.minimum(vocabulary)
    if not least <= length <= LONGEST:
        raise InputError(
            f"{task.name} cannot be made of {length} tokens with this tokenizer: from {least} to {LONGEST} it can"
        )
    draws = Keyed(purpose, seed, task.name, length, index)
    place = depth if task.placed else None
    return task.lay(Order(vocabulary=vocabulary, draws=draws, length=length, depth=place, exact=exact, needle=needle))
