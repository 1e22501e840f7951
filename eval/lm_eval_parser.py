"""The options of `mezzotint-eval lm-eval`; what it does is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

ABOUT = (
    "Runs tasks of lm-eval (an optional package: pip install 'mezzotint[eval]') on a release, offline where their data "
    "are. Log-likelihoods are likelihood bounds: choices are compared by them, perplexities are upper bounds and printed "
    "with <=. A task that is done is not run again; each is one row of the results file, with lm-eval's version."
)
EXAMPLES = """examples:
  mezzotint-eval lm-eval release/ --preset common-sense --limit 200
  mezzotint-eval lm-eval release/ --tasks arc_easy,lambada_openai --batch-size 16
  mezzotint-eval lm-eval release/ --tasks my_task --include-path my_tasks/
  mezzotint-eval lm-eval release/ --tasks ruler_vt,ruler_cwe,ruler_fwe,niah_single_1 --lengths 4096,8192 --limit 50

--preset common-sense: piqa, arc_challenge and boolq, and five of our choice: arc_easy, hellaswag, openbookqa, social_iqa,
winogrande. Of RULER, ruler_vt, ruler_cwe, ruler_fwe, niah_single_1, niah_multikey_2 and niah_multikey_3 make their prompts
without a network, sized by the release's tokenizer.json.
"""


def add_parser(commands) -> None:
    """Add the command to an argparse sub-parser collection."""
    parser = commands.add_parser(
        "lm-eval",
        help="tasks of lm-eval: multiple choice, perplexity, generation",
        description=textwrap.fill(ABOUT, 100),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "releases", nargs="+", metavar="RELEASE", help="release folders of one tokenizer and block length"
    )
    what = parser.add_argument_group("what is asked")
    what.add_argument("--tasks", default="", metavar="LIST", help="names of tasks, groups or tags of lm-eval")
    what.add_argument("--preset", choices=("common-sense",), help="a list of tasks, see below")
    what.add_argument("--include-path", metavar="DIR", help="folder with further task files")
    what.add_argument("--limit", type=int, metavar="N", help="documents of a task (default: all)")
    what.add_argument("--num-fewshot", type=int, metavar="N", help="examples in front (default: the task's own)")
    what.add_argument(
        "--lengths", default="", metavar="LIST", help="tokens of prompts, for RULER's tasks (default: 4096)"
    )
    how = parser.add_argument_group("how it is answered")
    how.add_argument("--draws", type=int, metavar="D", help="masks a block (default: as many as a block has tokens)")
    how.add_argument("--seed", type=int, default=0, help="of masks and samples (default: %(default)s)")
    how.add_argument(
        "--reveal",
        default="threshold=0.9",
        metavar="RULE",
        help="in generation: topk=N, threshold=P, entropy=H, ancestral=N or first-hitting (default: %(default)s)",
    )
    how.add_argument(
        "--greedy",
        default="argmax",
        metavar="HOW",
        help="what 'greedy' means in tasks that ask for it: argmax, each block's continuation is likeliest with all of it "
        "masked, or decode, greedy decoding writes it, which takes far longer (default: %(default)s)",
    )
    how.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="questions together, where they fit (default: 8)"
    )
    how.add_argument("--draw-batch", type=int, default=64, metavar="N", help="masks denoised at once (default: 64)")
    how.add_argument(
        "--use-cache",
        metavar="PATH",
        help="keep answers in lm-eval's own cache there, so that a task that was interrupted goes on",
    )
    how.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16 or float16 (default: float32; on CUDA bfloat16)"
    )
    how.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1, the steadiest)")
    parser.add_argument(
        "--dry-run", action="store_true", help="load the tasks, print them with bytes and time, run nothing"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run tasks again that failed")
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/NAMES.jsonl)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.eval.lm_eval_command import run

    return run(options)
