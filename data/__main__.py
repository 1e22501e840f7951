"""Owns the command line `mezzotint-data`: train-tokenizer and prepare."""

import argparse
import sys

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError

ABOUT = "Turn text into token shards: train a tokenizer, then prepare a folder that training and evaluation read."
EXAMPLES = """examples:
  # the default corpus (the standard library of this Python), nothing to download
  mezzotint-data train-tokenizer --corpus stdlib --vocab-size 4096 --out runs/tok
  mezzotint-data prepare --corpus stdlib --tokenizer runs/tok --heldout 0.03 --out runs/data

  # your own text: a file or folder of text, jsonl, json.gz, json.zst or parquet, or a saved dataset
  mezzotint-data prepare --input books.jsonl --text-column body --tokenizer runs/tok --out runs/books

  # a dataset on the Hugging Face hub, streamed
  mezzotint-data prepare --input roneneldan/TinyStories --tokenizer runs/tok --out runs/stories
"""


def main(arguments: list[str] | None = None) -> int:
    """Run `mezzotint-data` with `arguments` (None: the command line's); 2 on bad input, after one sentence."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: options.run(options))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mezzotint-data", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about = "train a sentencepiece tokenizer that gives every text back unchanged"
    train = commands.add_parser("train-tokenizer", help=about, description=about, epilog=EXAMPLES, formatter_class=raw)
    _add_source(train)
    train.add_argument("--out", required=True, metavar="FOLDER", help="folder that gets tokenizer.model")
    train.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="ids in all (default 4096)")
    train.add_argument("--kind", default="bpe", help="bpe, or unigram, which trains some 20 times slower (default bpe)")
    train.add_argument(
        "--sample-mb", type=float, default=64.0, metavar="MB", help="MiB of text to learn from (default 64)"
    )
    train.add_argument(
        "--heldout", type=float, default=0.0, metavar="SHARE", help="leave out what prepare will hold out"
    )
    train.set_defaults(run=_train_tokenizer)
    about = "tokenize text into shards; run it again to go on after an interruption"
    prepare = commands.add_parser("prepare", help=about, description=about, epilog=EXAMPLES, formatter_class=raw)
    _add_source(prepare)
    prepare.add_argument(
        "--tokenizer", required=True, metavar="PATH", help="tokenizer.model, tokenizer.json or a folder"
    )
    prepare.add_argument("--out", required=True, metavar="FOLDER", help="folder that gets shards and manifest.json")
    prepare.add_argument(
        "--heldout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of documents to hold out, e.g. 0.03; FOLDER then gets train/ and heldout/ (default 0)",
    )
    prepare.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one a core)")
    prepare.add_argument("--shard-mb", type=float, default=64.0, metavar="MB", help="MiB of text a shard (default 64)")
    prepare.set_defaults(run=_prepare)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    """The options of SourceConfig, the same for both commands."""
    group = parser.add_argument_group("what to read")
    group.add_argument("--corpus", default="", metavar="NAME", help="stdlib (the default corpus) or stdlib+tests")
    group.add_argument("--input", metavar="PATH_OR_NAME", help="file, folder, saved dataset or hub name")
    group.add_argument(
        "--text-column", default="text", metavar="NAME", help="column that holds the text (default text)"
    )
    group.add_argument("--split", default="train", metavar="NAME", help="split of a dataset (default train)")
    group.add_argument("--subset", default="", metavar="NAME", help="configuration of a hub dataset")
    group.add_argument(
        "--pattern", default="*", metavar="GLOB", help="names of files to take from a folder (default all)"
    )
    group.add_argument(
        "--unit", default="document", help="what is a document of a text file: document (the file), paragraph or line"
    )


def _source(options: argparse.Namespace):
    from mezzotint.data.sources import SourceConfig

    if options.input == "":
        raise InputError("--input is empty: name a file, folder, saved dataset or hub dataset, or leave it out")
    if options.corpus and options.input:
        raise InputError("--corpus and --input were both given: choose one")
    return SourceConfig(
        corpus=options.corpus or "stdlib",
        input=options.input or "",
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
            print(
                f"{manifest.folder}: {manifest.tokens:,} tokens in {manifest.documents:,} documents, "
                f"{manifest.bytes:,} bytes, {manifest.bytes / manifest.tokens:.2f} bytes a token"
            )


if __name__ == "__main__":
    sys.exit(main())
