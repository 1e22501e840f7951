"""The table and the figure of the study of frontiers: pairs of runs, and the share of FLOPs that `all` needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from frontiers_curves import Curve  # beside this file

from mezzotint.data.files import write_bytes
from mezzotint.eval.environment import environment
from mezzotint.eval.plots import draw
from mezzotint.eval.report_files import write_table

TERA = 1e12
AIM = 0.25
SHOWN = (0.25, 0.5, 1.0)  # shares of the FLOPs of `one` at which the table says the bound of `all`
FAR = 0.5  # pairs whose `one` has less than this share of the longest one's FLOPs wait for more minutes


@dataclass(frozen=True)
class Pair:
    """The two runs of one backbone and one seed. torch: torch's count over ours, of `one` and of `all`."""

    backbone: str
    seed: int
    one: Curve
    all: Curve
    torch: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.backbone}, seed {self.seed}"


@dataclass(frozen=True)
class Found:
    """A pair at `flops` of `one`: where that comes to, and the share of it at which `all` is as low, None if nowhere."""

    pair: Pair
    flops: float
    bound: float
    share: float | None

    @property
    def by_torch(self) -> float | None:
        one, all_ = self.pair.torch
        return None if self.share is None else self.share * all_ / one

    @property
    def words(self) -> str:
        if self.share is not None:
            early = self.share * self.flops <= self.pair.all.flops[0]
            return f"{'<= ' if early else ''}{self.share:.3f}"
        return f"not by {self.pair.all.flops[-1] / self.flops:.2f}"


def write(pairs: list[Pair], folder: Path) -> str:
    """Write frontiers.md, frontiers.csv and frontiers.png into `folder`; returns the Markdown."""
    backbones = list(dict.fromkeys(pair.backbone for pair in pairs))
    found = [one for backbone in backbones for one in cut([pair for pair in pairs if pair.backbone == backbone])]
    compared = [one.pair for one in found]
    folder.mkdir(parents=True, exist_ok=True)
    text = table(found, waiting=[pair for pair in pairs if pair not in compared])
    write_bytes(folder / "frontiers.md", text.encode())
    write_table(folder / "frontiers.csv", [line for pair in pairs for line in lines(pair)])

    def paint(*axes) -> None:
        for axis, backbone in zip(axes, backbones):
            curves(axis, [one for one in found if one.pair.backbone == backbone])

    draw(folder / "frontiers.png", paint, panels=len(backbones))
    return text


def cut(pairs: list[Pair]) -> list[Found]:
    """Seeds of one backbone, their runs of `one` cut to the same FLOPs; without those that are not far enough."""
    far = max(pair.one.flops[-1] for pair in pairs) * FAR
    ready = [pair for pair in pairs if pair.one.flops[-1] >= far]
    flops = min(pair.one.flops[-1] for pair in ready)
    found = []
    for pair in ready:
        bound = pair.one.at(flops)
        reached = pair.all.first_below(bound)
        found.append(Found(pair, flops, bound, None if reached is None else reached / flops))
    return found


def table(found: list[Found], *, waiting: list[Pair]) -> str:
    """Markdown: what was done, a line a pair, the range over seeds of each backbone."""
    machine = environment()
    heads = "".join(f" `all` at {share:.0%} |" for share in SHOWN)
    text = [
        "TFLOP: of training, forward and backward, cut rows, as the trainer counts them; the seeds of a backbone are cut to "
        "the same. Held-out bound in nats per token, linear schedule, with its standard error over the held-out rows; all "
        "runs are asked the same rows with the same noise. Share: FLOPs at which `all` comes down to the bound that `one` "
        f"ends with, over those of `one` (aim: {AIM:g}), by our count and by torch's, which leaves out what the last layer "
        "does not compute of the clean stream. Core-minutes: of `one` and of `all`.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, one thread a run, float32.",
        "",
        f"| backbone | seed | TFLOP of `one` | `one` at its end |{heads} share | by torch's count | core-minutes |",
        "|---|---:|---:|---|" + "---|" * len(SHOWN) + "---|---|---|",
    ]
    text += [row(one) for one in found]
    text.append("")
    text += [
        f"{backbone}: {summary([one for one in found if one.pair.backbone == backbone])}." for backbone in _of(found)
    ]
    if waiting:
        names = "; ".join(f"{pair.name} ({pair.one.words()})" for pair in waiting)
        text += ["", f"Not far enough to be compared: {names}."]
    return "\n".join(text) + "\n"


