"""Latency and memory in a report: the tables and figures of `mezzotint-eval speed`, one section a machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mezzotint.eval.plots import speed_figures
from mezzotint.eval.report_files import flat
from mezzotint.eval.report_read import grouped
from mezzotint.eval.report_section import Section, file_name
from mezzotint.eval.tables_speed import speed_tables

MEASURED_ON = ("device", "machine", "threads", "protocol")


def sections(rows: list[dict], *, steps: int) -> list[Section]:
    """One section a machine and way of measuring."""
    found = grouped(rows, lambda row: [row["identity"].get(name) for name in MEASURED_ON])
    out = []
    for i, group in enumerate(found.values(), start=1):
        name = f"speed-{i}" if len(found) > 1 else "speed"
        identity = group[0]["identity"]
        title = f"{name}: {identity.get('machine', identity['device'])}, {identity['protocol']} protocol"
        figures: dict[str, Callable[[Path], None]] = {
            file_name(name, f"{kind}.png"): paint for kind, paint in speed_figures(group).items()
        }
        out.append(Section(title, speed_tables(group, steps=steps).rstrip(), {f"{name}.csv": flat(group)}, figures))
    return out
