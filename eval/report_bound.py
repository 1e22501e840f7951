"""Likelihood bounds in a report: with standard errors, by position and by share of masked tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from mezzotint.eval.plots import draw, short_count
from mezzotint.eval.report_read import grouped, setting_words, without
from mezzotint.eval.report_section import Section, file_name, table
from mezzotint.eval.tally import LEVELS, ratio, summarize

ROW = ("row", "document")  # what tells the rows of one setting and subject apart
BINS = {"position": "by_position", "masks": "by_level"}
COLUMNS = (
    "subject",
    "n",
    "tokens",
    "bytes of text",
    "nats/token",
    "bits/byte",
    "Monte-Carlo error, nats/token",
    "failed",
)


def sections(rows: list[dict]) -> list[Section]:
    """One section a text and way of drawing."""
    found = grouped(rows, lambda row: without(row["identity"], "subject", *ROW))
    many = len(found) > 1
    return [_section(group, name=f"bound {i}" if many else "bound") for i, group in enumerate(found.values(), start=1)]


def _section(rows: list[dict], *, name: str) -> Section:
    subjects = grouped(sorted(rows, key=lambda row: row["identity"]["subject"]), lambda row: row["identity"]["subject"])
    unit = "document" if "document" in rows[0]["identity"] else "row"
    lines, shown = [], []
    bins: dict[str, dict[str, list[dict]]] = {kind: {} for kind in BINS}
    for group in subjects.values():
        subject, scored = group[0]["identity"]["subject"], [row["values"] for row in group if row["status"] == "ok"]
        if not scored:
            shown.append([subject, "0", *["-"] * 5, str(len(group))])
            continue
        bound = summarize(scored)
        lines.append({"subject": subject, **vars(bound), "failed": len(group) - len(scored)})
        shown.append(
            [
                *(subject, str(bound.rows), str(bound.tokens), str(bound.bytes)),
                _with_error(bound.nats_per_token, bound.nats_per_token_error),
                _with_error(bound.bits_per_byte, bound.bits_per_byte_error),
                "-" if bound.monte_carlo_error is None else f"{bound.monte_carlo_error:.4f}",
                str(len(group) - len(scored)),
            ]
        )
        for kind, key in BINS.items():
            if all(key in values for values in scored):
                bins[kind][subject] = by_bin(scored, key, subject=subject)
    text = (
        f"Text and draws: {setting_words(rows[0]['identity'], *ROW)}. Upper bounds of -log p, ± one standard error "
        f"over {unit}s (which holds what the draws leave open; that part alone is the Monte-Carlo error)."
    )
    tables = {file_name(name, "all.csv"): lines}
    figures: dict[str, Callable[[Path], None]] = {}
    for kind, found in bins.items():
        if found:
            tables[file_name(name, f"{kind}.csv")] = [line for own in found.values() for line in own]
            figures[file_name(name, f"{kind}.png")] = _figure(found, kind)
    return Section(name, text + "\n\n" + table(list(COLUMNS), shown), tables, figures)


def by_bin(scored: list[dict], key: str, *, subject: str) -> list[dict]:
    """One line a bin: nats a token with its standard error over rows, and how many rows and tokens it holds."""
    pairs: dict[float, list[tuple[float, float]]] = {}
    for values in scored:
        for edge, nats, tokens in values[key]:
            if tokens:
                pairs.setdefault(edge, []).append((nats, tokens))
    lines = []
    for edge, own in sorted(pairs.items()):
        value, error = ratio([nats for nats, _ in own], [tokens for _, tokens in own])
        tokens = sum(count for _, count in own)
        lines.append(
            {"subject": subject, "from": edge, "nats_per_token": value, "error": error, "n": len(own), "tokens": tokens}
        )
    return lines


def _figure(found: dict[str, list[dict]], kind: str) -> Callable[[Path], None]:
    def paint(axes) -> None:
        for i, (subject, lines) in enumerate(found.items()):
            errors = [line["error"] if math.isfinite(line["error"]) else 0.0 for line in lines]
            values = [line["nats_per_token"] for line in lines]
            if kind == "position":  # bins double from 64 on: evenly spaced, the first one included
                places = [_place(line["from"]) for line in lines]
            else:
                places = [line["from"] + 0.5 / LEVELS for line in lines]
            axes.errorbar(
                places, values, yerr=errors, fmt="o-", color=f"C{i % 10}", label=subject, capsize=2, markersize=4
            )
        if kind == "position":
            edges = sorted({line["from"] for lines in found.values() for line in lines})
            axes.set_xticks([_place(edge) for edge in edges], [short_count(int(edge)) for edge in edges])
            axes.set(xlabel="position, tokens (lower edge)", ylabel="nats/token (<=)")
        else:
            axes.set(xlabel="share of the block that is masked", ylabel="nats a masked token", xlim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    return lambda path: draw(path, paint)


def _place(edge: float) -> float:
    return math.log2(edge) if edge else 5.0  # the bin before 64


def _with_error(value: float, error: float) -> str:
    return f"<= {value:.4f} ± {error:.4f}" if math.isfinite(error) else f"<= {value:.4f}"
