"""Retrieval rows summed up: a subject at one length, and its shares by depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mezzotint.eval.intervals import mean_and_error, wilson
from mezzotint.eval.report_read import grouped
from mezzotint.eval.results import FAILED


@dataclass(frozen=True)
class Stats:
    """A subject at one length: `correct` of `n` rows, means of the graded scores, and what could have gone wrong."""

    subject: str
    length: int
    needle: bool
    trained: int | None
    positions: str
    n: int
    correct: int
    part: float
    substring: float
    argmax: float
    nats: tuple[float, float]  # of the whole answer, mean and standard error
    fill: tuple[float, float]  # least and mean
    empty: int
    endless: int
    status: str  # of a cell that failed as a whole, else ok

    @property
    def multiple(self) -> float | None:
        return self.length / self.trained if self.trained else None

    @property
    def share(self) -> float:
        return self.correct / self.n if self.n else math.nan

    def line(self) -> dict[str, object]:
        """As a line of CSV."""
        low, high = wilson(self.correct, self.n)
        return {
            "subject": self.subject,
            "positions": self.positions,
            "length": self.length,
            "training_length": self.trained,
            "multiple": self.multiple,
            "needle": self.needle,
            "n": self.n,
            "correct": self.correct,
            "share": self.share,
            "low": low,
            "high": high,
            "part": self.part,
            "substring": self.substring,
            "argmax": self.argmax,
            "nats": self.nats[0],
            "nats_error": self.nats[1],
            "fill_min": self.fill[0],
            "fill_mean": self.fill[1],
            "truncated": 0,
            "empty": self.empty,
            "no_end": self.endless,
            "status": self.status,
        }


def stats(rows: list[dict]) -> Stats:
    """Of all rows of one setting, subject, length and needle."""
    identity, found = rows[0]["identity"], [row["values"] for row in rows if row["status"] == "ok"]
    failed = [row["status"] for row in rows if row["status"] in FAILED]
    first = found[0] if found else {}

    def mean(name: str) -> float:
        return mean_and_error([float(values[name]) for values in found])[0]

    fills = [values["fill"] for values in found]
    return Stats(
        subject=identity["subject"],
        length=identity["length"],
        needle=identity["needle"],
        trained=first.get("trained"),
        positions=first.get("positions", ""),
        n=len(found),
        correct=sum(bool(values["correct"]) for values in found),
        part=mean("part"),
        substring=mean("substring"),
        argmax=mean("argmax"),
        nats=mean_and_error([values["nats"] for values in found if values["nats"] is not None]),
        fill=(min(fills), sum(fills) / len(fills)) if fills else (math.nan, math.nan),
        empty=sum(not values["written"] for values in found),
        endless=sum(not values["ended"] for values in found),
        status=failed[0] if failed else "ok",
    )


def depth_maps(rows: list[dict]) -> dict[str, list[dict]]:
    """Of every subject, one line a (length, depth): n, correct, share and its interval."""
    out: dict[str, list[dict]] = {}
    for group in grouped(rows, lambda row: [row["identity"][name] for name in ("subject", "length", "depth")]).values():
        identity, right = group[0]["identity"], sum(bool(row["values"]["correct"]) for row in group)
        low, high = wilson(right, len(group))
        line = {name: identity[name] for name in ("subject", "length", "depth")}
        line |= {"n": len(group), "correct": right, "share": right / len(group), "low": low, "high": high}
        out.setdefault(identity["subject"], []).append(line)
    return {
        subject: sorted(lines, key=lambda line: (line["length"], line["depth"]))
        for subject, lines in sorted(out.items())
    }
