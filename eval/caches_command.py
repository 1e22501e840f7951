"""What `mezzotint-eval caches` does once its options are read: plan, run with a bar, write table and figure."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from mezzotint.data.tasks.catalog import parse_task
from mezzotint.eval.caches import sweep
from mezzotint.eval.caches_file import read_prompts
from mezzotint.eval.caches_plan import (
    BIDIRECTIONAL,
    BLOCK,
    CachesConfig,
    Cell,
    beyond_rows,
    kind_of,
    list_cells,
    parse_policies,
    parse_shared,
    prompts_name,
)
from mezzotint.eval.caches_prompts import Prompts, make_prompts, open_prompts
from mezzotint.eval.caches_table import lines_of, paint, panels_of, table
from mezzotint.eval.cells import parse_counts, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.plots import draw
from mezzotint.eval.report_files import flat, require_own, write_markdown, write_table
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject, build, release_subject
from mezzotint.models.errors import InputError
from mezzotint.models.policies.kv_packet import KVPacket


def run(options: argparse.Namespace) -> int:
    require_device(options.device)
    require_threads(options.threads)
    torch.set_num_threads(options.threads)
    config = read_config(options)
    subjects = [release_subject(folder) for folder in options.releases]
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise InputError(f"two of {', '.join(names)} have the same name; rename a release folder")
    kinds = [(subject, kind_of(subject, options.kind)) for subject in subjects]
    prompts = {subject.name: open_prompts(subject, config, text=options.text) for subject in subjects}
    named = {name: prompts_name(config, source.fingerprint) for name, source in prompts.items()}
    cells, sentences = list_cells(kinds, config, named)
    check_sub_blocks(cells)
    check_adapters(cells)
    if options.block is not None:
        check_blocks(cells, prompts)
    out = Path(options.out) if options.out else _default_out(subjects)
    figure = out.with_name(f"{out.stem}-quality.png")
    require_own(out.with_suffix(".md"), [out.with_suffix(".csv"), figure])
    with ResultsFile(out, subjects={subject.name: subject.fingerprint for subject in subjects}) as results:
        rows = _run_with_bar(cells, prompts, results)
    lines = lines_of(cells, rows)
    text = table(lines, sentences, beyond_rows(cells))
    write_markdown(out.with_suffix(".md"), text + "\n")
    write_table(out.with_suffix(".csv"), flat([_without_text(row) for cell in cells for row in rows[cell]]))
    draw(figure, lambda *axes: paint(axes, lines), panels=len(panels_of(lines)), size=(5.5, 4))
    print(text)
    print("written:", *(str(path) for path in (out, out.with_suffix(".md"), out.with_suffix(".csv"), figure)))
    return 0


def read_config(options: argparse.Namespace) -> CachesConfig:
    """The comparison that the options ask for. Raises InputError."""
    own = read_prompts(options.prompts) if options.prompts else None
    if own is None and not options.lengths:
        raise InputError("--lengths is missing: give tokens of prompt and answer, as in 256,1k")
    return CachesConfig(
        policies=tuple(parse_policies(options.policies)),
        lengths=parse_counts(options.lengths) if options.lengths or own is None else (own.length,),
        batches=parse_counts(options.batch),
        data=options.data,
        task=parse_task(options.task) if options.task else None,
        prompts=own,
        new_tokens=options.new_tokens,
        samples=options.samples,
        shared=parse_shared(options.shared) if options.shared else None,
        seed=options.seed,
        block=BLOCK if options.block is None else options.block,
        sub_block=options.sub_block,
        reveal=options.reveal,
        draws=options.draws,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
    )


def check_sub_blocks(cells: list[Cell]) -> None:
    """InputError where the sub-block does not divide a subject's block, before anything is written."""
    asked = next((cell.config.sub_block for cell in cells if cell.config.sub_block is not None), None)
    if asked is not None and all(cell.kind == BIDIRECTIONAL for cell in cells):
        raise InputError(f"--sub-block {asked} is of a block-causal model's block, and no such model is compared")
    for cell in cells:
        size, sub = cell.subject.config.block_length, cell.config.sub_block
        if cell.kind == "block-causal" and sub is not None and (sub < 1 or size % sub):
            raise InputError(f"--sub-block {sub} does not divide the block of {size} tokens of {cell.subject.name}")


def check_adapters(cells: list[Cell]) -> None:
    """InputError where soft tokens were trained for another model than the one they are to be read by."""
    for subject in dict.fromkeys(cell.subject for cell in cells):
        trained = [cell.policy for cell in cells if cell.subject is subject and isinstance(cell.policy, KVPacket)]
        given = [policy.adapters for policy in trained if policy.adapters is not None]
        if given:
            model = build(subject, dtype=torch.float32, device="cpu")
            for adapters in given:
                adapters.check(model)


def check_blocks(cells: list[Cell], prompts: dict[str, Prompts]) -> None:
    """InputError where the block that was asked for is longer than what is written."""
    for cell in cells:
        if cell.kind == BIDIRECTIONAL:
            first = make_prompts(prompts[cell.subject.name], cell.config, length=cell.length, count=1)[0]
            if cell.config.block > len(first.standing):
                raise InputError(
                    f"--block {cell.config.block} is longer than the {len(first.standing)} tokens of an answer: take at "
                    "most as many"
                )


def _run_with_bar(cells: list[Cell], prompts: dict[str, Prompts], results: ResultsFile) -> dict[Cell, list[dict]]:
    rows: dict[Cell, list[dict]] = {cell: [] for cell in cells}
    with tqdm(total=sum(cell.config.samples for cell in cells), unit="text", disable=None) as bar:
        for cell, batch in sweep(cells, prompts, results):
            rows[cell] += batch
            bar.set_description(f"{cell.subject.name} {cell.spelled} {cell.length}", refresh=False)
            bar.update(len(batch))
    return rows


def _without_text(row: dict) -> dict:
    """The row without what was written, for a table."""
    return row | {
        "values": {name: value for name, value in row["values"].items() if name not in ("written", "effective")}
    }


def _default_out(subjects: list[Subject]) -> Path:
    return Path("runs/eval") / ("caches-" + "+".join(subject.name for subject in subjects)[:100] + ".jsonl")
