"""What `mezzotint-eval report` does: reads results files, refuses what cannot stand together, writes one folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mezzotint.eval import environment, report_bound, report_caches, report_harness, report_retrieval, report_speed
from mezzotint.eval.report_files import require_own, write_markdown, write_table
from mezzotint.eval.report_read import Collected, collect, describe, failures
from mezzotint.eval.report_section import Section, table


def run(options: argparse.Namespace) -> int:
    found, folder = collect(options.results), Path(options.out)
    parts = list_sections(found, steps=options.steps)
    names = [name for part in parts for name in (*part.tables, *part.figures)]
    assert len(set(names)) == len(names), f"two files of one name among {names}"
    text = "\n\n".join([heading(found), *(part.markdown() for part in parts), failed_cells(found)])
    page = folder / "report.md"
    require_own(page, [folder / name for name in names])
    write_markdown(page, text.rstrip() + "\n")
    for part in parts:
        for name, lines in part.tables.items():
            write_table(folder / name, lines)
        for name, paint in part.figures.items():
            paint(folder / name)
    print(f"{len(found.rows)} rows of {len(found.files)} file(s), {len(found.subjects)} subject(s)")
    print("written:", *(str(path) for path in (page, *(folder / name for name in names))))
    return 0


def list_sections(found: Collected, *, steps: int) -> list[Section]:
    """All parts of a report, in their order."""
    return [
        *report_retrieval.sections(found.of_task("retrieval")),
        *report_bound.sections(found.of_task("bound")),
        *report_harness.sections(found.of_task("lm-eval")),
        *report_caches.sections(found.of_task("caches")),
        *report_speed.sections(found.of_task("speed"), steps=steps),
    ]


def heading(found: Collected) -> str:
    """Where the figures come from: files, subjects by the hash of their weights, environments."""
    subjects = table(["subject", "weights"], [[name, print_] for name, print_ in sorted(found.subjects.items())])
    lines = [f"- {count} rows: {environment.describe(made)}" for made, count in found.environments]
    known = sum(count for _, count in found.environments)
    if known < len(found.rows):
        lines.append(f"- {len(found.rows) - known} rows of an older version, which did not say what it ran on")
    files = ", ".join(path.name for path in found.files)
    return "\n\n".join(
        ["# Results", f"{len(found.rows)} rows of {files}.", subjects, "## Environment", "\n".join(lines)]
    )


def failed_cells(found: Collected) -> str:
    """Everything that has no figures, and why."""
    lost = failures(found.rows)
    if not lost:
        return "Every cell has its figures."
    rows = [[describe(row["identity"]), row["status"], row["values"].get("message", "")] for row in lost]
    return "## Cells without figures\n\n" + table(["cell", "status", "message"], rows, left=3)
