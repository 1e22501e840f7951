"""Variable tracking: chains of assignments in repeated sentences; all variables of one chain are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.haystack import REPEATED, repeated
from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.sample import Answers, Needle, Order, Sample, lay_text, text_minimum
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.words import variable_names

WINDOW = 0.2  # share of the haystack in which a chain stands, when it has a depth
HEAD = "Some lines of the following text give values to variables. Keep track of them.\n"
FIRST = "VAR {name} = {value}\n"
NEXT = "VAR {name} = VAR {before}\n"
TAIL = "Which variables hold the value {value}? The variables that hold {value} are"


@dataclass(frozen=True, kw_only=True)
class Variables:
    """`chains` chains of `hops` assignments behind the first; the first chain is asked for, its order is free."""

    name: str = "variables"
    placed: bool = True
    chains: int = 1
    hops: int = 4

    def __post_init__(self) -> None:
        if self.chains < 1 or self.hops < 0:
            raise InputError(f"{self.name}: {self.chains} chains of {self.hops} hops; give at least 1, and 0 or more")

    def minimum(self, vocabulary: Vocabulary) -> int:
        lines = self.chains * (1 + self.hops)
        answers = self._answers([""] * (1 + self.hops))
        haystack = 2 * len(vocabulary.encode(REPEATED))
        fixed = (HEAD, TAIL, *[NEXT] * lines)
        return text_minimum(vocabulary, *fixed, drawn=10 * lines + 10, answers=answers, haystack=haystack)

    def lay(self, order: Order) -> Sample:
        fresh = variable_names(order.draws.part("names"))
        values = [10_000 + number for number in islice(order.draws.part("values").distinct(90_000), self.chains)]
        needles: list[Needle] = []
        asked: list[str] = []
        for chain, value in enumerate(values):
            members = list(islice(fresh, 1 + self.hops))
            asked = asked or members
            if chain == 0 and not order.needle:
                continue
            depths = _depths(order.draws.part(f"chain {chain}"), len(members), None if chain else order.depth)
            texts = [FIRST.format(name=members[0], value=value)]
            texts += [NEXT.format(name=name, before=before) for before, name in pairwise(members)]
            needles += [Needle(text, depth) for text, depth in zip(texts, depths)]
        return lay_text(
            self,
            order,
            head=HEAD,
            bed=lambda budget: repeated(order.vocabulary, budget),
            needles=needles,
            tail=TAIL.format(value=values[0]),
            answers=self._answers(asked),
        )

    def _answers(self, texts: list[str]) -> Answers:
        return Answers(texts=texts, kind="variable", choices=26**5, ordered=False, longest=5)


def _depths(draws: Keyed, count: int, depth: float | None) -> list[float]:
    """Where the assignments of a chain stand, in order: in a window at `depth`, or anywhere."""
    start, width = (0.0, 1.0) if depth is None else (depth * (1 - WINDOW), WINDOW)
    return sorted(start + width * draws.uniform() for _ in range(count))
