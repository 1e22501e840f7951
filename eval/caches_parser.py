"""The options of `mezzotint-eval caches`; what it does is imported when it is asked for."""

from __future__ import annotations

import argparse
import textwrap

ABOUT = (
    "Compares cache policies: the same prompts are continued under every policy, at every length and batch, and what that "
    "cost is counted beside what it is worth. Quality is agreement with the uncached decode token for token, the "
    "likelihood bound of what was written, and the share of retrieval questions answered. Every sample is one row of the "
    "results file; the same command run again goes on where it stopped."
)
EXAMPLES = """policies (parameters behind a colon; several values with slashes are a sweep, one policy each):
  none                                          full recomputation; on a block-causal model its exact block cache
  fast:mode=prefix|dual:refresh=N               Fast-dLLM; on a block-causal model dual over sub-blocks
  entropy:threshold=0.1/0.5/2:recent=64         EntropyCache
  dllm:prompt_interval=50:response_interval=4:ratio=0.25    dLLM-Cache
  polestar:clusters=8:refreshed=4               Polestar
  acache:ratio=0/0.2/1  bicache:layers=2:interval=16  packet  packet:adapters=FILE    need --shared
  fork                                          exact sharing of a prefix, block-causal; needs --shared prefix=...
  drop:keep=0.5:rule=leave-one-out|recency|random           eviction, block-causal

--prompts: a line is {"prompt": [ids], "answer": [ids], "given": [booleans], "shared": [[start, end], ...]}. Where `given` is
  true the answer's token stands there from the start, the others are asked. `given` and `shared` may be left out.

examples:
  mezzotint-eval caches row/ causal/ --policies none fast entropy:threshold=0.1/0.3/1/3 --data prepared/ --lengths 256,1k
  mezzotint-eval caches row/ --policies acache:ratio=0/0.1/0.2/1 --task mqar:queries=4 --lengths 256 --shared infix=0.5
  mezzotint-eval caches causal/ --policies drop:keep=0.5/0.25:rule=leave-one-out/recency/random --task passkey --lengths 1k
"""


def add_parser(commands) -> None:
    """Add the command to an argparse sub-parser collection."""
    parser = commands.add_parser(
        "caches",
        help="cache policies side by side: speed, recomputed tokens and bytes against quality",
        description=textwrap.fill(ABOUT, 100),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="release folders (mezzotint-export makes them)")
    parser.add_argument("--policies", nargs="+", required=True, metavar="POLICY", help="none is always among them")
    what = parser.add_argument_group("what is continued (one of --data, --task and --prompts)")
    what.add_argument("--data", metavar="FOLDER", help="prepared text: prompts are the starts of its rows")
    what.add_argument("--task", metavar="TASK", help="a retrieval task, as in mqar:pairs=8:queries=4")
    what.add_argument("--prompts", metavar="FILE", help="prompts of your own, JSON lines: see below")
    what.add_argument("--text", default="stdlib", metavar="FOLDER", help="prepared text for haystack=text")
    what.add_argument(
        "--lengths", metavar="LIST", help="tokens of prompt and answer, as in 256,1k (not with --prompts)"
    )
    what.add_argument("--new-tokens", type=int, default=64, metavar="N", help="written behind text (default: 64)")
    what.add_argument("--samples", type=int, default=16, metavar="N", help="prompts of a cell (default: %(default)s)")
    what.add_argument("--shared", metavar="PLACE=SHARE", help="shared part: prefix, infix or suffix of the prompt")
    what.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    how = parser.add_argument_group("how it is decoded and scored")
    how.add_argument("--batch", default="1", metavar="LIST", help="rows together (default: %(default)s)")
    how.add_argument("--block", type=int, default=32, metavar="N", help="columns revealed at a time (default: 32)")
    how.add_argument("--sub-block", type=int, metavar="N", help="of a block-causal model's block (default: all of it)")
    how.add_argument(
        "--reveal",
        default="threshold=0.9",
        metavar="RULE",
        help="topk=N, threshold=P, factor=F or entropy=H (default: %(default)s)",
    )
    how.add_argument("--draws", type=int, default=8, metavar="N", help="masks a block of the bound; 0 for none")
    how.add_argument("--kind", choices=("bidirectional", "block-causal"), help="where a release does not say it")
    how.add_argument("--dtype", default="float32", metavar="NAME", help="float32, bfloat16 or float16")
    how.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    how.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="results file (default: runs/eval/caches-NAME.jsonl)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.eval.caches_command import run

    return run(options)
