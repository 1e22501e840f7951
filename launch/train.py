"""The command `mezzotint-train`: read a recipe, then train, or say what training would be."""

from __future__ import annotations

import argparse
import os
import sys

ABOUT = "Train a block-diffusion denoiser from a recipe, or go on with a run that was interrupted."
EXAMPLES = """examples:
  mezzotint-train debug --dry-run                     # resolved recipe, parameters, FLOPs; trains nothing
  mezzotint-train debug                               # seconds on a CPU; run it again to resume
  mezzotint-train demo model.backbone=mamba run=runs/demo/runs/mamba
  mezzotint-train my_recipe.yaml optim.lr=3e-4 steps=2000

  # several processes: the same command under a launcher
  torchrun --nproc-per-node 8 -m mezzotint.launch.train 125m
  deepspeed --num_gpus 8 --module mezzotint.launch.train 125m

A run resumes from the newest complete checkpoint in its run folder. SIGTERM or Ctrl-C finishes the step, saves and
exits with 85. Exit codes: 0 done, 2 bad input, 85 stopped and saved, 86 loss or gradient not finite."""


def main() -> int:
    """Run `mezzotint-train`; the exit code is 2 on bad input, after one sentence."""
    options = _parser().parse_args()
    # threads that spin while they wait make small operations many times slower on shared cores; set before torch loads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "OMP_NUM_THREADS" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # processes that share cores must not each start a thread for every core
    from mezzotint.data.cli import run_command
    from mezzotint.models.errors import InputError

    return run_command(lambda: _run(options), InputError)


def _run(options: argparse.Namespace) -> int:
    from mezzotint.training.config import load_recipe

    config = load_recipe(options.recipe, options.override)
    if options.dry_run:
        from mezzotint.training.dry_run import dry_run

        print(dry_run(config))
        return 0
    from mezzotint.training.loop import train

    return train(config)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mezzotint-train", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe in launch/recipes/, or a YAML file")
    parser.add_argument(
        "override", nargs="*", default=[], metavar="key.path=value", help="replaces one value of the recipe"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and what a step costs, then end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="the default: go on from the run folder if it holds anything"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
