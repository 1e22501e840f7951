"""What a part of a report is: Markdown text, tables for CSV and figures, all named before any is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Section:
    """`figures` are written by calls with their path; file names are unique over a report."""

    title: str
    text: str
    tables: dict[str, list[dict]] = field(default_factory=dict)
    figures: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def markdown(self) -> str:
        pictures = "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in self.figures)
        files = ", ".join(f"[{name}]({name})" for name in self.tables)
        parts = [f"## {self.title}", self.text, pictures, f"The same as a table: {files}." if files else ""]
        return "\n\n".join(part for part in parts if part)


def file_name(*parts: str) -> str:
    """Parts joined to a name that any file system takes."""
    return "-".join(re.sub(r"[^A-Za-z0-9.+_=-]+", "_", part).strip("_") for part in parts if part)[:120]


def table(columns: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """Markdown; the first `left` columns are aligned to the left, the others to the right."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * left + "---:|" * (len(columns) - left)]
    return "\n".join(lines + ["| " + " | ".join(map(_safe, row)) + " |" for row in rows])


def number(value: float | None) -> str:
    """Four digits, whole above a thousand."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _safe(cell: str) -> str:
    """Without what would end a cell of Markdown."""
    return " ".join(cell.replace("|", "\\|").split())
