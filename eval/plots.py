"""Curves of latency and memory against context, as PNG, and the same cells as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.files import write_bytes
from mezzotint.eval.memory import GB

MISSING = ("oom", "skipped_predicted_oom")  # drawn as crosses at the top of a figure


@dataclass(frozen=True)
class Quantity:
    """What a figure shows: a value of the cells, its unit, its floor, and its stand-in where a cell does not fit."""

    value: str
    scale: float
    label: str
    floor: str | None = None
    needed: str | None = None


def write_csv(rows: list[dict], path: Path) -> None:
    """One line a cell: identity, status, then every value that any cell has; empty where a cell has none."""
    flat = [{**row["identity"], "status": row["status"], **row["values"]} for row in rows]
    columns = list(dict.fromkeys(name for line in flat for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_bytes(path, text.getvalue().encode())


def plot_curves(rows: list[dict], folder: Path, *, prefix: str) -> list[Path]:
    """Write PREFIX-latency.png and PREFIX-memory.png, log-log against context, one line a (model, batch).

    The measured floor is dashed in the model's colour. A cell that did not fit is a cross: at the bytes it needs in the
    figure of memory, on the upper edge of the axes in that of latency. Returns their paths.
    """
    if not rows:
        return []
    latency, memory = folder / f"{prefix}-latency.png", folder / f"{prefix}-memory.png"
    _figure(rows, Quantity("denoise_s", 1e3, "ms per denoising step", floor="floor_s"), path=latency)
    _figure(rows, Quantity("peak_bytes", 1 / GB, "peak memory, GB (10^9 bytes)", needed="needed_bytes"), path=memory)
    return [latency, memory]


def _figure(rows: list[dict], quantity: Quantity, *, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, (name, cells) in enumerate(_lines(rows)):
        color = f"C{i % 10}"
        axes.plot(*_points(cells, quantity.value, quantity.scale), "o-", color=color, label=name)
        if quantity.floor:
            floor = _points(cells, quantity.floor, quantity.scale)
            axes.plot(*floor, "--", color=color, linewidth=1, label=f"{name}, floor" if floor[0] else None)
        lost = [cell for cell in cells if cell["status"] in MISSING]
        if not lost:
            continue
        cross: dict[str, Any] = {"color": color, "markersize": 9, "label": f"{name}, does not fit"}
        if quantity.needed:
            axes.plot(*_points(lost, quantity.needed, quantity.scale), "x", **cross)
        else:  # spread sideways by model, so that crosses of two models at one context stay apart
            places = [cell["identity"]["context"] * 1.06**i for cell in lost]
            axes.plot(places, [0.97] * len(lost), "x", transform=axes.get_xaxis_transform(), **cross)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=quantity.label)
    axes.set_xscale("log", base=2)
    contexts = sorted({row["identity"]["context"] for row in rows})
    axes.set_xticks(contexts, [short_count(context) for context in contexts])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    pyplot.close(figure)
    write_bytes(path, stream.getvalue())


def _lines(rows: list[dict]) -> Iterable[tuple[str, list[dict]]]:
    """(label, cells ordered by context) of every (model, batch, dtype)."""
    several = len({row["identity"]["batch"] for row in rows}) > 1
    groups: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["identity"]["context"]):
        identity = row["identity"]
        name = identity["subject"] + (f", batch {identity['batch']}" if several else "")
        groups.setdefault(name, []).append(row)
    return groups.items()


def _points(cells: list[dict], value: str, scale: float) -> tuple[list[int], list[float]]:
    """Contexts and scaled values of the cells that have the value."""
    held = [cell for cell in cells if value in cell["values"]]
    return [cell["identity"]["context"] for cell in held], [cell["values"][value] * scale for cell in held]


def short_count(count: int) -> str:
    """1024 -> 1k, 262144 -> 256k; other counts as they are."""
    return f"{count // 1024}k" if count % 1024 == 0 and count else str(count)
