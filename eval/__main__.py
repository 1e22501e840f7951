"""The command `mezzotint-eval`: its options and help. The work is in eval/commands.py, imported when asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mezzotint.data.cli import run_command
from mezzotint.eval import bound_parser, retrieval_parser
from mezzotint.models.errors import InputError

EXAMPLES = """examples:
  mezzotint-eval doctor
  mezzotint-eval speed release/ --contexts 1k,4k,16k --quick
  mezzotint-eval speed --presets 3b --backbones attention,mamba,hybrid --contexts 1k,16k,256k
  mezzotint-eval bound release/ --data prepared/ --rows 32
  mezzotint-eval generate release/ --prompt "def main" --max-new-tokens 128 --steps 8

Results are appended to one file as they come (--out); the same command run again goes on where it stopped.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 with a sentence on bad input."""
    options = build_parser().parse_args(arguments)

    def command() -> int:
        from mezzotint.eval import commands

        run = {
            "speed": commands.speed,
            "generate": commands.generate,
            "doctor": commands.doctor,
        }
        return run[options.command](options) if options.command in run else options.run(options)

    return run_command(command, InputError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mezzotint-eval",
        description="Measure a release: latency and memory, likelihood bound, samples.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_speed(commands)
    bound_parser.add_parser(commands)
    _add_generate(commands)
    retrieval_parser.add_parser(commands)
    doctor = commands.add_parser("doctor", help="versions, device, threads, load, memory, backends in use and why")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_speed(commands) -> None:
    speed = commands.add_parser(
        "speed",
        help="latency, memory and tokens/s against context and batch, beside the floor",
        description="Latency of a denoising step, an advance (commit and denoise in one pass), a commit and a prefill "
        "chunk; bytes of weights and state; tokens/s; beside the floor: the bare matrix products of the step and the "
        "reading of its state. Writes a results file and beside it a table (.md, .csv) and curves (.png). Contexts "
        "that do not fit are recorded, not tried.",
    )
    speed.add_argument("releases", nargs="*", metavar="RELEASE", help="release folders (mezzotint-export makes them)")
    speed.add_argument(
        "--presets", metavar="LIST", help="measure presets with random weights: debug, 10m, 125m, 1b, 3b"
    )
    speed.add_argument(
        "--backbones",
        default="attention,mamba,hybrid",
        metavar="LIST",
        help="backbones of the presets: attention, attention_gqa, mamba, hybrid, hybrid_gqa (default: %(default)s)",
    )
    speed.add_argument("--contexts", default="1k,4k,16k,64k,256k", metavar="LIST", help="tokens (default: %(default)s)")
    speed.add_argument("--batches", default="1", metavar="LIST", help="rows decoded together (default: %(default)s)")
    speed.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="tokens committed at once (default: 512; quick: 128)"
    )
    speed.add_argument(
        "--steps", type=int, default=8, choices=(4, 8, 16, 32), help="denoising steps a block in the table"
    )
    speed.add_argument("--quick", action="store_true", help="fewer samples: seconds instead of minutes")
    speed.add_argument(
        "--check-fill", action="store_true", help="also compare a random state with a real prefill at 4k"
    )
    speed.add_argument("--dry-run", action="store_true", help="print the cells with their bytes, measure nothing")
    _add_machine(speed)
    _add_out(speed)


def _add_generate(commands) -> None:
    generate = commands.add_parser(
        "generate", help="continue a prompt; prints text, passes and tokens/s", description="Continue a prompt."
    )
    generate.add_argument("release", metavar="RELEASE", help="release folder")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue (default: none)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 file whose text to continue")
    prompt.add_argument("--prompt-ids", metavar="LIST", help="token ids to continue, for example 17,40,3")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    generate.add_argument("--samples", type=int, default=1, metavar="N", help="samples, forked from one prefill")
    rule = generate.add_argument_group("how a block is revealed (one of these; default: --steps 8)")
    rule.add_argument("--steps", type=int, metavar="S", help="equal shares in S steps, the surest first")
    rule.add_argument(
        "--threshold", type=float, metavar="P", help="each step every token at least P sure, at least one"
    )
    rule.add_argument(
        "--entropy-bound", type=float, metavar="NATS", help="each step tokens whose entropies sum to at most NATS"
    )
    rule.add_argument("--ancestral", type=int, metavar="S", help="exact ancestral sampling in S steps")
    rule.add_argument("--first-hitting", action="store_true", help="one token a step in random order: continuous time")
    generate.add_argument(
        "--temperature", type=float, default=1.0, help="0: the likeliest token (default: %(default)s)"
    )
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="mass that sampling is cut to (default: %(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    generate.add_argument("--json", action="store_true", help="print JSON")
    _add_machine(generate)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16 (default: on a CPU float32, bfloat16 for presets 1b and 3b; on CUDA bfloat16)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1, the steadiest)")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/NAME.jsonl)")


if __name__ == "__main__":
    sys.exit(main())
