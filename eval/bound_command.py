"""What `mezzotint-eval bound` does once its options are read: score, write, print."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from mezzotint.eval.cells import DTYPES, require_threads
from mezzotint.eval.doctor import require_device
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.score import BoundConfig, Documents, Text, open_documents, open_text, score, score_documents
from mezzotint.eval.scoring_plan import Work, dry_run, scoring_bytes, scoring_flops
from mezzotint.eval.subjects import Subject, release_subject
from mezzotint.eval.tally import LEVELS, Bound, by_bin, summarize
from mezzotint.models.errors import InputError


def run(options: argparse.Namespace) -> int:
    subjects = release_subjects(options.releases)
    require_device(options.device)
    if options.dtype is not None and options.dtype not in DTYPES:
        raise InputError(f"unknown dtype {options.dtype!r}; one of {', '.join(DTYPES)}")
    config = BoundConfig(
        data=options.data,
        documents=tuple(options.document),
        rows=options.rows,
        row_length=options.row_length,
        draws=options.draws,
        draw_batch=options.draw_batch,
        seed=options.seed,
        dtype=DTYPES[options.dtype] if options.dtype else torch.float32,
        device=options.device,
    )
    require_threads(options.threads)
    torch.set_num_threads(options.threads)
    # what cannot be scored is refused before anything is written
    opened = [open_documents(each, config) if config.documents else open_text(each, config) for each in subjects]
    if options.dry_run:
        cells = [cell for each, text in zip(subjects, opened) for cell in planned(each, text, config)]
        print(dry_run(cells, dtype=config.dtype, device=config.device))
        return 0
    out = results_path(options.out, subjects)
    named = {each.name: each.fingerprint for each in subjects}
    with ResultsFile(out, subjects=named, retry_failed=options.retry_failed) as results:
        for subject, text in zip(subjects, opened):
            if isinstance(text, Text):
                total = min(config.rows, len(text.rows))
                rows = list(tqdm(score(subject, text, config, results), total=total, desc=subject.name, disable=None))
            else:
                rows = list(score_documents(subject, text, config, results))
            _say(subject, rows, config, out)
    print("written:", out)
    return 0


def planned(subject: Subject, text: Text | Documents, config: BoundConfig) -> list[Work]:
    """The cells of a dry run: the rows together, or every document."""
    if isinstance(text, Text):
        named = [("rows", min(config.rows, len(text.rows)), config.row_length)]
    else:
        named = [(document.name, 1, document.tokens) for document in text.files]
    draws = config.draws_of(subject)
    return [
        Work(
            subject=subject.name,
            what=what,
            texts=count,
            longest=length,
            bytes=scoring_bytes(
                subject.config, rows=1, length=length, canvases=draws.batch, itemsize=config.dtype.itemsize
            ),
            flops=count * scoring_flops(subject.config, context=0, scored=length, draws=draws.per_block),
        )
        for what, count, length in named
    ]


def _say(subject: Subject, rows: list[dict], config: BoundConfig, out: Path) -> None:
    scored = [row["values"] for row in rows if row["status"] == "ok"]
    if not scored:
        raise InputError(f"the bound of {subject.name} is not finite on any of the {len(rows)} rows; see {out}")
    print(describe(subject.name, scored, unit="document" if config.documents else "row"))
    if len(scored) < len(rows):
        print(f"  {len(rows) - len(scored)} of {len(rows)} have no finite bound and are left out")


def release_subjects(folders: Sequence[str]) -> list[Subject]:
    """Release folders of different names."""
    subjects = [release_subject(folder) for folder in folders]
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise InputError(f"two of {', '.join(names)} have the same name; rename a release folder")
    return subjects


def results_path(out: str | None, subjects: list[Subject]) -> Path:
    return Path(out) if out else Path("runs/eval") / ("+".join(subject.name for subject in subjects)[:100] + ".jsonl")


def describe(name: str, rows: list[dict], *, unit: str) -> str:
    """The bound of all rows with its errors, then by position and by share of masked tokens."""
    found = summarize(rows)
    units = unit if found.rows == 1 else f"{unit}s"
    lines = [
        f"{name}: {found.rows} {units}, {found.tokens} tokens, {found.bytes} bytes of text",
        f"  <= {found.nats_per_token:.4f} nats/token, {_error(found.nats_per_token_error, found, unit=unit)}",
        f"  <= {found.bits_per_byte:.4f} bits/byte,  {_error(found.bits_per_byte_error, found, unit=unit, byte=True)}",
        "  by position (nats/token from that token on):",
        *(f"    {edge:>8}  <= {nats:.4f}  ({tokens:.0f} tokens)" for edge, nats, tokens in by_bin(rows, "by_position")),
        "  by share of masked tokens (nats a masked token):",
        *(f"    {edge:.1f}-{edge + 1 / LEVELS:.1f}   {nats:.4f}" for edge, nats, _ in by_bin(rows, "by_level")),
    ]
    return "\n".join(lines)


def _error(value: float, found: Bound, *, unit: str, byte: bool = False) -> str:
    """The standard error over rows, and the part of it that the draws alone make."""
    scale = found.tokens / found.bytes / math.log(2) if byte and found.bytes else 1.0
    parts = []
    if math.isfinite(value):
        parts.append(f"standard error {value:.4f} over {unit}s")
    if found.monte_carlo_error is not None:
        parts.append(f"Monte-Carlo error {found.monte_carlo_error * scale:.4f}")
    return ", ".join(parts) or "standard error unknown: give more --draws"
