"""How long a run still takes: steps at their recent pace, and the bounds and saves that are still to come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 50  # records whose pace counts


@dataclass
class Costly:
    """Something that happens every so many steps, and at the last one: bounds, saves."""

    every: int  # 0: never
    times: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.times, self.seconds = self.times + times, self.seconds + seconds

    def due(self, after: int, upto: int, *, last: int) -> int:
        """How often it comes at steps after+1 .. upto of a run that ends with step `last`."""
        if not self.every or upto <= after:
            return 0
        extra = upto == last and last % self.every != 0
        return upto // self.every - after // self.every + extra

    def left(self, step: int, last: int) -> float:
        """Seconds still to come after the record of `step`: those of that very step come after its record."""
        return self.seconds / self.times * self.due(step - 1, last, last=last) if self.times else 0.0


@dataclass
class Pace:
    """Time left of a run of `steps` steps.

    Only time spent in steps makes the pace: a long bound or save is counted as often as it is still to come, and what
    an earlier start took says nothing about this one, save as a first guess.
    """

    steps: int
    bounds: Costly
    saves: Costly
    guess: float | None = None  # seconds of a step, from an earlier start on as many ranks
    _recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, steps: int, seconds: float) -> None:
        """So many steps took so long, bounds and saves left out."""
        if steps > 0:
            self._recent.append((steps, seconds))

    def seconds_left(self, step: int) -> float | None:
        """After the record of `step`; None while nothing is known."""
        if self._recent:
            counts, seconds = zip(*self._recent)
            each: float | None = sum(seconds) / sum(counts)
        else:
            each = self.guess
        if each is None:
            return None
        return (self.steps - step) * each + self.bounds.left(step, self.steps) + self.saves.left(step, self.steps)