def _of(found: list[Found]) -> list[str]:
    return list(dict.fromkeys(one.pair.backbone for one in found))


def row(one: Found) -> str:
    pair = one.pair
    cells = [f"{one.flops / TERA:.3f}", f"{one.bound:.3f} +- {pair.one.error_at(one.flops):.3f}"]
    for share in SHOWN:
        value = pair.all.at(share * one.flops)
        cells.append("-" if value != value else f"{value:.3f} +- {pair.all.error_at(share * one.flops):.3f}")
    torch = "-" if one.by_torch is None else f"{one.by_torch:.3f}"
    cells += [one.words, torch, f"{pair.one.minutes:.1f}, {pair.all.minutes:.1f}"]
    return f"| {pair.backbone} | {pair.seed} | " + " | ".join(cells) + " |"


def summary(found: list[Found]) -> str:
    """The shares of one backbone's seeds, and whether they are within the aim."""
    shares = [one.share for one in found if one.share is not None]
    if len(shares) < len(found):
        return f"reached by {len(shares)} of {len(found)} seeds: the aim of {AIM:g} is not met"
    met = "met" if max(shares) <= AIM else "not met"
    seeds = f"range over {len(shares)} seeds" if len(shares) > 1 else "one seed, no interval"
    return f"share {min(shares):.3f} to {max(shares):.3f} ({seeds}): the aim of {AIM:g} is {met}"


def lines(pair: Pair) -> list[dict[str, object]]:
    """Marks of both runs as lines of CSV."""
    return [
        {
            **{"backbone": pair.backbone, "seed": pair.seed, "frontiers": frontiers, "step": run.steps[i]},
            **{"flops": f"{run.flops[i]:.6g}", "nats_per_token": round(run.bounds[i], 5)},
            "error": round(run.errors[i], 5),
        }
        for frontiers, run in (("one", pair.one), ("all", pair.all))
        for i in range(len(run.flops))
    ]


def curves(axes, found: list[Found]) -> None:
    """Bounds against FLOPs, a colour an objective and a style a seed; dotted: where `one` ends, and the aim."""
    for number, one in enumerate(found):
        style = {"linestyle": ("-", "--", ":", "-.")[number % 4], "marker": "o", "markersize": 3, "capsize": 2}
        for color, frontiers, run in (("C0", "one", one.pair.one), ("C1", "all", one.pair.all)):
            x = [flops / TERA for flops in run.flops]
            label = f"{frontiers}, seed {one.pair.seed}"
            axes.errorbar(x, run.bounds, yerr=run.errors, color=color, elinewidth=0.4, label=label, **style)
        axes.axhline(one.bound, color="C0", linewidth=0.7, linestyle=":")
    axes.axvline(AIM * found[0].flops / TERA, color="grey", linewidth=0.7, linestyle=":")
    axes.set(title=found[0].pair.backbone, xscale="log", xlabel="training TFLOP", ylabel="held-out bound, nats/token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def write_pilot(
    found: list[tuple[str, int, float, Curve]], folder: Path, *, flops: float, backbone: str, seed: int
) -> str:
    """Write pilot.md: the bound of every choice of (frontiers, rows a step, rate) after so many FLOPs; returns it."""
    text = [
        f"Pilot, {backbone}, seed {seed}: held-out bound in nats per token after about {flops / TERA:.3g} training TFLOP.",
        "",
        "| frontiers | rows a step | rate | steps | TFLOP | bound |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for frontiers, rows, rate, run in found:
        if run.flops:
            i = min(range(len(run.flops)), key=lambda i: abs(run.flops[i] - flops))
            at = f"{run.steps[i]} | {run.flops[i] / TERA:.3f} | {run.bounds[i]:.3f} +- {run.errors[i]:.3f}"
        else:
            at = "0 | 0 | -"
        text.append(f"| {frontiers} | {rows} | {rate:g} | {at} |")
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "pilot.md", ("\n".join(text) + "\n").encode())
    return "\n".join(text) + "\n"
