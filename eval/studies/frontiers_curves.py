"""The curve of a training run: held-out bound against training FLOPs, both as the trainer wrote them down."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.errors import InputError

NEAR = 1.02  # a run ends with the step nearest to its FLOPs: asked this little beyond its last mark, it answers with it


@dataclass(frozen=True)
class Curve:
    """Marks in rising order. minutes: processor time of the whole run, 0 where nobody asked."""

    steps: tuple[int, ...]
    flops: tuple[float, ...]  # of training up to the mark: forward and backward, cut rows; bounds do not count
    bounds: tuple[float, ...]  # nats per token, linear schedule
    errors: tuple[float, ...]  # standard errors over the held-out rows, which all runs share
    minutes: float = 0.0

    def at(self, flops: float) -> float:
        """The bound at so many FLOPs, on a line over their logarithm between two marks; NaN beyond them."""
        for i, (low, high) in enumerate(zip(self.flops, self.flops[1:])):
            if low <= flops <= high:
                share = math.log(flops / low) / math.log(high / low)
                return self.bounds[i] + share * (self.bounds[i + 1] - self.bounds[i])
        near = bool(self.flops) and self.flops[-1] <= flops <= NEAR * self.flops[-1]
        return self.bounds[-1] if near else math.nan

    def error_at(self, flops: float) -> float:
        """The standard error of the nearest mark."""
        return self.errors[min(range(len(self.flops)), key=lambda i: abs(self.flops[i] - flops))]

    def first_below(self, bound: float) -> float | None:
        """FLOPs at which the bound first comes down to `bound`, between two marks as in `at`; None if it never does.

        Where it is there at the first mark already, that mark: the crossing was earlier.
        """
        for i, value in enumerate(self.bounds):
            if value <= bound:
                if i == 0:
                    return self.flops[0]
                share = (self.bounds[i - 1] - bound) / (self.bounds[i - 1] - value)
                return self.flops[i - 1] * (self.flops[i] / self.flops[i - 1]) ** share
        return None

    def words(self) -> str:
        if not self.flops:
            return "no bound yet"
        return f"{self.flops[-1]:.3g} FLOPs, bound {self.bounds[-1]:.4f} +- {self.errors[-1]:.4f} nats/token"


def curve(run: Path) -> Curve:
    """The curve of a run folder; without marks where nothing was trained. InputError where steps are without a record."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done, flops = 0, 0.0
    marks: list[tuple[int, float, float, float]] = []
    for record in map(json.loads, lines):
        step = record["step"]
        if record["kind"] == "train":
            # rate and pace are of the same seconds, so their product is what the trainer counted, whatever the clock said
            flops += record["flops_per_second"] * record["seconds_per_step"] * (step - done)
            done = step
        elif record["kind"] == "start" and step != done:
            raise InputError(f"{path} has no record of steps {done + 1} to {step}: remove {run} and train it again")
        elif record["kind"] == "validation" and step == done:
            marks.append((step, flops, record["nats_per_token"], record["nats_per_token_error"]))
    steps, counts, bounds, errors = zip(*marks) if marks else ((), (), (), ())
    return Curve(steps, counts, bounds, errors)
