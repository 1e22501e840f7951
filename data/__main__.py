"""Owns the command line `mezzotint-data`: train-tokenizer, prepare, synthetic, adopt, verify, inspect."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mezzotint.data.arguments import parser
from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError


def main(arguments: list[str] | None = None) -> int:
    """Run `mezzotint-data` with `arguments` (None: the command line's); 2 on bad input, after one sentence."""
    options = parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "train-tokenizer": _train_tokenizer,
        "prepare": _prepare,
        "synthetic": _synthetic,
        "adopt": _adopt,
        "verify": _verify,
        "inspect": _inspect,
    }
    return run_command(lambda: commands[options.command](options))


def _source(options: argparse.Namespace):
    from mezzotint.data.sources import SourceConfig

    if options.input == [""]:
        raise InputError("--input is empty: name a file, folder, saved dataset or hub dataset, or leave it out")
    if options.corpus and options.input:
        raise InputError("--corpus and --input were both given: choose one")
    if len(options.input or []) > 1 and not all("://" in name for name in options.input):
        raise InputError("--input takes one file, folder or hub name; only web addresses may be several")
    return SourceConfig(
        corpus=options.corpus or "stdlib",
        input=" ".join(options.input or []),
        text_column=options.text_column,
        split=options.split,
        subset=options.subset,
        pattern=options.pattern,
        unit=options.unit,
    )


def _train_tokenizer(options: argparse.Namespace) -> None:
    from mezzotint.data.tokenizer import load_tokenizer
    from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer

    path = train_tokenizer(
        TrainTokenizerConfig(
            out=options.out,
            source=_source(options),
            vocab_size=options.vocab_size,
            kind=options.kind,
            sample_mb=options.sample_mb,
            heldout=options.heldout,
        )
    )
    print(f"{path}: {load_tokenizer(path).vocab_size} ids")


def _prepare(options: argparse.Namespace) -> None:
    from mezzotint.data.prepare import PrepareConfig, prepare

    done = prepare(
        PrepareConfig(
            tokenizer=options.tokenizer,
            out=options.out,
            source=_source(options),
            heldout=options.heldout,
            shard_mb=options.shard_mb,
            workers=options.workers,
        )
    )
    for manifest in (done.train, done.heldout):
        if manifest is not None:
            print(_summary(manifest))


def _synthetic(options: argparse.Namespace) -> None:
    from mezzotint.data.synthetic_command import run

    run(options)


def _adopt(options: argparse.Namespace) -> None:
    from mezzotint.data.adopt import AdoptConfig, adopt

    manifest = adopt(
        AdoptConfig(
            inputs=tuple(options.input),
            tokenizer=options.tokenizer,
            out=options.out,
            pattern=options.pattern,
            split=options.split,
            column=options.column,
            eos=options.eos,
            end_id=options.end_id,
        )
    )
    added = sum(shard.documents for shard in manifest.shards if shard.adds_eos)
    ends = f", <eos> added to {added:,} of them as they are read" if added else ""
    print(f"{_summary(manifest)}{ends}; {len(manifest.shards)} files, which must stay where they are")


def _verify(options: argparse.Namespace) -> int:
    from mezzotint.data.verify import folders_below, verify

    wrong = False
    for folder in folders_below(Path(options.folder)):
        checked = verify(folder)
        for problem in checked.problems:
            print(f"error: {problem}", file=sys.stderr)
        if not checked.problems:
            print(f"{_summary(checked.manifest)}: sizes, hashes, ids and indexes are right")
        wrong = wrong or bool(checked.problems)
    return 2 if wrong else 0


def _inspect(options: argparse.Namespace) -> None:
    from mezzotint.data.show import show_rows

    if options.block != "row" and not options.block.isdigit():
        raise InputError(f"--block is {options.block!r}: give a number of tokens, or `row`")
    lines = show_rows(
        Path(options.folder),
        first=options.row,
        count=options.rows,
        row_length=options.row_length,
        block_length=None if options.block == "row" else int(options.block),
        colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )
    for line in lines:
        print(line, flush=True)  # a closed pipe is noticed here, not at the end


def _summary(manifest) -> str:
    return (
        f"{manifest.folder}: {manifest.tokens:,} tokens in {manifest.documents:,} documents, "
        f"{manifest.bytes:,} bytes, {manifest.bytes / manifest.tokens:.2f} bytes a token"
    )


if __name__ == "__main__":
    sys.exit(main())
