"""The options of `mezzotint-eval retrieval`; what it does is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

ABOUT = (
    "Puts questions about long prompts: samples of exact length are made from a seed, prefilled once and answered by "
    "decoding. Primary score: the first answer written is the right one, strictly; beside it RULER's substring match, "
    "the share of answer tokens that are likeliest when all are masked, and the answer's likelihood bound. Every sample "
    "is one row of the results file; the same command run again goes on where it stopped."
)
EXAMPLES = """tasks (options and their values behind a colon, as in mqar:pairs=16:queries=4):
  passkey  niah_single  niah_multikey  niah_multivalue  niah_multiquery  mqar  phonebook  phonebook_reversed
  variables  common_words  frequent_words  copy

examples:
  mezzotint-eval retrieval release/ --tasks passkey,mqar --multiples 1,2,4,8,16 --floor
  mezzotint-eval retrieval a/ b/ --tasks niah_multikey:haystack=text --lengths 4k,16k --samples 100
  mezzotint-eval retrieval release/ --tasks passkey --lengths 256k --dry-run
"""


def add_parser(commands) -> None:
    """Add the command to an argparse sub-parser collection."""
    parser = commands.add_parser(
        "retrieval",
        help="retrieval tasks at any length: accuracy with intervals, by length and depth",
        description=textwrap.fill(ABOUT, 100),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="release folders (mezzotint-export makes them)")
    what = parser.add_argument_group("what is asked")
    what.add_argument("--tasks", default="passkey,mqar", metavar="LIST", help="default: %(default)s")
    what.add_argument("--lengths", metavar="LIST", help="tokens of prompt and answer, for example 1k,4k,256k")
    what.add_argument("--multiples", metavar="LIST", help="of the training length, for example 1,2,4,8,16")
    what.add_argument("--training-length", type=int, metavar="N", help="where the release does not say it")
    what.add_argument("--samples", type=int, default=200, metavar="N", help="a cell (default: %(default)s)")
    what.add_argument("--depths", type=int, default=10, metavar="N", help="depths in turn (default: %(default)s)")
    what.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    what.add_argument("--floor", action="store_true", help="ask again with what is asked for left out of the prompt")
    what.add_argument(
        "--text", default="stdlib", metavar="FOLDER", help="prepared folder for haystack=text (default: stdlib)"
    )
    how = parser.add_argument_group("how it is answered")
    how.add_argument(
        "--rope-scaling",
        default="",
        metavar="LIST",
        help="also with scaled rotary positions, for example yarn=16,linear=4; subjects NAME+yarn16, NAME+linear4",
    )
    how.add_argument(
        "--reveal",
        default="threshold=0.9",
        metavar="RULE",
        help="topk=N, threshold=P, entropy=H, ancestral=N or first-hitting (default: %(default)s)",
    )
    how.add_argument("--temperature", type=float, default=0.0, help="default: 0, the likeliest token")
    how.add_argument("--draws", type=int, default=32, metavar="N", help="masks a block of the bound (default: 32)")
    how.add_argument("--batch", type=int, default=8, metavar="N", help="samples together, where they fit (default: 8)")
    how.add_argument("--chunk", type=int, default=1024, metavar="N", help="tokens of a prefill pass (default: 1024)")
    how.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: float32; on CUDA bfloat16)"
    )
    how.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="try cells again that did not fit or ran out of memory"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the cells with bytes and time, run nothing")
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/NAME.jsonl)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.eval.retrieval_command import run

    return run(options)
