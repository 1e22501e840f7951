"""What `mezzotint-data synthetic` does once its options are read."""

from __future__ import annotations

import argparse
import re

from mezzotint.data.errors import InputError
from mezzotint.data.synthetic import SyntheticConfig, synthesize


def run(options: argparse.Namespace) -> None:
    """The command, once its options are read."""
    done = synthesize(
        SyntheticConfig(
            tokenizer=options.tokenizer,
            out=options.out,
            tasks=tuple(options.task),
            tokens=_count(options.tokens),
            row_length=options.row_length,
            block=options.block,
            seed=options.seed,
            heldout=options.heldout,
            stage=_stage(options.stage),
            text=options.text,
            workers=options.workers,
        )
    )
    for manifest in (done.train, done.heldout):
        if manifest is not None:
            print(f"{manifest.folder}: {manifest.tokens:,} tokens in {manifest.documents:,} documents")


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None:
        raise InputError(f"--tokens is {text!r}: write for example 500k or 8m")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]]


def _stage(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise InputError(f"--stage is {text!r}: write for example 1/3")
    return int(match[1]), int(match[2])
