"""Cache policies in a report: what each costs and what it is worth, one section a setting, with the figure of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mezzotint.eval.caches_table import NOTE, Line, lines_of_rows, paint, panels_of, table_of
from mezzotint.eval.plots import draw
from mezzotint.eval.report_read import grouped, setting_words, without
from mezzotint.eval.report_section import Section, file_name

CELL = ("subject", "policy", "length", "batch")
OWN = (*CELL, "block")  # that of a bidirectional model and the sub-block of a block-causal one are not the same


def sections(rows: list[dict]) -> list[Section]:
    """One section a setting: everything that makes rows comparable, models, policies, lengths and batches within."""
    blocks = grouped(rows, lambda row: [row["identity"]["subject"], row["identity"]["block"]])
    several = len(blocks) > len({row["identity"]["subject"] for row in rows})  # of one model: then they are told apart
    own = CELL if several else OWN
    found = grouped(rows, lambda row: without(row["identity"], *own, "index"))
    names = [_name(group[0]["identity"]) for group in found.values()]
    out: list[Section] = []
    for group, name in zip(found.values(), names):
        number = names[: len(out) + 1].count(name)
        out.append(_section(group, own, name=name if number == 1 else f"{name} ({number})"))
    return out


def _name(identity: dict) -> str:
    """What was continued, and which part of it was shared."""
    what = identity["prompts"].rpartition(" ")[0] or identity["prompts"]
    return " ".join(["caches", what, *([f"shared {identity['shared']}"] if identity["shared"] else [])])


def _section(rows: list[dict], own: tuple[str, ...], *, name: str) -> Section:
    cells = grouped(rows, lambda row: [row["identity"][part] for part in CELL])
    lines = lines_of_rows(list(cells.values()))
    text = f"Asked with {setting_words(rows[0]['identity'], *own, 'index')}.\n\n{table_of(lines)}\n\n{NOTE}"
    figures: dict[str, Callable[[Path], None]] = {}
    if lines:
        panels = len(panels_of(lines))
        figures[file_name(name, "quality.png")] = lambda path: draw(
            path, lambda *axes: paint(axes, lines), panels=panels, size=(5.5, 4)
        )
    return Section(name, text, {file_name(name, "cells.csv"): [_flat(line) for line in lines]}, figures)


def _flat(line: Line) -> dict:
    """A line for CSV: means and their errors apart."""
    out: dict[str, object] = {}
    for name, value in vars(line).items():
        if name == "correct":
            out |= {"correct": None, "asked": None} if value is None else {"correct": value[0], "asked": value[1]}
        elif isinstance(value, tuple):
            out |= {name: value[0], f"{name}_error": value[1]}
        else:
            out[name] = value
    return out
