"""The options of `mezzotint-eval bound`; what it does is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

ABOUT = (
    "Bounds -log p of rows of prepared text, or of whole text files of any length, read a little at a time. The context "
    "is committed once, and each block is denoised with masks drawn so that the number of masked tokens is enumerated "
    "and every token carries the same weight. Prints nats/token and bits/byte with standard errors, by position and by "
    "share of masked tokens. The values are upper bounds: write them with <=."
)


def add_parser(commands) -> None:
    """Add the command to an argparse sub-parser collection."""
    parser = commands.add_parser(
        "bound",
        help="likelihood bound of text, in nats/token and bits/byte, with standard errors",
        description=textwrap.fill(ABOUT, 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="release folders (mezzotint-export makes them)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="PREPARED", help="folder written by mezzotint-data prepare")
    what.add_argument(
        "--document", nargs="+", default=(), metavar="FILE", help="UTF-8 text files, each one document, scored whole"
    )
    rows = parser.add_argument_group("rows of --data")
    rows.add_argument("--rows", type=int, default=32, metavar="N", help="rows, evenly spread (default: %(default)s)")
    rows.add_argument(
        "--row-length", type=int, default=1024, metavar="T", help="tokens of a row (default: %(default)s)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--draws", type=int, metavar="D", help="masks a block (default: as many as a block has tokens)")
    how.add_argument(
        "--draw-batch", type=int, default=32, metavar="N", help="masks denoised at once (default: %(default)s)"
    )
    how.add_argument(
        "--seed", type=int, default=0, help="of the masks, the same for every model (default: %(default)s)"
    )
    how.add_argument("--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: float32)")
    how.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1, the steadiest)")
    parser.add_argument("--dry-run", action="store_true", help="print the cells with bytes and time, score nothing")
    parser.add_argument("--retry-failed", action="store_true", help="score again what had no finite bound")
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/NAMES.jsonl)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.eval.bound_command import run

    return run(options)
