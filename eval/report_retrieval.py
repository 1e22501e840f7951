"""Retrieval in a report: accuracy against length with Wilson intervals, and by length and depth. No mean over lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mezzotint.eval.intervals import mean_and_error, wilson
from mezzotint.eval.plots import draw, short_count
from mezzotint.eval.report_read import grouped, setting_words, without
from mezzotint.eval.report_section import Section, file_name, table
from mezzotint.eval.results import FAILED

LEARNED = 0.9  # below this at the training length a task is not learned, and says nothing about length
CELL = ("length", "depth", "index", "needle")  # what tells the rows of one setting and subject apart
COLUMNS = (
    *(
        "subject",
        "positions",
        "tokens",
        "of training",
        "needle",
        "n",
        "correct",
        "95%",
        "part",
        "substring",
        "argmax",
        "nats",
    ),
    *("fill min", "fill mean", "truncated", "empty", "no end", "status"),
)


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


def sections(rows: list[dict]) -> list[Section]:
    """One section a setting: everything that makes rows comparable, subjects and lengths within."""
    found = grouped(rows, lambda row: without(row["identity"], "subject", *CELL))
    names = [_setting_name(group) for group in found.values()]
    out: list[Section] = []
    for group, name in zip(found.values(), names):
        number = names[: len(out) + 1].count(name)
        out.append(_section(group, name=name if number == 1 else f"{name} ({number})"))
    return out


def _setting_name(rows: list[dict]) -> str:
    """The task, and what it was asked with where that differs from task to task."""
    identity = rows[0]["identity"]
    options = identity.get("options") or {}
    told = [f"{name}={options[name]}" for name in ("pairs", "queries", "haystack") if name in options]
    return " ".join([identity["task"], *told])


def _section(rows: list[dict], *, name: str) -> Section:
    cells = grouped(rows, lambda row: [row["identity"][part] for part in ("subject", "length", "needle")])
    found = sorted((stats(group) for group in cells.values()), key=lambda s: (s.subject, not s.needle, s.length))
    text = [
        f"Asked with {setting_words(rows[0]['identity'], *CELL)}. Correct: the first answers written are the right "
        "ones, strictly; 95% is Wilson's interval. Substring: RULER's match. Argmax: answer tokens that are likeliest "
        "with all masked. Nats: the bound of the whole answer. Fill: tokens of prompt and answer over those asked "
        "for. Empty: nothing written; no end: the room for the answer was used up.",
        _unlearned(found),
        table(list(COLUMNS), [_cells(s) for s in found]),
    ]
    with_depth = [row for row in rows if row["status"] == "ok" and row["identity"]["depth"] is not None]
    figures: dict[str, Callable[[Path], None]] = {}
    if any(s.n for s in found):
        figures[file_name(name, "length.png")] = lambda path: draw(path, lambda axes: length_curves(axes, found))
    tables = {file_name(name, "length.csv"): [s.line() for s in found]}
    if with_depth:
        maps = depth_maps([row for row in with_depth if row["identity"]["needle"]])
        tables[file_name(name, "depth.csv")] = [line for lines in maps.values() for line in lines]
        if maps:
            figures[file_name(name, "depth.png")] = lambda path: draw(
                path, lambda *axes: heatmaps(axes, maps), panels=len(maps), columns=3, size=(4.2, 3.6)
            )
    return Section(name, "\n\n".join(part for part in text if part), tables, figures)


def _unlearned(found: list[Stats]) -> str:
    """Subjects whose accuracy at the training length is too low to speak of length at all."""
    names = [s.subject for s in found if s.needle and s.multiple == 1 and s.n and s.share < LEARNED]
    if not names:
        return ""
    return f"Not learned (below {LEARNED} at the training length, so longer ones say nothing): {', '.join(names)}."


def _cells(s: Stats) -> list[str]:
    low, high = wilson(s.correct, s.n)
    times = f"{s.multiple:g}x" if s.multiple else "-"
    scores = ["-"] * 6
    if s.n:
        scores = [f"{s.share:.3f}", f"{low:.3f} to {high:.3f}"]
        scores += [f"{score:.3f}" for score in (s.part, s.substring, s.argmax)]
        scores.append(f"{s.nats[0]:.3f} ± {s.nats[1]:.3f}" if math.isfinite(s.nats[1]) else f"{s.nats[0]:.3f}")
    fill = [f"{share:.4f}" if s.n else "-" for share in s.fill]
    needle = "yes" if s.needle else "removed"
    return [
        s.subject,
        s.positions or "-",
        str(s.length),
        times,
        needle,
        str(s.n),
        *scores,
        *fill,
        "0",
        str(s.empty),
        str(s.endless),
        s.status,
    ]


def length_curves(axes, found: list[Stats]) -> None:
    """Accuracy against length, in multiples of the training length where all say theirs; the needle removed is dashed."""
    multiples = all(s.multiple is not None for s in found if s.n)

    def place(s: Stats) -> float:
        return s.multiple if multiples and s.multiple is not None else s.length

    families = sorted({family(s.subject) for s in found})
    for subject in sorted({s.subject for s in found}):
        i = families.index(family(subject))
        for needle, style in ((True, "o-"), (False, "s--")):
            own = [s for s in found if s.subject == subject and s.needle == needle and s.n]
            if not own:
                continue
            bounds = [wilson(s.correct, s.n) for s in own]
            below = [max(0.0, s.share - low) for s, (low, _) in zip(own, bounds)]
            above = [max(0.0, high - s.share) for s, (_, high) in zip(own, bounds)]
            label = subject if needle else f"{subject}, needle removed"
            axes.errorbar(
                [place(s) for s in own], [s.share for s in own], yerr=[below, above],
                fmt=style, color=f"C{i % 10}", label=label, capsize=2,
                linewidth=1.5 if needle else 1, markersize=4,
            )  # fmt: skip
    numbers = {s.n for s in found if s.n}
    count = f"n = {min(numbers)}" if len(numbers) == 1 else f"n = {min(numbers)} to {max(numbers)}"
    unit = "training lengths" if multiples else "tokens"
    axes.set(xlabel=f"length, {unit} ({count}, 95% Wilson)", ylabel="correct", ylim=(-0.03, 1.03))
    axes.set_xscale("log", base=2)
    places = sorted({place(s) for s in found if s.n})
    axes.set_xticks(places, [f"{at:g}x" if multiples else short_count(int(at)) for at in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def family(subject: str) -> str:
    """The subject's name without the number of its training seed: runs that differ in it alone share a colour."""
    return re.sub(r"[-_.]s(eed)?\d+", "", subject)


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


def heatmaps(axes: tuple, maps: dict[str, list[dict]]) -> None:
    """One panel a subject: depth downwards, length to the right, share as colour, with n in every cell."""
    for panel, (subject, lines) in zip(axes, maps.items()):
        lengths = sorted({line["length"] for line in lines})
        depths = sorted({line["depth"] for line in lines})
        grid = [[math.nan] * len(lengths) for _ in depths]
        for line in lines:
            row, column = depths.index(line["depth"]), lengths.index(line["length"])
            grid[row][column] = line["share"]
            dark = line["share"] < 0.5
            text = f"{line['share']:.2f}\nn={line['n']}"
            panel.text(column, row, text, ha="center", va="center", fontsize=5, color="white" if dark else "black")
        panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set_xticks(range(len(lengths)), [short_count(length) for length in lengths], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths], fontsize=7)
        panel.set_title(subject, fontsize=9)
        panel.set_xlabel("tokens", fontsize=8)
        panel.set_ylabel("depth of the needle", fontsize=8)
