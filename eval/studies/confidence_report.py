"""The table and the figure of the study of confidence: points of every rule, and where the curves cross, with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes
from mezzotint.eval.plots import draw
from mezzotint.eval.results import read_results

HELD_OUT = "held-out"
FAMILIES = {"fixed steps": "topk", "threshold": "threshold", "entropy bound": "entropy"}
SLOWEST = "threshold=1.01"  # one token a pass
AIM = 1.5  # times the tokens per pass of fixed steps
STEPS = (8, 6, 5, 4, 3)  # fixed steps a block that are compared with
RESAMPLED = 2000
MEASURES = ("bound", "repeated", "distinct1", "distinct2")


@dataclass(frozen=True)
class Point:
    """One rule: estimates (1 + RESAMPLED,) of every measure, the first of the samples as they are.

    The others are of samples drawn with replacement (a bootstrap), the same prompts for every rule, so that a
    difference of two rules is paired. `speed` is tokens per pass; `n` samples.
    """

    rule: str
    n: int
    speed: np.ndarray
    measures: dict[str, np.ndarray]


Curve = list[Point]  # one family of rules, slowest first


def points_of(rows: Iterable[dict]) -> dict[tuple[str, float], dict[str, Point]]:
    """(subject, temperature) -> rule -> point, of all whole cells. Raises InputError for rows of several settings."""
    cells: dict[tuple[str, float, str], dict[int, dict]] = {}
    settings = set()
    for row in rows:
        identity = row["identity"]
        settings.add(tuple(identity[name] for name in ("samples", "prompt_tokens", "new_tokens", "draws", "seed")))
        key = (identity["subject"], identity["temperature"], identity["rule"])
        cells.setdefault(key, {})[identity["sample"]] = row["values"]
    if len(settings) > 1:
        raise InputError(f"the results are of {len(settings)} settings of the study: give each its own --out")
    found: dict[tuple[str, float], dict[str, Point]] = {}
    for (subject, temperature, rule), samples in cells.items():
        if len(samples) == next(iter(settings))[0]:
            found.setdefault((subject, temperature), {})[rule] = point(rule, [samples[i] for i in sorted(samples)])
    return found


def point(rule: str, samples: list[dict]) -> Point:
    """Ratios of sums for what is counted a token or a pass, means over samples for the rest."""
    count = len(samples)
    resampled = np.random.default_rng(0).integers(count, size=(RESAMPLED, count))
    chosen = np.concatenate([np.arange(count)[None], resampled])  # (1 + RESAMPLED, count)
    sums = {name: np.array([s[name] for s in samples], dtype=float)[chosen].sum(axis=1) for name in samples[0]}
    measures = {name: sums[name] / count for name in MEASURES if name != "bound"} | {
        "bound": sums["nats"] / sums["tokens"]
    }
    speed = sums["tokens"] / sums["nfe"] if sums["nfe"].all() else np.full(len(chosen), np.nan)
    return Point(rule, count, speed, measures)


def curve(points: dict[str, Point], family: str) -> Curve:
    """The family's points, slowest first. A threshold above 1 is one token a pass, the surest first: so is `topk=G`."""
    found = [p for rule, p in points.items() if rule.startswith(FAMILIES[family] + "=")]
    fixed = sorted((p for rule, p in points.items() if rule.startswith("topk=")), key=lambda p: p.speed[0])
    if found and family == "threshold" and fixed and np.allclose(fixed[0].speed, 1):
        found.append(Point(SLOWEST, fixed[0].n, fixed[0].speed, fixed[0].measures))
    return sorted(found, key=lambda p: p.speed[0])


# -- reading curves ------------------------------------------------------------------------------------------------


def at_speed(line: Curve, measure: str, speed: np.ndarray) -> np.ndarray:
    """The measure of a curve at so many tokens per pass, linear in their logarithm; not a number off its ends."""
    found = np.full(len(speed), np.nan)
    for i, wanted in enumerate(np.log(speed)):
        places = np.array([np.log(p.speed[i]) for p in line])
        values = np.array([p.measures[measure][i] for p in line])
        order = np.argsort(places)
        found[i] = np.interp(wanted, places[order], values[order], left=np.nan, right=np.nan)
    return found


def fastest_as_good(line: Curve, bound: np.ndarray) -> np.ndarray:
    """Most tokens per pass at which the curve's bound is no worse than `bound`.

    Bounds need not rise with speed: the last crossing counts. At the curve's fast end where it is as good even there;
    not a number where it is never as good.
    """
    found = np.full(len(bound), np.nan)
    for i, wanted in enumerate(bound):
        pairs = sorted((np.log(p.speed[i]), p.measures["bound"][i]) for p in line)
        for j in range(len(pairs) - 1, -1, -1):
            place, value = pairs[j]
            if value <= wanted:
                if j + 1 < len(pairs):
                    beyond, worse = pairs[j + 1]
                    place += (beyond - place) * (wanted - value) / (worse - value)
                found[i] = np.exp(place)
                break
    return found


def told(values: np.ndarray, digits: int = 2, *, signed: bool = False) -> str:
    """`0.42 [0.37, 0.48]`: the estimate and its 95% bootstrap interval; `-` where there is none.

    Resamples that are no number (off a curve's ends) are left out, which a star tells where over one in a hundred are.
    """
    if np.isnan(values[0]):
        return "-"
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    sign = "+" if signed else ""
    star = "*" if np.isnan(values[1:]).mean() > 0.01 else ""
    return f"{values[0]:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]{star}"


# -- table and figure ----------------------------------------------------------------------------------------------


