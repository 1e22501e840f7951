"""Figures of speed cells: latency and memory against context, tokens a second against batch, real prompts."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzotint.data.files import write_bytes
from mezzotint.eval.memory import GB

MISSING = ("oom", "skipped_predicted_oom")  # drawn as crosses


@dataclass(frozen=True)
class Quantity:
    """What a figure shows: a value of the cells, its unit, its floor, and its stand-in where a cell does not fit."""

    value: str
    scale: float
    label: str
    floor: str | None = None
    needed: str | None = None


LATENCY = Quantity("denoise_s", 1e3, "ms per denoising step", floor="floor_s")
MEMORY = Quantity("peak_bytes", 1 / GB, "peak memory, GB (10^9 bytes)", needed="needed_bytes")


def plot_speed(rows: list[dict], folder: Path, *, prefix: str) -> list[Path]:
    """Write the figures of `speed_figures` as PREFIX-NAME.png; returns their paths."""
    written = []
    for name, paint in speed_figures(rows).items():
        written.append(folder / f"{prefix}-{name}.png")
        paint(written[-1])
    return written


def speed_figures(rows: list[dict]) -> dict[str, Callable[[Path], None]]:
    """The figures that rows of speed tasks allow, by name: latency, memory, batches, prompts; each writes a path.

    Against context there is one line a (model, mode), of the smallest batch. The measured floor is dashed in the model's
    colour. A cell that did not fit is a cross: at the bytes it needs in the figure of memory, on the upper edge of the axes
    in that of latency.
    """
    figures: dict[str, Callable[[Path], None]] = {}
    cells = [row for row in rows if row["identity"]["task"] == "speed"]
    if cells:
        least = min(row["identity"]["batch"] for row in cells)
        single = [row for row in cells if row["identity"]["batch"] == least]
        figures["latency"] = lambda path: draw(path, lambda axes: _against_context(axes, single, LATENCY, batch=least))
        figures["memory"] = lambda path: draw(path, lambda axes: _against_context(axes, single, MEMORY, batch=least))
    sweeps = [row for row in cells if len({other["identity"]["batch"] for other in cells if _same_run(other, row)}) > 1]
    if any("denoise_s" in row["values"] for row in sweeps):
        figures["batches"] = lambda path: draw(path, lambda axes: _against_batch(axes, sweeps))
    prompts = [row for row in rows if row["identity"]["task"] == "speed/prefill" and row["status"] == "ok"]
    if prompts:
        figures["prompts"] = lambda path: draw(path, lambda *axes: _prompts(axes, prompts), panels=2)
    return figures


def draw(
    path: Path,
    paint: Callable[..., None],
    *,
    panels: int = 1,
    columns: int = 3,
    size: tuple[float, float] = (7, 4.5),
) -> None:
    """Call `paint` with the axes of a new figure of `panels`, `columns` side by side at most, and write it as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = min(panels, columns)
    high = -(-panels // wide)
    figsize = (size[0] * wide, size[1] * high)
    figure, axes = pyplot.subplots(high, wide, figsize=figsize, layout="constrained", squeeze=False)
    try:
        paint(*axes.flat[:panels])
        for unused in axes.flat[panels:]:
            unused.set_visible(False)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=130)
    finally:
        pyplot.close(figure)
    write_bytes(path, stream.getvalue())


def _against_context(axes, rows: list[dict], quantity: Quantity, *, batch: int) -> None:
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
    axes.set(xscale="log", yscale="log", xlabel=f"context, tokens (batch {batch})", ylabel=quantity.label)
    _finish(axes, sorted({row["identity"]["context"] for row in rows}))


def _against_batch(axes, rows: list[dict]) -> None:
    """Tokens a second of all rows together, commit apart, 8 steps a block; what did not fit ends a line with a cross."""
    groups: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["identity"]["batch"]):
        identity = row["identity"]
        groups.setdefault(f"{_name(row, rows)}, {short_count(identity['context'])}", []).append(row)
    for i, (name, cells) in enumerate(groups.items()):
        held = [cell for cell in cells if "tokens_per_s_8" in cell["values"]]
        color = f"C{i % 10}"
        axes.plot(
            [cell["identity"]["batch"] for cell in held],
            [cell["values"]["tokens_per_s_8"] for cell in held],
            "o-",
            color=color,
            label=name,
        )
        lost = [cell["identity"]["batch"] for cell in cells if cell["status"] in MISSING]
        axes.plot(
            lost[:1], [0.97] * len(lost[:1]), "x", transform=axes.get_xaxis_transform(), color=color, markersize=9
        )
    axes.set(xscale="log", yscale="log", xlabel="rows decoded together", ylabel="tokens/s of all rows, 8 steps a block")
    _finish(axes, sorted({row["identity"]["batch"] for row in rows}))


def _prompts(axes: tuple, rows: list[dict]) -> None:
    """Rate of prefill, and the process's peak, against what has been read."""
    for i, (name, cells) in enumerate(_lines(rows)):
        axes[0].plot(*_points(cells, "prefill_tokens_per_s", 1), "o-", color=f"C{i % 10}", label=name)
        axes[1].plot(*_points(cells, "process_peak_bytes", 1 / GB), "o-", color=f"C{i % 10}", label=name)
    contexts = sorted({row["identity"]["context"] for row in rows})
    for panel, label in zip(axes, ("prefill, tokens/s (median chunk)", "process peak, GB (10^9 bytes)")):
        panel.set(xscale="log", xlabel="tokens read", ylabel=label)
        panel.set_ylim(bottom=0)
        _finish(panel, contexts)


def _finish(axes, counts: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [short_count(count) for count in counts])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _lines(rows: list[dict]) -> Iterable[tuple[str, list[dict]]]:
    """(label, cells ordered by context) of every model, mode and dtype."""
    groups: dict[str, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["identity"]["context"]):
        groups.setdefault(_name(row, rows), []).append(row)
    return sorted(groups.items())


def _name(row: dict, rows: list[dict]) -> str:
    """The model, and what else tells lines of `rows` apart."""
    named = [row["identity"]["subject"]]
    for key in ("mode", "dtype", "machine"):
        if len({other["identity"].get(key) for other in rows}) > 1:
            named.append(str(row["identity"].get(key)))
    return ", ".join(named)


def _same_run(row: dict, other: dict) -> bool:
    return row["identity"] | {"batch": 0} == other["identity"] | {"batch": 0}


def _points(cells: list[dict], value: str, scale: float) -> tuple[list[int], list[float]]:
    """Contexts and scaled values of the cells that have the value."""
    held = [cell for cell in cells if value in cell["values"]]
    return [cell["identity"]["context"] for cell in held], [cell["values"][value] * scale for cell in held]


def short_count(count: int) -> str:
    """1024 -> 1k, 262144 -> 256k; other counts as they are."""
    return f"{count // 1024}k" if count % 1024 == 0 and count else str(count)
