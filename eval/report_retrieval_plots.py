"""Figures of retrieval: accuracy against length with Wilson intervals, and depth by length."""

from __future__ import annotations

import math
import re

from mezzotint.eval.intervals import wilson
from mezzotint.eval.plots import short_count
from mezzotint.eval.report_retrieval_stats import Stats


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