def write(results: Path, folder: Path) -> str:
    """Write confidence.md and confidence.png into `folder`; returns the tables. Raises InputError without rows.

    What stands in confidence.md above the line of MARK is kept: it is written by hand.
    """
    rows = [row for path in sorted(results.glob("*.jsonl")) for row in read_results(path).rows.values()]
    points = points_of(rows)
    groups = [key for key in sorted(points, key=lambda key: (-key[1], key[0])) if curve(points[key], "fixed steps")]
    if not groups:
        raise InputError(f"{results} holds no rule with fixed steps yet: run the study first")
    text = comparison(points, groups) + "\n\n" + all_points(points, groups) + "\n"
    page = folder / "confidence.md"
    head = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else "# Confidence\n\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(page, (head + MARK + "\n" + text).encode())
    figure(points, groups, folder / "confidence.png")
    return text


MARK = "<!-- below: written by eval/studies/confidence.py -->"


def comparison(points: dict[tuple[str, float], dict[str, Point]], groups: list[tuple[str, float]]) -> str:
    """The threshold's curve beside each number of fixed steps: at equal bound, and at AIM times the tokens per pass."""
    lines = [
        "**Threshold beside fixed steps.** Speed at equal bound: tokens per pass of the threshold's curve where its bound "
        "is that of the fixed steps, over theirs; repeated 4-grams there, minus theirs. "
        f"At {AIM} times: the threshold's curve at {AIM} times the fixed steps' tokens per pass, minus the fixed steps. "
        "A lower bound, fewer repeated 4-grams and more distinct 2-grams are better. A star: more than one in a hundred "
        "resamples lies off the curve's ends, and is left out.",
        "",
        f"| model | temperature | steps | tokens/pass | speed at equal bound | repeated there | bound at {AIM} times "
        f"| repeated | distinct-2 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, temperature in groups:
        own = points[name, temperature]
        line = curve(own, "threshold")
        for steps in STEPS:
            fixed = own.get(f"topk={steps}")
            if fixed is None or not line:
                continue
            fastest = fastest_as_good(line, fixed.measures["bound"])
            there = at_speed(line, "repeated", fastest) - fixed.measures["repeated"]
            ended = "at least " if fastest[0] >= max(p.speed[0] for p in line) else ""
            cells = [ended + told(fastest / fixed.speed), told(there, 3, signed=True)]
            for measure, digits in (("bound", 2), ("repeated", 3), ("distinct2", 3)):
                off = at_speed(line, measure, AIM * fixed.speed) - fixed.measures[measure]
                cells.append(told(off, digits, signed=True))
            lines.append(f"| {name} | {temperature} | {steps} | {fixed.speed[0]:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def all_points(points: dict[tuple[str, float], dict[str, Point]], groups: list[tuple[str, float]]) -> str:
    """Every rule of every model and temperature; last what the held-out text itself would be."""
    lines = [
        "**All points.**",
        "",
        "| model | temperature | rule | n | tokens/pass | bound, nats/token | repeated 4-grams | distinct-1 | distinct-2 |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, temperature in groups:
        own = points[name, temperature]
        listed = [p for family in FAMILIES for p in curve(own, family) if p.rule != SLOWEST]
        for p in [*listed, *held_out(points, name)]:
            cells = [told(p.speed)] + [
                told(p.measures[measure], 2 if measure == "bound" else 3) for measure in MEASURES
            ]
            shown = "-" if p.rule == HELD_OUT else temperature
            lines.append(f"| {name} | {shown} | {p.rule} | {p.n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def held_out(points: dict[tuple[str, float], dict[str, Point]], name: str) -> list[Point]:
    return [own[HELD_OUT] for (subject, _), own in points.items() if subject == name and HELD_OUT in own]


def figure(points: dict[tuple[str, float], dict[str, Point]], groups: list[tuple[str, float]], path: Path) -> None:
    """Bound (above) and repeated 4-grams (below) against tokens per pass; a column a model, greedy dashed."""
    names = sorted({name for name, _ in groups})
    panels = [(name, measure) for measure in ("bound", "repeated") for name in names]

    def paint(*axes) -> None:
        for axis, (name, measure) in zip(axes, panels):
            for number, family in enumerate(FAMILIES):
                for temperature in [t for subject, t in groups if subject == name]:
                    style = "o-" if temperature else "o--"
                    _line(
                        axis,
                        curve(points[name, temperature], family),
                        measure,
                        style,
                        f"C{number}",
                        family,
                        temperature,
                    )
            for own in held_out(points, name):
                axis.axhline(own.measures[measure][0], color="0.5", linestyle=":", label="held-out text")
            label = "bound, nats/token" if measure == "bound" else "repeated 4-grams"
            axis.set(title=name, xlabel="tokens per pass (95% intervals)", ylabel=label, xscale="log", ylim=(0, None))
            axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=7)

    draw(path, paint, panels=len(panels), columns=len(names), size=(4.6, 3.4))


def _line(axis, line: Curve, measure: str, style: str, color: str, family: str, temperature: float) -> None:
    if not line:
        return
    values = np.array([p.measures[measure] for p in line])
    low, high = np.percentile(values[:, 1:], [2.5, 97.5], axis=1)
    errors = [np.maximum(values[:, 0] - low, 0), np.maximum(high - values[:, 0], 0)]
    label = f"{family}, temperature {temperature}" if temperature else f"{family}, greedy"
    places = [p.speed[0] for p in line]
    axis.errorbar(
        places, values[:, 0], yerr=errors, fmt=style, color=color, label=label, capsize=2, markersize=3, linewidth=1
    )
