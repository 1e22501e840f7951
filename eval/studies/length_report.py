"""The table and the figure of the study of length: every model at every multiple, seeds apart and together."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.eval.intervals import wilson
from mezzotint.eval.plots import draw
from mezzotint.eval.report_files import write_table
from mezzotint.eval.results import read_results

SEED = re.compile(r"-seed(\d+)")
SCALED = re.compile(r"\+([a-z]+)[\d.]+$")  # rotary positions scaled by the multiple: at 1x the model itself
NOT_LEARNED = "not learned"


@dataclass(frozen=True)
class Cell:
    """Right answers of one model, one seed, one task and one multiple of the training length."""

    task: str
    arm: str
    seed: int
    multiple: int
    right: int
    n: int


def write(answers: Path, folder: Path, *, learned: float, trained: int) -> str:
    """Write length.md, length.csv and length.png into `folder`, of the results files in `answers`; returns the Markdown.

    Models that were taught on another machine stay as the folder's table has them, unless `answers` holds them too.
    Raises InputError without answers, and for a table that is none.
    """
    rows = [row for path in sorted(answers.glob("*.jsonl")) for row in read_results(path).rows.values()]
    found = cells_of(rows, trained=trained)
    if not found:
        raise InputError(f"{answers} holds no answers yet: run the study first")
    cells = together(tabled(folder / "length.csv"), found)
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(table(cells, task, learned=learned) for task in sorted({cell.task for cell in cells})) + "\n"
    write_bytes(folder / "length.md", text.encode())
    write_table(folder / "length.csv", [line(cell) for cell in cells])
    tasks = sorted({cell.task for cell in cells})

    def paint(*axes) -> None:
        for axis, task in zip(axes, tasks):
            curves(axis, cells, task, learned=learned)

    draw(folder / "length.png", paint, panels=len(tasks))
    return text


def cells_of(rows: Iterable[dict], *, trained: int) -> list[Cell]:
    """Whole cells, by task, model, seed and multiple."""
    counts: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    for row in rows:
        identity = row["identity"]
        found = SEED.search(identity["subject"])
        if row["status"] != "ok" or found is None or identity["length"] % trained:
            continue
        arm = SCALED.sub(r"+\1", SEED.sub("", identity["subject"]))
        key = (identity["task"].removeprefix("retrieval/"), arm, int(found[1]), identity["length"] // trained)
        right, n = counts.get(key, (0, 0))
        counts[key] = right + bool(row["values"]["correct"]), n + 1
    for task, arm in {(task, arm) for task, arm, _, _ in counts if "+" in arm}:
        base = arm.partition("+")[0]
        for key in [key for key in counts if (key[0], key[1], key[3]) == (task, base, 1)]:
            counts[task, arm, key[2], 1] = counts[key]
    return [Cell(*key, *count) for key, count in sorted(counts.items())]


def tabled(path: Path) -> list[Cell]:
    """The cells of a table written before; none where there is no file. Raises InputError for one that cannot be read."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return [
                Cell(row["task"], row["arm"], *(int(row[name]) for name in ("seed", "multiple", "right", "n")))
                for row in csv.DictReader(lines)
            ]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(
            f"{path} is no table of this study ({error}): restore it, or write to another --folder"
        ) from error


def together(before: list[Cell], found: list[Cell]) -> list[Cell]:
    """Both, whole models at a time: of one that was asked anew, no cell from before."""
    asked = {(cell.task, cell.arm, cell.seed) for cell in found}
    kept = [cell for cell in before if (cell.task, cell.arm, cell.seed) not in asked]
    return sorted([*kept, *found], key=lambda cell: (cell.task, cell.arm, cell.seed, cell.multiple))


def line(cell: Cell) -> dict[str, object]:
    """As a line of CSV."""
    low, high = wilson(cell.right, cell.n)
    told = {name: getattr(cell, name) for name in ("task", "arm", "seed", "multiple", "right", "n")}
    return told | {"share": round(cell.right / cell.n, 4), "low": round(low, 4), "high": round(high, 4)}


