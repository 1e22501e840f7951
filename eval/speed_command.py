"""What `mezzotint-eval speed` does once its options are read: list the cells, measure, write tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from mezzotint.eval import tables_speed
from mezzotint.eval.cells import DTYPES, Cell, SpeedConfig, list_cells, parse_bytes, parse_counts, prefill_tokens
from mezzotint.eval.doctor import require_device
from mezzotint.eval.memory import available_bytes, both_units
from mezzotint.eval.plots import plot_speed
from mezzotint.eval.report_files import flat, require_own, write_markdown, write_table
from mezzotint.eval.results import FAILED, ResultsFile
from mezzotint.eval.speed import check_fill, sweep
from mezzotint.eval.speed_cell import measure_rates
from mezzotint.eval.speed_prefill import read_prompt
from mezzotint.eval.subjects import Subject, preset_subject, release_subject
from mezzotint.eval.tables import cell_table
from mezzotint.models.errors import InputError

FIGURES = ("latency", "memory", "batches", "prompts")


def run(options: argparse.Namespace) -> int:
    subjects = list_subjects(options)
    require_device(options.device)
    config = read_config(options)
    cells = list_cells(subjects, config)
    prompts = _whole_prompts(subjects, config, options.real_prefill)
    fills = _whole_prompts(subjects, config, options.check_fill)
    if options.dry_run:
        print(cell_table(cells, prompts, rate=measure_rates(config.device, DTYPES[cells[0].dtype]).flops))
        return 0
    if not prompts:
        _require_one_fits(cells)
    out = Path(options.out) if options.out else default_out(subjects)
    beside = [out.with_name(f"{out.stem}-{name}.png") for name in FIGURES]
    require_own(out.with_suffix(".md"), [out.with_suffix(".csv"), *beside])
    names = {subject.name: subject.fingerprint for subject in subjects}
    with ResultsFile(out, subjects=names, retry_failed=options.retry_failed) as results:
        rows = _measure(cells, prompts, fills, results)
    text = tables_speed.speed_tables(rows, steps=options.steps)
    write_markdown(out.with_suffix(".md"), text)
    write_table(out.with_suffix(".csv"), flat(rows))
    figures = plot_speed(rows, out.parent, prefix=out.stem)
    print(text)
    failed = sum(row["status"] in FAILED for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} cells did not fit or failed; --retry-failed tries them again")
    print("written:", *(str(path) for path in (out, out.with_suffix(".md"), out.with_suffix(".csv"), *figures)))
    return 0


def read_config(options: argparse.Namespace) -> SpeedConfig:
    """The sweep that the options ask for. Raises InputError."""
    parts = [part.strip() for part in options.batches.split(",")]
    rows = [part for part in parts if part != "max"]
    on_card = options.device.startswith("cuda")
    modes = options.modes or ("eager,cudagraph" if on_card else "eager")
    if options.most_rows < 1:
        raise InputError(f"--most-rows is {options.most_rows}; it must be at least 1")
    return SpeedConfig(
        contexts=parse_counts(options.contexts),
        batches=parse_counts(",".join(rows)) if rows else (1,),
        most_rows=options.most_rows if "max" in parts else 0,
        modes=tuple(mode.strip() for mode in modes.split(",")),
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        prefill_chunk=options.prefill_chunk,
        quick=options.quick,
        isolated=not options.in_process,
        timeout=None if options.in_process else options.timeout,
        memory_limit=parse_bytes(options.memory_limit) if options.memory_limit else None,
        try_all=options.try_all,
    )


def list_subjects(options: argparse.Namespace) -> list[Subject]:
    """Releases, then presets. Raises InputError where there is none, or two have one name."""
    subjects = [release_subject(folder) for folder in options.releases]
    if options.presets:
        names, backbones = options.presets.split(","), options.backbones.split(",")
        subjects += [preset_subject(name.strip(), backbone.strip()) for name in names for backbone in backbones]
    if not subjects:
        raise InputError("nothing to measure: give release folders, or --presets 10m for random weights")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise InputError(f"two of {', '.join(names)} have the same name; rename a release folder")
    return subjects


def default_out(subjects: list[Subject]) -> Path:
    return Path("runs/eval") / ("+".join(subject.name for subject in subjects)[:100] + ".jsonl")


def _whole_prompts(subjects: list[Subject], config: SpeedConfig, tokens: str | None) -> list[Cell]:
    """One cell a subject whose context is `tokens`, in whole blocks; none where it was not asked for."""
    if tokens is None:
        return []
    counts = parse_counts(tokens)
    if len(counts) > 1:
        raise InputError(f"{tokens!r} are several numbers of tokens; give one, for example 16k")
    cells = []
    for subject in subjects:
        g = subject.config.block_length
        if counts[0] < g:
            raise InputError(f"{counts[0]} tokens are less than a block of {g} tokens of {subject.name}")
        cells.append(Cell(subject, counts[0] // g * g, 1, config))
    return cells


def _measure(cells: list[Cell], prompts: list[Cell], fills: list[Cell], results: ResultsFile) -> list[dict]:
    """All rows, with a bar over the cells."""
    with tqdm(total=len(cells) + len(prompts) + len(fills), unit="cell", disable=None) as bar:
        rows = []
        for row in sweep(cells, results):
            rows += [row] if row else []
            bar.update()
        for cell in prompts:
            bar.set_description(f"{cell.subject.name}, prompt of {cell.context}")
            rows += read_prompt(cell, results)
            bar.update()
        for cell in fills:
            bar.set_description(f"{cell.subject.name}, real and random state at {cell.context}")
            identity = cell.identity | {"task": "speed/fill"}
            if not results.done(identity):
                results.append(identity, status="ok", values=check_fill(cell, chunk=prefill_tokens(cell)))
            rows.append(results.get(identity) or {})
            bar.update()
    return rows


def _require_one_fits(cells: list[Cell]) -> None:
    """A sweep records what does not fit; a single cell that does not is a mistake to be told."""
    cell = cells[0]
    if len(cells) == 1 and not cell.speed.try_all and not cell.fits(loaded=False):
        available = available_bytes(cell.speed.device, limit=cell.speed.memory_limit)
        raise InputError(
            f"{cell.subject.name} at a context of {cell.context} and batch {cell.batch} needs "
            f"{both_units(cell.needed_bytes)} for weights and state and about {both_units(cell.work_bytes)} to work in, "
            f"{both_units(available)} are available: take a shorter context, a smaller batch or --dtype bfloat16"
        )
