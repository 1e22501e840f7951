"""The command `mezzotint-train`: read a recipe, then train, or say what training would be; look at runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ABOUT = "Train a block-diffusion denoiser from a recipe, or go on with a run that was interrupted."
EXAMPLES = """examples:
  mezzotint-train debug --dry-run                     # resolved recipe, parameters, FLOPs; trains nothing
  mezzotint-train debug                               # seconds on a CPU; run it again to resume
  mezzotint-train demo model.backbone=mamba run=runs/demo/runs/mamba
  mezzotint-train my_recipe.yaml optim.lr=3e-4 steps=2000
  mezzotint-train 125m --plan --gpus 8 --gpu h100-80  # memory, time and disk; trains nothing

  # several processes: the same command under a launcher
  torchrun --nproc-per-node 8 -m mezzotint.launch.train 125m
  deepspeed --num_gpus 8 --module mezzotint.launch.train 125m

  # looking at runs (a recipe of such a name is reached by its path, ./status.yaml)
  mezzotint-train status runs/demo/runs/mamba         # one run at a glance; several as a table
  mezzotint-train plot runs/demo/runs/* --out curves.png

  # soft tokens for documents computed alone, on a frozen release
  mezzotint-train adapters release/ --data prepared/ --run runs/adapters

A run resumes from the newest complete checkpoint in its run folder. SIGTERM, SIGUSR1, Ctrl-C or a file STOP in the run
folder finish the step, save and end the run. Exit codes: 0 done, 1 crashed, 2 bad input, 85 stopped and saved,
86 loss or gradient not finite too often, 87 a rank hung. Launchers replace them; outcome.json in the run folder does not."""
RAW = argparse.RawDescriptionHelpFormatter


def main() -> int:
    """Run `mezzotint-train`; the exit code is 2 on bad input, after one sentence."""
    words = sys.argv[1:]
    looks = {
        "status": (_status_parser, _status),
        "plot": (_plot_parser, _plot),
        "adapters": (_adapters_parser, _adapters),
    }
    make_parser, run = looks.get(words[0], (_parser, _train)) if words else (_parser, _train)
    parser = make_parser()
    options, rest = parser.parse_known_args(words[1:] if run is not _train else words)
    if any(word.startswith("-") for word in rest) or (rest and run is not _train):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if run is _train:
        options.override += rest  # argparse leaves those that follow an option
    # threads that spin while they wait make small operations many times slower on shared cores; set before torch loads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "OMP_NUM_THREADS" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # processes that share cores must not each start a thread for every core
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints what it does
    from mezzotint.data.cli import run_command
    from mezzotint.models.errors import InputError

    return run_command(lambda: run(options), InputError)


def _train(options: argparse.Namespace) -> int:
    from mezzotint.training.config import load_recipe

    config = load_recipe(options.recipe, options.override)
    if options.dry_run:
        from mezzotint.training.dry_run import dry_run

        print(dry_run(config))
        return 0
    if options.plan:
        from mezzotint.training.plan import plan

        print(plan(config, gpus=options.gpus, gpu=options.gpu))
        return 0
    import torch

    from mezzotint.models.allocator import keep_freed_memory
    from mezzotint.training.loop import train

    if not torch.cuda.is_available():
        keep_freed_memory()
    return train(config, profile=options.profile)


def _status(options: argparse.Namespace) -> int:
    from mezzotint.training.status import status

    text, faults = status(options.run)
    if text:
        print(text)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _plot(options: argparse.Namespace) -> int:
    from mezzotint.training.curves import plot

    print(plot(options.run, options.out, against=options.x))
    return 0


def _adapters(options: argparse.Namespace) -> int:
    from mezzotint.training.adapters import AdaptersConfig, train_adapters

    given = {name: value for name, value in vars(options).items() if value is not None and name != "local_rank"}
    return train_adapters(AdaptersConfig(**given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mezzotint-train", description=ABOUT, epilog=EXAMPLES, formatter_class=RAW)
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe in launch/recipes/, or a YAML file")
    parser.add_argument(
        "override", nargs="*", default=[], metavar="key.path=value", help="replaces one value of the recipe"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and what a step costs, then end"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print memory, time and disk on --gpus of the kind --gpu, then end"
    )
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="for --plan: how many (default 8)")
    parser.add_argument("--gpu", default="h100-80", metavar="NAME", help="for --plan: which (default h100-80)")
    parser.add_argument(
        "--profile", action="store_true", help="trace three steps after two into RUN/profile/, and train on"
    )
    parser.add_argument(
        "--resume", action="store_true", help="the default: go on from the run folder if it holds anything"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def _status_parser() -> argparse.ArgumentParser:
    about = (
        "Where runs are and how they go: one in some lines, several as a table. Reads the run folders, touches nothing."
    )
    parser = argparse.ArgumentParser("mezzotint-train status", description=about)
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run folder")
    return parser


def _plot_parser() -> argparse.ArgumentParser:
    about = "Curves of runs as one PNG: loss, bound, gradient norm, learning rate, tokens/s and utilization."
    parser = argparse.ArgumentParser("mezzotint-train plot", description=about)
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the PNG file (default curves.png)")
    parser.add_argument("--x", choices=("tokens", "steps"), default="tokens", help="what they are drawn against")
    return parser


def _adapters_parser() -> argparse.ArgumentParser:
    about = (
        "Train soft tokens that stand around documents computed alone (KV Packet), by self-distillation: the release, whose "
        "weights stay as they are to the bit, is taught to say with them what it says when it reads all documents together. "
        "The same command goes on where it stopped; RUN/adapters.safetensors is there at the end."
    )
    parser = argparse.ArgumentParser("mezzotint-train adapters", description=about)
    parser.add_argument("release", metavar="RELEASE", help="release folder of an attention denoiser")
    parser.add_argument(
        "--data", required=True, metavar="FOLDER", help="prepared folder; a row is documents, then a text"
    )
    parser.add_argument("--run", required=True, metavar="FOLDER", help="run folder: checkpoints, and the adapters")
    numbers = {
        "steps": "optimizer steps (default 300)",
        "rows-per-step": "rows of a step, over all ranks (default 16)",
        "micro-rows": "rows of one pass (default 16)",
        "row-length": "tokens of a row (default 256)",
        "documents": "documents of a row (default 2)",
        "header": "soft tokens before a document (default 8)",
        "trailer": "soft tokens behind it (default 8)",
        "seed": "of soft tokens, masks and the order of rows (default 0)",
        "every": "steps between checkpoints (default 100)",
    }
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--share", type=float, metavar="S", help="of a row that documents take (default 0.5)")
    parser.add_argument("--lr", type=float, metavar="LR", help="at the start; falls linearly to 0 (default 5e-4)")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
