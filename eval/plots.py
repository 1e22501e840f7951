"""Curves of latency and memory against context, as PNG, and the same cells as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from mezzotint.data.files import write_bytes
from mezzotint.eval.memory import GB

MISSING = ("oom", "skipped_predicted_oom")  # drawn as crosses at the top of a figure


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

    The measured floor is dashed in the model's colour. A cell that did not fit is a cross on the upper edge of the
    axes; the legend says so. Returns their paths.
    """
    if not rows:
        return []
    latency, memory = folder / f"{prefix}-latency.png", folder / f"{prefix}-memory.png"
    _figure(rows, path=latency, value="denoise_s", scale=1e3, floor="floor_s", label="ms per denoising step")
    _figure(rows, path=memory, value="peak_bytes", scale=1 / GB, floor=None, label="peak memory, GB (10^9 bytes)")
    return [latency, memory]


def _figure(rows: list[dict], *, path: Path, value: str, scale: float, floor: str | None, label: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, (name, cells) in enumerate(_lines(rows)):
        color = f"C{i % 10}"
        measured = [(c["identity"]["context"], c["values"][value] * scale) for c in cells if value in c["values"]]
        axes.plot(*_columns(measured), "o-", color=color, label=name)
        if floor:
            low = [(c["identity"]["context"], c["values"][floor] * scale) for c in cells if floor in c["values"]]
            axes.plot(*_columns(low), "--", color=color, linewidth=1, label=f"{name}, floor" if low else None)
        lost = [c["identity"]["context"] for c in cells if c["status"] in MISSING]
        # spread sideways by model, so that crosses of two models at one context stay apart
        axes.plot(
            [context * 1.06**i for context in lost],
            [0.97] * len(lost),
            "x",
            color=color,
            markersize=9,
            transform=axes.get_xaxis_transform(),
            label=f"{name}, does not fit" if lost else None,
        )
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=label)
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


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def short_count(count: int) -> str:
    """1024 -> 1k, 262144 -> 256k; other counts as they are."""
    return f"{count // 1024}k" if count % 1024 == 0 and count else str(count)
