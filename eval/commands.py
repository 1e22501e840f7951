"""What each command of `mezzotint-eval` does once its options are read: measure, write, print a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from mezzotint.data.files import write_bytes
from mezzotint.eval import doctor as examination
from mezzotint.eval import generate as generation
from mezzotint.eval.cells import DTYPES, Cell, SpeedConfig, list_cells, parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.memory import available_bytes, both_units
from mezzotint.eval.plots import plot_curves, write_csv
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.speed import FILL_CONTEXT, check_fill, sweep
from mezzotint.eval.subjects import Subject, preset_subject, release_subject
from mezzotint.eval.tables import cell_table, speed_table
from mezzotint.models.errors import InputError
from mezzotint.models.reveal import Sampler


def doctor(options: argparse.Namespace) -> int:
    found = examination.examine()
    print(json.dumps(found, indent=2) if options.json else examination.describe(found))
    return 0


def speed(options: argparse.Namespace) -> int:
    subjects = _subjects(options)
    require_device(options.device)
    config = SpeedConfig(
        contexts=parse_counts(options.contexts),
        batches=parse_counts(options.batches),
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        prefill_chunk=options.prefill_chunk,
        quick=options.quick,
    )
    cells = list_cells(subjects, config)
    if options.dry_run:
        print(cell_table(cells))
        return 0
    _require_one_fits(cells)
    out = _out(options.out, subjects)
    with ResultsFile(out, subjects={s.name: s.fingerprint for s in subjects}) as results:
        progress = tqdm(sweep(cells, results), total=len(cells), unit="cell", disable=None)
        rows = [row for row in progress if row]
        if options.check_fill:
            for subject in subjects:
                _print_fill_check(Cell(subject, FILL_CONTEXT, 1, config), results)
    rows.sort(key=lambda row: (row["identity"]["subject"], row["identity"]["batch"], row["identity"]["context"]))
    table = speed_table(rows, steps=options.steps)
    write_bytes(out.with_suffix(".md"), table.encode())
    write_csv(rows, out.with_suffix(".csv"))
    plots = plot_curves(rows, out.parent, prefix=out.stem)
    print(table)
    print("written:", *(str(path) for path in (out, out.with_suffix(".csv"), *plots)))
    return 0


def generate(options: argparse.Namespace) -> int:
    require_device(options.device)
    _set_threads(options.threads)
    config = generation.GenerateConfig(
        release=options.release,
        prompt=generation.read_prompt(text=options.prompt, file=options.prompt_file),
        prompt_ids=parse_counts(options.prompt_ids) if options.prompt_ids else None,
        max_new_tokens=options.max_new_tokens,
        reveal=generation.reveal_rule(
            steps=options.steps,
            threshold=options.threshold,
            entropy=options.entropy_bound,
            ancestral=options.ancestral,
            first_hitting=options.first_hitting,
        ),
        sampler=Sampler(temperature=options.temperature, top_p=options.top_p),
        samples=options.samples,
        seed=options.seed,
        dtype=_dtype(options.dtype),
        device=options.device,
    )
    release_subject(options.release)  # says what is missing before anything is loaded
    found = generation.sample(config)
    if options.json:
        print(json.dumps(generation.report(found), indent=2))
        return 0
    for number, text in enumerate(found.texts, start=1):
        if len(found.texts) > 1:
            print(f"--- sample {number} of {len(found.texts)}")
        print(text)
    print(generation.describe(found))
    return 0


def _subjects(options: argparse.Namespace) -> list[Subject]:
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


def _out(out: str | None, subjects: list[Subject]) -> Path:
    return Path(out) if out else Path("runs/eval") / ("+".join(subject.name for subject in subjects)[:100] + ".jsonl")


def _require_one_fits(cells: list[Cell]) -> None:
    """A sweep records what does not fit; a single cell that does not is a mistake to be told."""
    if len(cells) == 1 and not cells[0].fits(loaded=False):
        cell = cells[0]
        raise InputError(
            f"{cell.subject.name} at a context of {cell.context} and batch {cell.batch} needs "
            f"{both_units(cell.needed_bytes)}, {both_units(available_bytes(cell.speed.device))} are available: "
            "take a shorter context, a smaller batch or --dtype bfloat16"
        )


def _set_threads(count: int) -> None:
    require_threads(count)
    torch.set_num_threads(count)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def _print_fill_check(cell: Cell, results: ResultsFile) -> None:
    identity = cell.identity | {"task": "fill_check"}
    if not results.done(identity):
        results.append(identity, status="ok", values=check_fill(cell))
    values = (results.get(identity) or {})["values"]
    print(
        f"{cell.subject.name}: denoising at {cell.context} on a random state takes "
        f"{values['filled_over_real']:.3f} of the time on a real one ({values['filled_over_real_cpu']:.3f} of "
        f"the CPU time); "
        f"bytes {values['filled_bytes']} and {values['real_bytes']}"
    )
