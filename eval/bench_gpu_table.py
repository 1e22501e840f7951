"""The Markdown page of `make gpu`."""

from __future__ import annotations

from mezzotint.eval.plots import short_count

HEAD = {
    "checks": "Correctness",
    "steps": "Full optimizer steps",
    "decoding": "Decoding and prefill, batch 1",
    "batches": "Batches",
    "training": "Training step, forward and backward",
    "operations": "Single operations; beside each is plain torch",
}


def page(report: dict) -> str:
    """The whole page: what it ran on, which backends were used, and one table a section."""
    read, rate = report["read_bytes_per_s"] / 1e9, report["products_flops_per_s"] / 1e12
    lines = [
        f"# {report['card']}",
        "",
        f"torch {report['torch']}, Python {report['python']}, {report['seconds']:.0f} s of a budget of "
        f"{report['budget']:.0f} s, load average {report['load']:.1f}. Measured in this run: reading {read:.0f} GB/s, "
        f"bfloat16 products {rate:.1f} TFLOP/s. Floor: linear layers, QK^T and PV over visible tiles as bare products in "
        "alternation with the pass, and for denoise and advance the state's bytes at the measured bandwidth; products of "
        "SSD are never in it.",
        "",
        "| operation | backend | |",
        "|---|---|---|",
        *(f"| {row['op']} | {row['backend']} | {row['declined'] or 'can be used'} |" for row in report["backends"]),
    ]
    for section, title in HEAD.items():
        rows = [row for row in report["rows"] if row["section"] == section]
        if rows:
            lines += ["", f"## {title}", "", *_table(section, rows)]
    rates = report["block_rates"]
    if rates:
        lines += ["", f"## Tokens a second in blocks of {rates[0]['steps']} steps", "", *_rates(rates)]
    return "\n".join(lines) + "\n"


def _table(section: str, rows: list[dict]) -> list[str]:
    if section in ("checks", "steps"):
        return [f"- {row['name']}: {row.get('text', row['status'])}" for row in rows]
    lines = [
        "| model | pass | mode | context | batch | ms | beside ms | ratio | tokens/s | status |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    return lines + [_line(row) for row in rows]


def _line(row: dict) -> str:
    context = short_count(row["context"]) if "context" in row else ""
    numbers = (("ms", ".3f"), ("floor_ms", ".3f"), ("ratio", ".2f"), ("tokens_per_s", ",.0f"))
    shown = [format(row[name], form) if name in row else "" for name, form in numbers]
    difference = f", differs by {row['difference']:.1e}" if "difference" in row else ""
    words = [row["name"], row.get("pass", ""), row.get("mode", ""), context, str(row.get("batch", ""))]
    return "| " + " | ".join([*words, *shown, row["status"] + difference]) + " |"


def _rates(rates: list[dict]) -> list[str]:
    lines = ["| model | mode | context | batch | tokens/s |", "|---|---|---:|---:|---:|"]
    for row in rates:
        words = (
            row["name"],
            row["mode"],
            short_count(row["context"]),
            str(row["batch"]),
            f"{row['tokens_per_s']:,.0f}",
        )
        lines.append("| " + " | ".join(words) + " |")
    return lines
