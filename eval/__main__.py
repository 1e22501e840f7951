"""The command `mezzotint-eval`: its options and help. What a command does is imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mezzotint.data.cli import run_command
from mezzotint.eval import bound_parser, caches_parser, lm_eval_parser, report_parser, retrieval_parser, speed_parser
from mezzotint.models.errors import InputError

EXAMPLES = """examples:
  mezzotint-eval doctor
  mezzotint-eval speed release/ --contexts 1k,4k,16k --quick
  mezzotint-eval speed --presets 3b --backbones attention,mamba,hybrid --contexts 1k,16k,256k
  mezzotint-eval bound release/ --data prepared/ --rows 32
  mezzotint-eval lm-eval release/ --preset common-sense --limit 200
  mezzotint-eval generate release/ --prompt "def main" --max-new-tokens 128 --steps 8
  mezzotint-eval retrieval a/ b/ --tasks passkey,mqar --multiples 1,2,4,8,16 --out results.jsonl
  mezzotint-eval compare results.jsonl --subjects a b
  mezzotint-eval report results.jsonl speed.jsonl --out report/

Results are appended to one file as they come (--out); the same command run again goes on where it stopped.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 with a sentence on bad input."""
    options = build_parser().parse_args(arguments)
    return run_command(lambda: options.run(options), InputError)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mezzotint-eval",
        description="Measure a release: retrieval, likelihood bound, latency and memory, samples; report and compare.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    speed_parser.add_parser(commands)
    bound_parser.add_parser(commands)
    _add_generate(commands)
    retrieval_parser.add_parser(commands)
    lm_eval_parser.add_parser(commands)
    caches_parser.add_parser(commands)
    report_parser.add_parsers(commands)
    _add_doctor(commands)
    return parser


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
    generate.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: as the release has it)"
    )
    generate.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    generate.add_argument(
        "--compile",
        action="store_true",
        help="on a CPU, compile what stands between the products of a step: minutes at first, less from then "
        "on, for long texts",
    )
    generate.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1, the steadiest)")
    generate.set_defaults(run=_generate)


def _add_doctor(commands) -> None:
    doctor = commands.add_parser("doctor", help="versions, device, threads, load, memory, backends in use and why")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _generate(options: argparse.Namespace) -> int:
    from mezzotint.eval.commands import generate

    return generate(options)


def _doctor(options: argparse.Namespace) -> int:
    from mezzotint.eval.commands import doctor

    return doctor(options)


if __name__ == "__main__":
    sys.exit(main())
