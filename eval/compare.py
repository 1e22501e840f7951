"""What `mezzotint-eval compare` does: pairs the rows of two subjects, cell by cell, and states their differences."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mezzotint.eval.compare_statistics import Difference, holm, paired_means, paired_ratios, paired_shares
from mezzotint.eval.report_files import require_own, write_markdown
from mezzotint.eval.report_read import Collected, collect, grouped, without
from mezzotint.eval.report_section import table
from mezzotint.models.errors import InputError

ASKED = ("vocabulary", "text")  # of an identity: what the prompts were made with
UNITS = ("index", "depth", "row", "document")  # what tells the rows of one cell apart
DIFFERENT = (
    "their tokenizers, texts or versions differ. Compare releases of one tokenizer, scored by one version on one text"
)


@dataclass(frozen=True)
class Pair:
    """The rows of A and of B for one sample, row or task."""

    a: dict
    b: dict

    @property
    def identity(self) -> dict:
        return self.a["identity"]


@dataclass(frozen=True)
class Line:
    """One quantity of one cell: the values of A and B, their difference, and in how many pairs one alone was right."""

    cell: str
    quantity: str
    n: int
    a: float
    b: float
    difference: Difference
    only: tuple[int, int] | None = None


def run(options: argparse.Namespace) -> int:
    if not 0 < options.confidence < 1:
        raise InputError(f"--confidence is {options.confidence:g}; it must be between 0 and 1, for example 0.95")
    names, sides = read_sides(options.results, options.subjects)
    out = Path(options.out) if options.out else None
    if out is not None:
        require_own(out)
    pairs, alone = pair_rows(*sides, names=names)
    text = describe(compare(pairs, confidence=options.confidence), names, confidence=options.confidence, alone=alone)
    print(text)
    if out is not None:
        write_markdown(out, text + "\n")
        print("written:", out)
    return 0


def read_sides(
    paths: Sequence[str], subjects: Sequence[str] | None
) -> tuple[tuple[str, str], tuple[list[dict], list[dict]]]:
    """Names and rows of A and B. Raises InputError where it is not clear who they are."""
    if len(paths) > 2:
        raise InputError(f"{len(paths)} results files: give one that holds both subjects, or two")
    found = [collect([path]) for path in paths]
    if subjects is None:
        named = [sorted(own.subjects) for own in found]
        if len(paths) != 2 or any(len(names) != 1 for names in named):
            held = "; ".join(", ".join(names) for names in named)
            raise InputError(f"which subjects are to be compared? Give --subjects A B out of: {held}")
        subjects = [names[0] for names in named]
    if len(paths) == 1 and subjects[0] == subjects[1]:
        raise InputError(f"{subjects[0]} cannot be compared with itself; name two subjects")
    return (subjects[0], subjects[1]), (_rows_of(found[0], subjects[0]), _rows_of(found[-1], subjects[1]))


def _rows_of(found: Collected, subject: str) -> list[dict]:
    if subject not in found.subjects:
        held = ", ".join(sorted(found.subjects))
        raise InputError(f"{found.files[0]} holds no subject {subject!r}; it holds {held}")
    return [row for row in found.rows if row["identity"]["subject"] == subject and row["status"] == "ok"]


def pair_rows(a: list[dict], b: list[dict], *, names: tuple[str, str]) -> tuple[list[Pair], tuple[int, int]]:
    """Rows of the same cell and sample, and how many rows each side has alone. Speed rows have no pairs.

    Raises InputError where what was asked differs: for one sample of both, or for all of a task.
    """
    a, b = ([row for row in rows if not row["identity"]["task"].startswith("speed")] for rows in (a, b))
    other = {_key(row): row for row in b}
    pairs = [Pair(row, other[_key(row)]) for row in a if _key(row) in other]
    for pair in pairs:
        if _prompts(pair.a) != _prompts(pair.b):
            raise InputError(f"the prompts of {_sample(pair)} differ between {names[0]} and {names[1]}: {DIFFERENT}")
    paired = {pair.identity["task"] for pair in pairs}
    for row in a:
        task = row["identity"]["task"]
        if task not in paired and any(_key(row, *ASKED) == _key(twin, *ASKED) for twin in b):
            raise InputError(f"the prompts of {task} differ between {names[0]} and {names[1]}: {DIFFERENT}")
    if not pairs:
        raise InputError(f"{names[0]} and {names[1]} have no cell in common: score both with the same options")
    return pairs, (len(a) - len(pairs), len(b) - len(pairs))


def _key(row: dict, *beside: str) -> str:
    return json.dumps(without(row["identity"], "subject", *beside), sort_keys=True)


def _prompts(row: dict) -> object:
    """What names the prompts of a row: of a sample, of all of lm-eval's documents; a bound's text is in its identity."""
    return row["values"].get("prompt", row["values"].get("prompts"))


def _sample(pair: Pair) -> str:
    told = [
        f"{name} {pair.identity[name]}" for name in ("length", "index", "row") if pair.identity.get(name) is not None
    ]
    return ", ".join([pair.identity["task"], *told])


def compare(pairs: list[Pair], *, confidence: float) -> list[Line]:
    """Every quantity of every cell, in the order of the results."""
    cells = grouped([pair.a for pair in pairs], lambda row: without(row["identity"], "subject", *UNITS))
    by_key = {pair.a["key"]: pair for pair in pairs}
    lines: list[Line] = []
    for rows in cells.values():
        own = [by_key[row["key"]] for row in rows]
        kind = own[0].identity["task"].partition("/")[0]
        of_kind = {"retrieval": _retrieval, "bound": _bound, "lm-eval": _harness}
        if kind in of_kind:
            lines += of_kind[kind](own, _cell_name(own[0].identity), confidence)
    return lines


def _cell_name(identity: dict) -> str:
    told = [identity["task"]]
    told += [f"{identity['length']} tokens"] if isinstance(identity.get("length"), int) else []
    told += ["needle removed"] if identity.get("needle") is False else []
    options = identity.get("options") or {}
    told += [f"{name} {options[name]}" for name in ("pairs", "queries", "haystack") if name in options]
    told += [f"rows of {identity['row_length']}"] if "row_length" in identity else []
    return ", ".join(told)


def _retrieval(pairs: list[Pair], cell: str, confidence: float) -> list[Line]:
    lines = [_right_or_wrong(pairs_values(pairs, "correct"), cell, "correct", confidence)]
    for name in ("part", "argmax"):
        lines.append(_mean(pairs_values(pairs, name), cell, name, confidence))
    finite = [pair for pair in pairs if None not in (pair.a["values"]["nats"], pair.b["values"]["nats"])]
    if finite:
        lines.append(_mean(pairs_values(finite, "nats"), cell, "nats of the answer", confidence))
    return lines


def _bound(pairs: list[Pair], cell: str, confidence: float) -> list[Line]:
    return [_per_token(pairs_values(pairs, "nats"), pairs_values(pairs, "tokens"), cell, confidence)]


def _harness(pairs: list[Pair], cell: str, confidence: float) -> list[Line]:
    """One row a task: its documents are the pairs."""
    a, b = (dict(row["values"]["samples"]) for row in (pairs[0].a, pairs[0].b))
    lines = []
    if {"nats", "tokens"} <= set(a) & set(b):  # documents of any length: their ratio is the score
        lines.append(_per_token((a.pop("nats"), b.pop("nats")), (a.pop("tokens"), b.pop("tokens")), cell, confidence))
    for metric in a:
        both = (a[metric], b.get(metric, []))
        if not both[0] or len(both[0]) != len(both[1]):
            continue
        binary = all(value in (0, 1) for values in both for value in values)
        lines.append((_right_or_wrong if binary else _mean)(both, cell, metric, confidence))
    return lines


def _per_token(
    nats: tuple[list[float], list[float]], tokens: tuple[list[float], list[float]], cell: str, confidence: float
) -> Line:
    if tokens[0] != tokens[1]:
        raise InputError(f"{cell}: the two sides scored different numbers of tokens: {DIFFERENT}")
    difference, total = paired_ratios(*nats, tokens[0], confidence=confidence), sum(tokens[0])
    return Line(cell, "nats/token (<=)", len(nats[0]), sum(nats[0]) / total, sum(nats[1]) / total, difference)


def pairs_values(pairs: list[Pair], name: str) -> tuple[list[float], list[float]]:
    return [float(p.a["values"][name]) for p in pairs], [float(p.b["values"][name]) for p in pairs]


def _right_or_wrong(both: tuple[list[float], list[float]], cell: str, quantity: str, confidence: float) -> Line:
    outcomes = list(zip(*both))
    counts = {name: outcomes.count(name) for name in ((1, 1), (1, 0), (0, 1), (0, 0))}
    difference = paired_shares(*counts.values(), confidence=confidence)
    n, only = len(outcomes), (counts[1, 0], counts[0, 1])
    return Line(cell, quantity, n, sum(both[0]) / n, sum(both[1]) / n, difference, only)


def _mean(both: tuple[list[float], list[float]], cell: str, quantity: str, confidence: float) -> Line:
    n = len(both[0])
    return Line(cell, quantity, n, sum(both[0]) / n, sum(both[1]) / n, paired_means(*both, confidence=confidence))


def _probability(p: float) -> str:
    return f"{p:.3g}" if p > 0 else "<1e-15"


def describe(lines: list[Line], names: tuple[str, str], *, confidence: float, alone: tuple[int, int]) -> str:
    """The table, with how it was made above it."""
    corrected = holm([line.difference.p for line in lines])
    rows = []
    for line, p in zip(lines, corrected):
        d = line.difference
        only = "-" if line.only is None else f"{line.only[0]} / {line.only[1]}"
        values = (f"{line.a:.4f}", f"{line.b:.4f}", f"{d.value:+.4f}", f"{d.low:+.4f} to {d.high:+.4f}")
        rows.append([line.cell, line.quantity, str(line.n), *values, only, _probability(d.p), _probability(p)])
    columns = [
        "cell",
        "quantity",
        "pairs",
        "A",
        "B",
        "A - B",
        f"{confidence:.0%} interval",
        "A alone / B alone right",
        "p",
        "Holm",
    ]
    return (
        f"A is {names[0]}, B is {names[1]}; rows without a partner: {alone[0]} of A, {alone[1]} of B. Right or wrong: "
        "McNemar's exact test and Newcombe's interval of paired shares; shares, nats and scores: Student's t on "
        "paired differences. Holm: "
        "p corrected for the number of lines. Bounds (nats) are better when lower.\n\n" + table(columns, rows, left=2)
    )
