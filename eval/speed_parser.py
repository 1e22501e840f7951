"""The options of `mezzotint-eval speed`; what it does is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

ABOUT = (
    "Latency of a denoising step, a commit, both in one pass (advance) and a prefill chunk; bytes of weights, state "
    "and peak; tokens/s; beside the floors: the bare matrix products of the step and the reading of its state here, "
    "and bytes over bandwidth on an H100 and an H200. Every cell is measured in a process of its own. Writes a "
    "results file and beside it tables (.md), .csv and figures (.png). Contexts that do not fit are recorded, not "
    "tried."
)
EXAMPLES = """examples:
  mezzotint-eval speed release/ --contexts 1k,4k,16k --quick
  mezzotint-eval speed --presets 3b --backbones attention,attention_gqa,mamba,hybrid,hybrid_gqa --dry-run
  mezzotint-eval speed --presets 3b --backbones mamba,attention --contexts 256k
  mezzotint-eval speed release/ --contexts 16k --batches max
  mezzotint-eval speed release/ --contexts 1k,4k,16k,64k --real-prefill 256k --check-fill 16k
"""


def add_parser(commands) -> None:
    """Add the command to an argparse sub-parser collection."""
    parser = commands.add_parser(
        "speed",
        help="latency, memory and tokens/s against context and batch, beside the floor",
        description=textwrap.fill(ABOUT, 100),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="release folders (mezzotint-export makes them)")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--presets", metavar="LIST", help="presets with random weights: debug, 10m, 125m, 1b, 3b")
    what.add_argument(
        "--backbones",
        default="attention,mamba,hybrid",
        metavar="LIST",
        help="backbones of the presets: attention, attention_gqa, mamba, hybrid, hybrid_gqa (default: %(default)s)",
    )
    what.add_argument("--contexts", default="1k,4k,16k,64k,256k", metavar="LIST", help="tokens (default: %(default)s)")
    what.add_argument(
        "--batches",
        default="1",
        metavar="LIST",
        help="rows decoded together; max: 1, 2, 4, ... to the first that does not fit (default: %(default)s)",
    )
    what.add_argument("--most-rows", type=int, default=256, metavar="N", help="where max ends (default: %(default)s)")
    what.add_argument(
        "--modes", metavar="LIST", help="eager, cudagraph (default: eager; on CUDA both; graphs need CUDA)"
    )
    what.add_argument(
        "--real-prefill",
        metavar="TOKENS",
        help="also read a prompt of so many tokens for real; rate, state and process peak at every context up to it",
    )
    what.add_argument(
        "--check-fill",
        nargs="?",
        const="4k",
        metavar="TOKENS",
        help="also compare a random state with a really read one, at 4k or the given number of tokens",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="tokens committed at once (default: 512; quick: 128)"
    )
    how.add_argument(
        "--steps", type=int, default=8, choices=(4, 8, 16, 32), help="denoising steps a block in the table (default: 8)"
    )
    how.add_argument("--quick", action="store_true", help="fewer samples: seconds instead of minutes")
    how.add_argument(
        "--in-process", action="store_true", help="all cells in this process: faster, no process peak, no time limit"
    )
    how.add_argument(
        "--timeout", type=float, default=3600, metavar="S", help="seconds of a cell (default: %(default)g)"
    )
    how.add_argument("--memory-limit", metavar="BYTES", help="address space of a cell's process, for example 8G or 8Gi")
    how.add_argument("--try-all", action="store_true", help="also try what is predicted not to fit")
    how.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16 (default: on a CPU float32, bfloat16 for presets 1b and 3b; on CUDA bfloat16)",
    )
    how.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1, the steadiest)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the cells with bytes and least times, run nothing"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="try again what ran out of memory or time, or failed"
    )
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/NAME.jsonl)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.eval.speed_command import run

    return run(options)
