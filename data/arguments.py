"""Owns the options and the help of `mezzotint-data`; imports nothing heavy, so that help is instant."""

import argparse
from typing import Any

from mezzotint.data import synthetic_arguments

ABOUT = (
    "Turn text into token shards, or take over token files made elsewhere: folders that training and evaluation read."
)
EXAMPLES = """examples:
  # the default corpus (the standard library of this Python), nothing to download
  mezzotint-data train-tokenizer --corpus stdlib --vocab-size 4096 --out runs/tok
  mezzotint-data prepare --corpus stdlib --tokenizer runs/tok --heldout 0.03 --out runs/data

  # your own text: a file or folder of text, jsonl, json.gz, json.zst or parquet, or a saved dataset
  mezzotint-data prepare --input books.jsonl --text-column body --tokenizer runs/tok --out runs/books

  # streamed: files on a web server, or a dataset on the Hugging Face hub; dropped connections are taken up again
  mezzotint-data prepare --input https://example.org/a.json.gz https://example.org/b.json.gz \\
      --tokenizer runs/tok --out runs/web
  mezzotint-data prepare --input roneneldan/TinyStories --tokenizer runs/tok --out runs/stories

  # token files made elsewhere, read where they lie: Megatron .bin/.idx, parquet or arrow with ids in a column
  mezzotint-data adopt --input /data/megatron --tokenizer llama/tokenizer.json --end-id 2 --out runs/megatron
  mezzotint-data adopt --input /data/parquet --column input_ids --tokenizer runs/tok --out runs/parquet

  # is it all there, and what does a row look like?
  mezzotint-data verify runs/data
  mezzotint-data inspect runs/data/train --row 12 --row-length 256 --block 16
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line; `command` holds the name of the chosen one."""
    main = argparse.ArgumentParser(
        "mezzotint-data",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main.add_subparsers(metavar="COMMAND", required=True)
    _train_tokenizer(
        _command(commands, "train-tokenizer", "train a sentencepiece tokenizer that gives text back as it is")
    )
    about = "tokenize text into shards; run it again to go on after an interruption"
    _prepare(_command(commands, "prepare", about))
    synthetic_arguments.add_command(commands)
    about = "take over token files made elsewhere: scan and check them once, copy nothing; run it again to go on"
    _adopt(_command(commands, "adopt", about))
    about = "check hashes, ids and indexes of a folder against its files; names what is damaged, and then exits with 2"
    _verify(_command(commands, "verify", about))
    about = "show rows as training sees them: decoded, with blocks, document boundaries, fill and padding"
    _inspect(_command(commands, "inspect", about))
    return main


def _command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = commands.add_parser(name, help=about, description=about, epilog=EXAMPLES, formatter_class=raw)
    made.set_defaults(command=name)
    return made


def _train_tokenizer(train: argparse.ArgumentParser) -> None:
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


def _prepare(prepare: argparse.ArgumentParser) -> None:
    _add_source(prepare)
    _add_tokenizer(prepare)
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


def _adopt(adopt: argparse.ArgumentParser) -> None:
    adopt.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="Megatron pairs, parquet or arrow files, folders of one kind of them, or a saved dataset; they must stay",
    )
    _add_tokenizer(adopt)
    adopt.add_argument("--out", required=True, metavar="FOLDER", help="folder that gets manifest.json and tokenizer")
    adopt.add_argument(
        "--column", default="input_ids", metavar="NAME", help="column of token ids, one document a row (input_ids)"
    )
    adopt.add_argument("--pattern", default="*", metavar="GLOB", help="names of files to take from a folder")
    adopt.add_argument("--split", default="train", metavar="NAME", help="split of a saved dataset (default train)")
    adopt.add_argument(
        "--eos",
        default="auto",
        metavar="RULE",
        help="auto: all documents of a file end with <eos>, or none does and it is added as they are read; "
        "keep: take them as they are; add: add one to each (default auto)",
    )
    adopt.add_argument(
        "--end-id",
        type=int,
        default=-1,
        metavar="N",
        help="id that ends documents in these files, when it is not the tokenizer's <eos>; it is read as <eos>",
    )


def _verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("folder", metavar="FOLDER", help="prepared or adopted folder, or one with train/ and heldout/")


def _inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("folder", metavar="FOLDER", help="prepared or adopted folder, such as runs/data/train")
    inspect.add_argument("--row", type=int, default=0, metavar="N", help="first row to show (default 0)")
    inspect.add_argument("--rows", type=int, default=1, metavar="K", help="how many (default 1)")
    inspect.add_argument("--row-length", type=int, default=1024, metavar="T", help="tokens of a row (default 1024)")
    inspect.add_argument(
        "--block", default="32", metavar="G", help="tokens of a block, or `row` for one as long as the row (default 32)"
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", required=True, metavar="PATH", help="tokenizer.model, tokenizer.json or a folder"
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    """The options of SourceConfig, the same for the commands that read text."""
    group = parser.add_argument_group("what to read")
    group.add_argument("--corpus", default="", metavar="NAME", help="stdlib (the default corpus) or stdlib+tests")
    group.add_argument(
        "--input", nargs="+", metavar="NAME", help="file, folder, saved dataset, hub name, or one or more web addresses"
    )
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
