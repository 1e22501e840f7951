"""The table of a dry run, with bytes and least times of every cell, and that of the benchmark."""

from __future__ import annotations

from mezzotint.eval.cells import Cell, prefill_tokens
from mezzotint.eval.memory import GB, available_bytes, both_units
from mezzotint.eval.plots import short_count
from mezzotint.eval.roofline import sizes_of, step_flops
from mezzotint.eval.timing import FULL, QUICK


def cell_table(cells: list[Cell], prompts: list[Cell], *, rate: float) -> str:
    """The cells of a dry run with their bytes, the least time they take at `rate` FLOPs a second, and what will not fit.

    prompts: those that are really read.
    """
    speed = cells[0].speed
    lines = [f"{both_units(available_bytes(speed.device, limit=speed.memory_limit))} available on {speed.device}"]
    lines.append(
        f"{'model':24} {'mode':9} {'context':>8} {'batch':>5} {'dtype':9} {'weights':>10} {'state':>10} "
        f"{'work':>10} {'all':>10} {'at least':>10}"
    )
    ended, total = set(), 0.0
    for cell in sorted(cells, key=lambda cell: (cell.subject.name, cell.mode, cell.context, cell.batch)):
        place = (cell.subject.name, cell.mode, cell.context)
        if place in ended and cell.batch not in speed.batches:
            continue
        fits = cell.fits(loaded=False)
        seconds = _sweep_seconds(cell, rate)
        lines.append(_dry_line(cell, cell.mode, seconds, fits=fits))
        if fits:
            total += seconds
        else:
            ended.add(place)
    for cell in prompts:
        fits = cell.fits(loaded=False)
        seconds = _prompt_flops(cell) / rate
        lines.append(_dry_line(cell, "prompt", seconds, fits=fits))
        total += seconds if fits else 0.0
    lines.append(f"in all at least {total:.0f} s at {rate / 1e9:.0f} GFLOP/s, without what is too large")
    return "\n".join(lines)


def _dry_line(cell: Cell, kind: str, seconds: float, *, fits: bool) -> str:
    sizes = (cell.weight_bytes, cell.state_bytes, cell.work_bytes, cell.needed_bytes + cell.work_bytes)
    shown = " ".join(f"{size / GB:7.2f} GB" for size in sizes)
    return (
        f"{cell.subject.name:24} {kind:9} {short_count(cell.context):>8} {cell.batch:5} {cell.dtype:9} {shown} "
        f"{seconds:8.1f} s{'' if fits else '  does not fit'}"
    )


def _sweep_seconds(cell: Cell, rate: float) -> float:
    """Of all samples of a cell: denoise, advance, commit, two prefill chunks, floor and blocks, by their products alone."""
    protocol = QUICK if cell.speed.quick else FULL
    sizes = sizes_of(cell.subject.config, itemsize=cell.itemsize)
    step = step_flops(sizes, context=cell.context, batch=cell.batch) / rate
    chunks = 2 * prefill_tokens(cell) / cell.subject.config.block_length
    one_round = step * (1 + 2 + 1 + chunks + 1)
    most = max(protocol.seconds * 6, protocol.least * one_round)
    return min(protocol.steps * one_round, most) + 3 * 8 * step


def _prompt_flops(cell: Cell) -> float:
    """Prefill: as many steps as blocks, each at half the context on average."""
    config = cell.subject.config
    sizes = sizes_of(config, itemsize=cell.itemsize)
    return cell.context / config.block_length * step_flops(sizes, context=cell.context // 2)


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
