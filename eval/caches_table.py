"""Table and figure of a comparison of cache policies: what each costs and what it is worth, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzotint.eval.caches_plan import Cell
from mezzotint.eval.intervals import mean_and_error, wilson
from mezzotint.eval.plots import short_count
from mezzotint.eval.report_section import table as markdown

COLUMNS = (
    *("subject", "policy", "tokens", "batch", "n", "tokens/s", "speed-up", "NFE", "recomputed, tokens", "of uncached"),
    *("peak, kB", "end, kB", "decisions", "agreement", "nats/token", "correct"),
)
NOTE = (
    "tokens/s: written tokens of all rows over all seconds, prompt and preparation included, mean over batches ± standard "
    "error. speed-up: over `none` of the same cell. recomputed: tokens a sample that decoding ran through the layers; of "
    "uncached: over what the same passes run without a cache of the canvas. peak, end: the most bytes of keys, values, "
    "states and shared parts held at one time, and those at the end, for the whole batch. decisions: share of the time "
    "spent in the policy. agreement: tokens equal to those of `none`; nats/token: bound of what was written under the "
    "model itself; correct: the answer, of several the first, Wilson 95%. ± is one standard error over samples."
)


@dataclass(frozen=True)
class Line:
    """One cell's figures; a mean stands with its standard error."""

    subject: str
    policy: str  # spelled
    length: int
    batch: int
    n: int
    rate: tuple[float, float]
    speed_up: tuple[float, float]
    nfe: float
    recomputed: float
    share: float
    peak_bytes: int
    end_bytes: int
    decisions: float
    agreement: tuple[float, float]
    nats: tuple[float, float]
    correct: tuple[int, int] | None  # of how many

    @property
    def name(self) -> str:
        """The policy's, without its parameters."""
        return self.policy.partition(":")[0]


def lines_of(cells: list[Cell], rows: dict[Cell, list[dict]]) -> list[Line]:
    """Figures of every cell with rows that are `ok`."""
    return lines_of_rows([rows[cell] for cell in cells])


def lines_of_rows(groups: list[list[dict]]) -> list[Line]:
    """The same of results rows, one group a cell; the uncached decode is found among them."""
    done = [[row for row in group if row["status"] == "ok"] for group in groups]
    base = {
        _place(group[0]["identity"]): batches_of([row["values"] for row in group])
        for group in done
        if group and group[0]["identity"]["policy"] == "none"
    }
    return [_line(group, base.get(_place(group[0]["identity"]), {})) for group in done if group]


def _place(identity: dict) -> tuple:
    return identity["subject"], identity["length"], identity["batch"], identity["block"]


def _line(rows: list[dict], base: dict[int, float]) -> Line:
    """Figures of one cell; base: tokens a second of every batch of the uncached decode."""
    identity, values = rows[0]["identity"], [row["values"] for row in rows]
    batches = {value["group"]: value for value in values}.values()
    marked = [value["correct"] for value in values if value["correct"] is not None]
    return Line(
        subject=identity["subject"],
        policy=identity["policy"],
        length=identity["length"],
        batch=identity["batch"],
        n=len(values),
        rate=mean_and_error([value["tokens_per_s"] for value in batches]),
        speed_up=_ratio(batches_of(values), base),
        nfe=_mean([value["nfe"] for value in batches]),
        recomputed=_mean([value["tokens_recomputed"] for value in values]),
        share=sum(v["tokens_recomputed"] for v in values) / sum(v["tokens_uncached"] for v in values),
        peak_bytes=max(value["peak_bytes"] for value in values),
        end_bytes=max(value["held_bytes"] for value in values),
        decisions=sum(v["decision_seconds"] for v in batches) / sum(v["seconds"] for v in batches),
        agreement=mean_and_error([v["agreement"] for v in values if v["agreement"] is not None]),
        nats=mean_and_error([v["nats"] / max(v["written_tokens"], 1) for v in values if v["nats"] is not None]),
        correct=(sum(marked), len(marked)) if marked else None,
    )


def batches_of(values: list[dict]) -> dict[int, float]:
    """Tokens a second of every batch."""
    return {value["group"]: value["tokens_per_s"] for value in values}


def _ratio(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, float]:
    """Mean and standard error of the batches' own ratios: both decoded the same prompts."""
    return mean_and_error([rate / theirs[group] for group, rate in ours.items() if group in theirs])


def _mean(values: Sequence[float]) -> float:
    return mean_and_error(values)[0]


def table(lines: list[Line], sentences: dict[str, list[str]], warnings: Sequence[str] = ()) -> str:
    """Markdown; below it what had no object, and warnings."""
    notes = [f"- {', '.join(subjects)}: {sentence}" for sentence, subjects in sentences.items()]
    return "\n".join([table_of(lines), "", NOTE, *(["", "Without an object:", *notes] if notes else []), *warnings])


def table_of(lines: list[Line]) -> str:
    """The figures alone."""
    return markdown(list(COLUMNS), [_cells(line) for line in lines], left=2)


def _cells(line: Line) -> list[str]:
    correct = "-"
    if line.correct is not None:
        low, high = wilson(*line.correct)
        correct = f"{line.correct[0] / line.correct[1]:.3f} [{low:.3f}, {high:.3f}]"
    return [
        *(line.subject, line.policy, short_count(line.length), str(line.batch), str(line.n)),
        *(with_error(line.rate, 1), with_error(line.speed_up, 2), f"{line.nfe:.1f}", f"{line.recomputed:.0f}"),
        *(f"{line.share:.3f}", f"{line.peak_bytes / 1000:.0f}", f"{line.end_bytes / 1000:.0f}"),
        *(f"{line.decisions:.1%}", with_error(line.agreement, 3), with_error(line.nats, 3), correct),
    ]


def with_error(value: tuple[float, float], digits: int) -> str:
    mean, error = value
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" + ("" if math.isinf(error) else f" ± {error:.{digits}f}")


def quality(line: Line) -> tuple[float, float, float]:
    """What the figure shows upwards: questions answered where there are any, else agreement; with its lower, upper end."""
    if line.correct is not None:
        return (line.correct[0] / line.correct[1], *wilson(*line.correct))
    mean, error = line.agreement
    half = 0.0 if math.isinf(error) else 1.96 * error
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def panels_of(lines: list[Line]) -> list[tuple[str, list[Line]]]:
    """One panel a subject, length and batch."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(f"{line.subject}, {short_count(line.length)}, batch {line.batch}", []).append(line)
    return list(found.items())


def paint(axes: tuple, lines: list[Line]) -> None:
    """Speed-up to the right, quality upwards; a policy's settings are joined in the order of their speed."""
    for panel, (title, own) in zip(axes, panels_of(lines)):
        for i, name in enumerate(dict.fromkeys(line.name for line in own)):
            same = sorted((line for line in own if line.name == name), key=lambda line: line.speed_up[0])
            points = [quality(line) for line in same]
            panel.errorbar(
                [line.speed_up[0] for line in same],
                [mean for mean, _, _ in points],
                xerr=[0.0 if math.isinf(line.speed_up[1]) else line.speed_up[1] for line in same],
                yerr=[[mean - low for mean, low, _ in points], [high - mean for mean, _, high in points]],
                fmt="o-" if len(same) > 1 else "o",
                color=f"C{i % 10}",
                capsize=2,
                markersize=4,
                linewidth=1,
                label=name,
            )
        asked = own[0].correct is not None
        panel.set(ylim=(-0.03, 1.03), xlabel="speed-up over none", title=title)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
        panel.set_ylabel("first question answered (95% Wilson)" if asked else "agreement with none (95%)")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
