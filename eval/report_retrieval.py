"""Retrieval in a report: accuracy against length with Wilson intervals, and by length and depth. No mean over lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from mezzotint.eval.intervals import wilson
from mezzotint.eval.plots import draw
from mezzotint.eval.report_read import grouped, setting_words, without
from mezzotint.eval.report_retrieval_plots import heatmaps, length_curves
from mezzotint.eval.report_retrieval_stats import Stats, depth_maps, stats
from mezzotint.eval.report_section import Section, file_name, table

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
