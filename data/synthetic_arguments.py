"""The options of `mezzotint-data synthetic`; imports nothing, so that help is instant."""

import argparse
from typing import Any

ABOUT = (
    "Make training text of retrieval tasks, so that a model can be taught at its training length what "
    "`mezzotint-eval retrieval` asks beyond it. Samples are made from the seed; none is ever one of the evaluation's. "
    "The folder is like that of `prepare`; run it again to go on after an interruption."
)
EXAMPLES = """a task with the values its documents choose from, easy ones first:
  --task mqar:pairs=1/2/4/8:queries=48:symbols=128:length=64/128/256:weight=3

tasks: passkey niah_single niah_multikey niah_multivalue niah_multiquery mqar phonebook phonebook_reversed variables
       common_words frequent_words copy

examples:
  mezzotint-data synthetic --tokenizer tasks --task passkey --task mqar:pairs=2/4/8:queries=32 \\
      --row-length 256 --block 16 --tokens 8m --heldout 0.02 --out runs/tasks

  # a curriculum: the first third, two thirds, all of every list; train on one folder after the other
  mezzotint-data synthetic --tokenizer tasks --task mqar:pairs=2/4/8:length=64/128/256 --stage 1/3 --out runs/stage-1
"""


def add_command(commands: Any) -> None:
    """Add the command to an argparse sub-parser collection."""
    made = commands.add_parser(
        "synthetic",
        help="make training text of retrieval tasks",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(command="synthetic")
    made.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="tokenizer.model, tokenizer.json or a folder; `tasks`: a small one of bytes and the tasks' own words",
    )
    made.add_argument("--task", action="append", required=True, metavar="SPEC", help="task to mix in; may come again")
    made.add_argument("--out", required=True, metavar="FOLDER", help="folder that gets shards and manifest.json")
    made.add_argument("--tokens", default="8m", metavar="N", help="tokens in all, e.g. 500k or 8m (default 8m)")
    made.add_argument("--row-length", type=int, default=256, metavar="T", help="tokens of a training row (default 256)")
    made.add_argument("--block", type=int, default=16, metavar="G", help="tokens of the models' blocks (default 16)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default 0)")
    made.add_argument(
        "--heldout", type=float, default=0.0, metavar="SHARE", help="share of rows to hold out (default 0)"
    )
    made.add_argument("--stage", default="1/1", metavar="K/N", help="first K of N parts of every list (default 1/1)")
    made.add_argument(
        "--text", default="stdlib", metavar="FOLDER", help="prepared folder for haystack=text (default stdlib)"
    )
    made.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one a core)")
