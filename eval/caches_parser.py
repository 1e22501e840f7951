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
  none      full recomputation; on a block-causal model its exact block cache
  fast      Fast-dLLM; on a block-causal model dual over sub-blocks: mode=prefix|dual, refresh=STEPS (0: never)
  entropy   EntropyCache: threshold=NATS, recent=TOKENS, masks=canvas|block
  dllm      dLLM-Cache: prompt_interval=STEPS, response_interval=STEPS, ratio=SHARE, first_layer=true|false
  polestar  Polestar: clusters=N, refreshed=N, last_layer=N, before=N, after=N, min_last=N, min_since=STEPS,
            window_every=STEPS
  acache    ACache: ratio=SHARE of anchors, refresh=STEPS, drop_rest=true|false; needs --shared
  bicache   BiCache: layers=N, interval=STEPS, inner=none|dual, table=PERCENT-LAYERS,...; needs --shared prefix=...
  packet    KV Packet: adapters=FILE (without: plain concatenation); needs --shared
  fork      exact sharing of a prefix, block-causal; needs --shared prefix=...
  drop      DropKV, block-causal: keep=SHARE, rule=leave-one-out|recency|random, kernel=TOKENS, protect=TOKENS,
            exact_first=true|false, seed=N

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
    how.add_argument(
        "--block",
        type=int,
        metavar="N",
        help="columns revealed at a time, bidirectional (default: 32, or all of a shorter answer)",
    )
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
