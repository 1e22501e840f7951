"""Files written beside results: Markdown, CSV and figures, which replace only what an earlier call has written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from mezzotint.data.files import write_bytes
from mezzotint.models.errors import InputError

MARK = "<!-- written by mezzotint-eval -->\n"


def require_own(markdown: Path, others: Iterable[Path] = ()) -> None:
    """InputError where `markdown`, or without it one of `others`, is there and was not written by this program.

    Every call writes the Markdown first; so other files without one are someone else's.
    """
    if markdown.exists():
        with markdown.open("rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise InputError(
                    f"{markdown} was not written by mezzotint-eval and would be overwritten; give another --out"
                )
        return
    for path in others:
        if path.exists():
            raise InputError(f"{path} would be overwritten, and is not known to be ours; give another --out")


def write_markdown(path: Path, text: str) -> None:
    """`text` with the mark of this program before it."""
    write_bytes(path, (MARK + "\n" + text).encode())


def write_table(path: Path, lines: list[dict]) -> None:
    """CSV with every column that any line has; empty where a line has none."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_bytes(path, text.getvalue().encode())


def flat(rows: list[dict]) -> list[dict]:
    """Results rows as lines of a table: identity, status, then values."""
    return [{**row["identity"], "status": row["status"], **row["values"]} for row in rows]
