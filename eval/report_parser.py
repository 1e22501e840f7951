"""The options of `mezzotint-eval report` and `compare`; what they do is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

REPORT = (
    "Reads results files of any commands and writes report.md, CSV tables and figures: accuracy against length in "
    "multiples of the training length with Wilson intervals, accuracy by length and depth, bounds by position and by "
    "share of masks, lm-eval scores, latency and memory beside their floors, batch sweeps. Nothing is averaged over "
    "lengths. Files that give one cell twice, one name to two releases, or scores of truncated prompts are refused."
)
COMPARE = (
    "Paired differences of two subjects over the cells that both have: McNemar's exact test and an interval for right "
    "or wrong, Student's t for shares and bounds. Refused where the prompts of a pair differ."
)


def add_parsers(commands) -> None:
    """Add both commands to an argparse sub-parser collection."""
    report = commands.add_parser(
        "report", help="Markdown, CSV and figures of results files", description=textwrap.fill(REPORT, 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    report.add_argument("results", nargs="+", metavar="RESULTS", help="results files (--out of the other commands)")
    report.add_argument("--out", required=True, metavar="FOLDER", help="folder for report.md, *.csv and *.png")
    report.add_argument(
        "--steps", type=int, default=8, choices=(4, 8, 16, 32), help="denoising steps a block in the table (default: 8)"
    )
    report.set_defaults(run=_report)
    compare = commands.add_parser(
        "compare", help="paired differences of two subjects, with intervals and exact tests",
        description=textwrap.fill(COMPARE, 100), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    compare.add_argument(
        "results", nargs="+", metavar="RESULTS", help="one results file, or two: the first's, the second's"
    )
    compare.add_argument(
        "--subjects", nargs=2, metavar=("A", "B"), help="names in the results; two files of one subject each need none"
    )
    compare.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="of the intervals (default: %(default)s)"
    )
    compare.add_argument("--out", metavar="FILE", help="also write the table here, as Markdown")
    compare.set_defaults(run=_compare)


def _report(options: argparse.Namespace) -> int:
    from mezzotint.eval.report import run

    return run(options)


def _compare(options: argparse.Namespace) -> int:
    from mezzotint.eval.compare import run

    return run(options)