def learned_seeds(cells: list[Cell], task: str, arm: str, learned: float) -> tuple[list[int], list[int]]:
    """Seeds of a model that learned the task, and those that did not."""
    first = [cell for cell in cells if (cell.task, cell.arm, cell.multiple) == (task, arm, 1)]
    knows = [cell.seed for cell in first if cell.right >= learned * cell.n]
    return knows, [cell.seed for cell in first if cell.seed not in knows]


def table(cells: list[Cell], task: str, *, learned: float) -> str:
    """Markdown: a line a model, the learned seeds together; each cell says right, Wilson's 95% and the seeds' range."""
    multiples = sorted({cell.multiple for cell in cells if cell.task == task})
    lines = [
        f"**{task}**: right answers of the seeds that learned it (at least {learned} at 1x), with Wilson's 95% over their "
        "samples, and the seeds' lowest and highest share.",
        "",
        "| model | seeds that learned | " + " | ".join(f"{multiple}x" for multiple in multiples) + " |",
        "|---|---|" + "---|" * len(multiples),
    ]
    for arm in sorted({cell.arm for cell in cells if cell.task == task}):
        knows, fails = learned_seeds(cells, task, arm, learned)
        start = f"| {arm} | {len(knows)} of {len(knows) + len(fails)} | "
        if not knows:
            first = [cell for cell in cells if (cell.task, cell.arm, cell.multiple) == (task, arm, 1)]
            told = f"{NOT_LEARNED}: {_words(first)}"
            lines.append(start + " | ".join([told, *["-"] * (len(multiples) - 1)]) + " |")
            continue
        own = [cell for cell in cells if (cell.task, cell.arm) == (task, arm) and cell.seed in knows]
        groups = [[cell for cell in own if cell.multiple == multiple] for multiple in multiples]
        lines.append(start + " | ".join(_words(group) if group else "-" for group in groups) + " |")
    return "\n".join(lines)


def _words(cells: list[Cell]) -> str:
    right, n = sum(cell.right for cell in cells), sum(cell.n for cell in cells)
    low, high = wilson(right, n)
    text = f"{right / n:.3f} [{low:.3f}, {high:.3f}]"
    if len(cells) > 1:
        shares = [cell.right / cell.n for cell in cells]
        text += f", seeds {min(shares):.2f} to {max(shares):.2f}"
    return f"{text}, n={n}"


def curves(axes, cells: list[Cell], task: str, *, learned: float) -> None:
    """One line a model over the seeds that learned; a thin one a seed. What was not learned stands in the legend alone."""
    asked = {cell.arm for cell in cells if cell.task == task}
    for number, arm in enumerate(sorted({cell.arm for cell in cells})):  # a color an arm, in all panels
        if arm not in asked:
            continue
        knows, _ = learned_seeds(cells, task, arm, learned)
        color = f"C{number}"
        own = [cell for cell in cells if (cell.task, cell.arm) == (task, arm) and cell.seed in knows]
        if not own:
            axes.plot([], [], color=color, linestyle=":", label=f"{arm}, {NOT_LEARNED}")
            continue
        multiples = sorted({cell.multiple for cell in own})
        sums = [[cell for cell in own if cell.multiple == multiple] for multiple in multiples]
        totals = [(sum(c.right for c in group), sum(c.n for c in group)) for group in sums]
        shares = [right / n for right, n in totals]
        bounds = [wilson(right, n) for right, n in totals]
        errors = [
            [max(0.0, s - low) for s, (low, _) in zip(shares, bounds)],
            [max(0.0, high - s) for s, (_, high) in zip(shares, bounds)],
        ]
        label = f"{arm}, {len(knows)} seed{'s' if len(knows) > 1 else ''}"
        axes.errorbar(multiples, shares, yerr=errors, fmt="o-", color=color, label=label, capsize=2, markersize=4)
        for seed in knows if len(knows) > 1 else []:
            line_ = [cell for cell in own if cell.seed == seed]
            axes.plot(
                [c.multiple for c in line_], [c.right / c.n for c in line_], color=color, alpha=0.35, linewidth=0.8
            )
    axes.set(title=task, xlabel="length, training lengths (95% Wilson)", ylabel="correct", ylim=(-0.03, 1.03))
    axes.set_xscale("log", base=2)
    places = sorted({cell.multiple for cell in cells})
    axes.set_xticks(places, [f"{place}x" for place in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
