"""Curves of runs as PNG: loss, bound, gradient norm, rate of learning and of tokens, several runs laid over each other."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.files import write_bytes
from mezzotint.models.errors import InputError
from mezzotint.training.metrics import read_records

SMOOTHED = 100  # a smoothed point is the mean over a run's records / SMOOTHED
AXES = ("tokens", "steps")


@dataclass(frozen=True)
class Panel:
    """One quantity of the records of one kind."""

    kind: str
    key: str
    label: str
    error: str | None = None  # key of its standard error
    smooth: bool = False
    log: bool = False


PANELS = (
    Panel("train", "loss", "loss, nats/token", smooth=True),
    Panel("validation", "nats_per_token", "held-out bound, nats/token", error="nats_per_token_error"),
    Panel("train", "gradient_norm", "gradient norm", smooth=True, log=True),
    Panel("train", "lr", "learning rate"),
    Panel("train", "unique_tokens_per_second", "tokens/s", smooth=True),
    Panel("train", "utilization", "share of peak FLOP/s", smooth=True),
)


@dataclass(frozen=True)
class Curve:
    """Points of one panel of one run, ascending."""

    x: list[float]
    y: list[float]
    error: list[float] | None


def plot(folders: list[Path], out: Path, *, against: str = "tokens") -> Path:
    """Write one figure with all runs; `against` is 'tokens' or 'steps'. Raises InputError for a run without records."""
    if out.suffix.lower() != ".png":
        raise InputError(f"--out {out} must end in .png")
    if against not in AXES:
        raise InputError(f"--x {against} must be one of {', '.join(AXES)}")
    runs = {name: _records(folder) for name, folder in zip(names(folders), folders)}
    content = _draw(runs, against)
    write_bytes(out, content)
    return out


def names(folders: list[Path]) -> list[str]:
    """What tells the runs apart: the ends of their paths, as short as they differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(set(parts)):
            return short
    raise AssertionError("whole paths differ")


def curve(records: list[dict], panel: Panel, *, against: str) -> Curve:
    """The points of a panel; records whose value is null (not finite) or missing are left out."""
    tokens = _tokens(records)
    found = [r for r in records if r["kind"] == panel.kind and r.get(panel.key) is not None]
    if panel.log:
        found = [r for r in found if r[panel.key] > 0]
    x = [r["step"] * tokens if against == "tokens" else r["step"] for r in found]
    error = [r.get(panel.error) or 0.0 for r in found] if panel.error else None
    return Curve(x, [r[panel.key] for r in found], error)


def smooth(values: list[float], window: int) -> list[float]:
    """Means over the last `window` values, over fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(values))]


def window_of(curve: Curve) -> int:
    return max(1, round(len(curve.y) / SMOOTHED))


def _records(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    records = read_records(path) if path.is_file() else []
    if not any(record["kind"] == "train" and "tokens" in record for record in records):
        raise InputError(
            f"{folder} holds no training records (metrics.jsonl): give run folders that have begun to train"
        )
    return records


def _tokens(records: list[dict]) -> float:
    """Tokens of a step."""
    last = [r for r in records if r["kind"] == "train" and "tokens" in r][-1]
    return last["tokens"] / last["step"]


def _draw(runs: dict[str, list[dict]], against: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(3, 2, figsize=(12, 12), layout="constrained", sharex=True)
    for panel, axes in zip(PANELS, places.flat):
        for i, (name, records) in enumerate(runs.items()):
            _add(axes, panel, curve(records, panel, against=against), name, f"C{i % 10}")
        axes.set_ylabel(panel.label)
        axes.grid(alpha=0.3)
        if panel.log:
            axes.set_yscale("log")
        if not axes.has_data():
            axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center")
    for axes in places[-1]:
        axes.set_xlabel(against)
    places.flat[0].legend(fontsize=8)
    figure.suptitle(
        "pale: every record; bold: mean of as many as the legend says; bars: one standard error", fontsize=9
    )
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    pyplot.close(figure)
    return stream.getvalue()


def _add(axes: Any, panel: Panel, points: Curve, name: str, color: str) -> None:
    """One run in one panel."""
    if not points.x:
        return
    if panel.error:
        axes.errorbar(points.x, points.y, yerr=points.error, fmt="o-", markersize=3, capsize=2, color=color, label=name)
    elif panel.smooth and window_of(points) > 1:
        axes.plot(points.x, points.y, color=color, alpha=0.2, linewidth=0.7)
        window = window_of(points)
        label = f"{name}, mean of the last {window} records"
        axes.plot(points.x, smooth(points.y, window), color=color, linewidth=1.5, label=label)
    else:
        axes.plot(points.x, points.y, color=color, label=f"{name}, every record")
