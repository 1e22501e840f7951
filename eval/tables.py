"""Speed cells and benchmark rows as tables for a reader: what would be measured, and what was."""

from __future__ import annotations

from mezzotint.eval.cells import Cell
from mezzotint.eval.memory import GB, GIB, available_bytes, both_units
from mezzotint.eval.plots import short_count


def cell_table(cells: list[Cell]) -> str:
    """The cells of a dry run with their bytes, and whether they will fit."""
    lines = [f"{both_units(available_bytes(cells[0].speed.device))} available on {cells[0].speed.device}"]
    lines.append(f"{'model':24} {'context':>8} {'batch':>5} {'dtype':9} {'weights':>10} {'state':>10} {'both':>10}")
    for cell in sorted(cells, key=lambda cell: (cell.subject.name, cell.batch, cell.context)):
        sizes = (cell.weight_bytes, cell.state_bytes, cell.needed_bytes)
        shown = " ".join(f"{size / GB:7.2f} GB" for size in sizes)
        verdict = "" if cell.fits(loaded=False) else "  does not fit"
        lines.append(
            f"{cell.subject.name:24} {short_count(cell.context):>8} {cell.batch:5} {cell.dtype:9} {shown}{verdict}"
        )
    return "\n".join(lines)


def speed_table(rows: list[dict], *, steps: int) -> str:
    """Markdown: one line a cell, latencies in ms, both units of memory, tokens/s at `steps` denoising steps a block."""
    lines = [
        *_heading(rows),
        "| model | parameters | context | batch | denoise ms | floor ms | over floor | advance ms | prefill tok/s "
        f"| tok/s ({steps} steps) | weights GB | state GB | peak GB | peak GiB | status |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_line(row, steps=steps) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: dict, *, steps: int) -> str:
    identity, values = row["identity"], row["values"]
    bytes_known = [f"{values['weight_bytes'] / GB:.2f}", f"{values['state_bytes'] / GB:.3f}"]
    if "denoise_s" in values:
        ratio = values["denoise_s"] / values["floor_s"]
        measured = [
            f"{values['denoise_s'] * 1e3:.2f}",
            f"{values['floor_s'] * 1e3:.2f}",
            f"{ratio:.2f}",
            f"{values['advance_s'] * 1e3:.2f}",
            f"{values['prefill_tokens_per_s']:.0f}",
            f"{values[f'tokens_per_s_{steps}']:.1f}",
        ]
        peak = values["peak_bytes"]
    else:
        measured, peak = ["-"] * 6, values["needed_bytes"]
    parts = [identity["subject"], f"{values['parameters'] / 1e6:.1f}M", short_count(identity["context"])]
    parts += [str(identity["batch"]), *measured, *bytes_known, f"{peak / GB:.2f}", f"{peak / GIB:.2f}", row["status"]]
    return "| " + " | ".join(parts) + " |"


def _heading(rows: list[dict]) -> list[str]:
    """How the cells were measured, in a sentence; their load averages."""
    measured = [row for row in rows if "load" in row["values"]]
    if not measured:
        return ["No cell fits into memory; peak is weights and state alone.", ""]
    identity, loads = measured[0]["identity"], [row["values"]["load"] for row in measured]
    return [
        f"Medians on {identity['device']}, {identity['threads']} thread(s), load average {min(loads):.1f} to "
        f"{max(loads):.1f}; state filled at random; tok/s counts model passes alone. GB is 10^9 bytes, GiB 2^30. Peak "
        "is weights, state and the most bytes of other tensors alive in a step; for a cell that does not fit it is "
        "weights and state.",
        "",
    ]


def bench_table(report: dict) -> str:
    """Markdown: the rows of a benchmark, with what they were measured on above them."""
    lines = [
        f"{report['machine']}, {report['cores']} cores, one thread, torch {report['torch']}, preset {report['size']}; "
        f"{report['seconds']:.0f} s, load average {report['rows'][0]['load']:.1f} to {report['rows'][-1]['load']:.1f}. "
        f"Training: forward and backward of {report['batch']} rows of {report['row_length']} tokens, two streams, all "
        "frontiers, loss and head at masked tokens; optimizer left out of both. Beside a step is its floor: linear "
        "layers, QK^T and PV over visible tiles as bare products, and for denoising the state's bytes over "
        f"{report['read_bytes_per_s'] / 1e9:.1f} GB/s. The ratio by CPU time leaves out what other processes took.",
        "",
        "| step | model | dtype | ms | beside it | ms | ratio | by CPU time | aim | p90/p10 | load |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['step']} | {row['model']} | {row['dtype']} | {row['ms']:.1f} | {row['beside']} "
            f"| {row['beside_ms']:.1f} | {row['ratio']:.2f} | {row['cpu_ratio']:.2f} | {row['aim']:.2f} "
            f"| {row['spread']:.2f} | {row['load']:.1f} |"
        )
    return "\n".join(lines) + "\n"
