"""What `mezzotint-eval retrieval` does once its options are read: plan, run with a progress bar, print a table."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from mezzotint.data.tasks.catalog import parse_task, spelled
from mezzotint.eval.cells import DTYPES, parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.intervals import mean_and_error, percent, wilson
from mezzotint.eval.memory import both_units
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.retrieval import sweep
from mezzotint.eval.retrieval_plan import Cell, RetrievalConfig, list_cells, product_rate
from mezzotint.eval.retrieval_subjects import has_rope, scaled, training_length
from mezzotint.eval.scoring_plan import duration
from mezzotint.eval.subjects import Subject, release_subject
from mezzotint.models.errors import InputError


def run(options: argparse.Namespace) -> int:
    require_device(options.device)
    require_threads(options.threads)
    torch.set_num_threads(options.threads)
    config = RetrievalConfig(
        tasks=tuple(parse_task(task) for task in options.tasks.split(",")),
        lengths=parse_counts(options.lengths) if options.lengths else (),
        multiples=parse_counts(options.multiples) if options.multiples else (),
        training_length=options.training_length,
        samples=options.samples,
        depths=options.depths,
        seed=options.seed,
        floor=options.floor,
        reveal=options.reveal,
        temperature=options.temperature,
        draws=options.draws,
        batch=options.batch,
        chunk=options.chunk,
        dtype=options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32"),
        device=options.device,
    )
    subjects = with_variants([release_subject(folder) for folder in options.releases], options.rope_scaling, config)
    cells = list_cells(subjects, config, text=options.text)
    if options.dry_run:
        print(dry_run(cells))
        return 0
    _require_one_fits(cells)
    out = Path(options.out) if options.out else _default_out(subjects)
    known = {subject.name: subject.fingerprint for subject in subjects}
    with ResultsFile(out, subjects=known, retry_failed=options.retry_failed) as results:
        rows = _run_with_bar(cells, results)
        print(table(cells, rows, results))
    print("written:", out)
    return 0


def with_variants(subjects: list[Subject], scalings: str, config: RetrievalConfig) -> list[Subject]:
    """Each subject, followed by itself with every rope scaling; those without rotary positions only once."""
    out = []
    for subject in subjects:
        out.append(subject)
        if scalings and has_rope(subject):
            trained = config.training_length or training_length(subject)
            out += [scaled(subject, scaling.strip(), trained=trained) for scaling in scalings.split(",")]
    names = [subject.name for subject in out]
    if len(set(names)) < len(names):
        raise InputError(f"two of {', '.join(names)} have the same name; rename a release folder")
    return out


def dry_run(cells: list[Cell]) -> str:
    """Cells with the bytes they need and the least time they take: prefill alone, at the rate of bare products."""
    lines = [
        "| subject | task | tokens | samples | rows at once | needs | at least |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    total = 0.0
    for cell in cells:
        config, batch = cell.config, cell.largest_batch(loaded=False)
        seconds = config.samples * cell.flops / product_rate(DTYPES[config.dtype], config.device)
        total += seconds if batch else 0.0
        fits = f"{batch}" if batch else "does not fit"
        lines.append(
            f"| {cell.subject.name} | {_task_name(cell)} | {cell.length} | {config.samples} | {fits} | "
            f"{both_units(cell.needed_bytes(max(batch, 1)))} | {duration(seconds)} |"
        )
    lines.append(f"\nin all at least {duration(total)} of prefill; decoding and overheads come on top")
    return "\n".join(lines)


def _run_with_bar(cells: list[Cell], results: ResultsFile) -> dict[Cell, list[dict]]:
    """Rows of every cell; the bar counts tokens and shows the running accuracy of the cell at work."""
    total = sum(cell.length * cell.config.samples for cell in cells)
    rows: dict[Cell, list[dict]] = {cell: [] for cell in cells}
    with tqdm(total=total, unit="tok", unit_scale=True, disable=None) as bar:
        for progress in sweep(cells, results):
            cell = progress.cell
            rows[cell] += progress.rows
            right = sum(row["values"]["correct"] for row in rows[cell])
            bar.set_description(f"{cell.subject.name} {_task_name(cell)} {cell.length}", refresh=False)
            bar.set_postfix_str(percent(right, len(rows[cell])), refresh=False)
            bar.update(progress.tokens)
    return rows


def table(cells: list[Cell], rows: dict[Cell, list[dict]], results: ResultsFile) -> str:
    """Markdown: one line a cell, strict accuracy with its Wilson 95% interval first."""
    lines = [
        "| subject | task | tokens | of training | n | correct, 95% | part | substring | argmax | nats |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for cell in cells:
        times = f"{cell.length / cell.trained:g}x" if cell.trained else ""
        start = f"| {cell.subject.name} | {_task_name(cell)} | {cell.length} | {times} |"
        found = [row["values"] for row in rows[cell] if row["status"] == "ok"]
        whole = results.get(cell.identity(None))
        if whole is not None and len(found) < cell.config.samples:
            lines.append(f"{start} {len(found)} | {whole['status']} | | | | |")
            continue
        right = sum(values["correct"] for values in found)
        low, high = wilson(right, len(found))
        nats = [values["nats"] for values in found if values["nats"] is not None]
        lines.append(
            f"{start} {len(found)} | {right / max(1, len(found)):.3f} [{low:.3f}, {high:.3f}] | "
            + " | ".join(
                f"{mean_and_error([v[name] for v in found])[0]:.3f}" for name in ("part", "substring", "argmax")
            )
            + f" | {mean_and_error(nats)[0]:.3f} |"
        )
    return "\n".join(lines)


def _task_name(cell: Cell) -> str:
    name = spelled(cell.task)
    return name if cell.needle else f"{name}, no needle"


def _default_out(subjects: list[Subject]) -> Path:
    return Path("runs/eval") / ("+".join(subject.name for subject in subjects)[:100] + ".jsonl")


def _require_one_fits(cells: list[Cell]) -> None:
    """A sweep records what does not fit; a single cell that does not is a mistake to be told."""
    if len(cells) == 1 and not cells[0].largest_batch(loaded=False):
        cell = cells[0]
        raise InputError(
            f"{cell.subject.name} at {cell.length} tokens needs {both_units(cell.needed_bytes(1))}, which are not "
            "available: take a shorter length or --dtype bfloat16"
        )
