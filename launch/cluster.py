"""The command `mezzotint-launch`: print or submit what starts a recipe on a cluster, and what the scripts there ask."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest is imported where it is used: `--help` answers at once
    from mezzotint.launch.commands import Command

    Kinds = argparse._SubParsersAction[argparse.ArgumentParser]

ABOUT = "Start a recipe on a cluster: print the command, or submit it with --submit."
EXAMPLES = """examples:
  mezzotint-launch slurm 3b_mamba --nodes 4 --gpus-per-node 8 --time 24:00:00 --partition p           # print it
  mezzotint-launch slurm 3b_mamba --nodes 4 --gpus-per-node 8 --time 24:00:00 --partition p --submit  # queue it
  mezzotint-launch slurm 125m optim.lr=3e-4 --nodes 1 --gpus-per-node 8 --with=--account=lab --with=--exclusive

  # without Slurm: the same command on every node, or one with a hostfile
  mezzotint-launch torchrun 125m --nproc-per-node 8 --submit
  mezzotint-launch torchrun 1b --nnodes 2 --nproc-per-node 8 --head node1 --submit
  mezzotint-launch deepspeed 1b --hostfile hosts --submit

All of them go on from the newest checkpoint of the run folder, and stop at the end of a step, saved, when RUN/STOP is
there (touch RUN/STOP) or on SIGTERM, SIGINT or SIGUSR1. Under Slurm a preempted job requeues itself; one that crashes
does so while each start gets further than the last (MEZZOTINT_RESTARTS_IN_A_ROW, MEZZOTINT_RESTARTS).
Exit codes: 0 done, 2 bad input, 85 stopped and saved, 86 diverged, 87 hung, 1 crashed."""


def main() -> int:
    """Run `mezzotint-launch`; the exit code is 2 on bad input, after one sentence."""
    parser = _parser()
    options, rest = parser.parse_known_args()
    strangers = [word for word in rest if word.startswith("-") or "override" not in options]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    from mezzotint.data.cli import run_command
    from mezzotint.models.errors import InputError

    if "override" in options:
        options.override += rest  # argparse leaves those that follow an option
    return run_command(lambda: COMMANDS[options.command](options), InputError)


def _slurm(options: argparse.Namespace) -> int:
    from mezzotint.launch import commands
    from mezzotint.training.config import load_recipe

    config = load_recipe(options.recipe, options.override)
    processes = options.processes_per_node or options.gpus_per_node or 1
    _note(commands.check_world(config, options.nodes * processes))
    command = commands.slurm(
        [options.recipe, *options.override],
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        processes_per_node=processes,
        time=options.time,
        partition=options.partition,
        name=options.job_name or Path(config.run).name,
        more=options.more,
    )
    return _print_or_run(command, options.submit)


def _torchrun(options: argparse.Namespace) -> int:
    from mezzotint.launch import commands
    from mezzotint.training.config import load_recipe

    config = load_recipe(options.recipe, options.override)
    _note(commands.check_world(config, options.nnodes * options.nproc_per_node))
    if options.nnodes > 1:
        _note(f"the same command on each of the {options.nnodes} nodes, which must see one run folder")
    command = commands.torchrun(
        [options.recipe, *options.override],
        nodes=options.nnodes,
        processes_per_node=options.nproc_per_node,
        head=options.head,
        port=options.port,
        run=config.run,
    )
    return _print_or_run(command, options.submit)


def _deepspeed(options: argparse.Namespace) -> int:
    from mezzotint.launch import commands
    from mezzotint.training.config import load_recipe

    config = load_recipe(options.recipe, options.override)
    if options.hostfile is not None:
        each = commands.slots(options.hostfile)
        processes = sum(options.nproc_per_node or count for count in each.values())
    else:
        processes = options.nproc_per_node or 1
    _note(commands.check_world(config, processes))
    command = commands.deepspeed(
        [options.recipe, *options.override],
        hostfile=options.hostfile,
        processes_per_node=options.nproc_per_node or (0 if options.hostfile else 1),
        port=options.port,
    )
    return _print_or_run(command, options.submit)


def _begin(options: argparse.Namespace) -> int:
    from mezzotint.launch.requeue import begin
    from mezzotint.training.config import load_recipe

    run = Path(load_recipe(options.recipe, options.override).run)
    begin(run)
    print(run)
    return 0


def _next(options: argparse.Namespace) -> int:
    from mezzotint.launch.requeue import conclude

    code, sentence = conclude(options.run, asked=options.asked, job=options.job)
    print(sentence, flush=True)
    return code


def _port(options: argparse.Namespace) -> int:
    from mezzotint.launch.commands import free_port, port_of

    print(free_port() if options.name is None else port_of(options.name))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "slurm": _slurm,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "begin": _begin,
    "next": _next,
    "port": _port,
}


def _print_or_run(command: Command, submit: bool) -> int:
    if submit:
        _note(command.shown())
        command.run()
    print(command.shown())
    return 0


def _note(sentence: str) -> None:
    """Beside the command, which alone goes to standard output."""
    print(f"# {sentence}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mezzotint-launch", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    slurm = _start(kinds, "slurm", "sbatch: one torchrun a node, requeued when it is preempted")
    slurm.add_argument("--nodes", type=int, default=1, metavar="N")
    slurm.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="0, the default: train on processors")
    slurm.add_argument(
        "--processes-per-node", type=int, default=0, metavar="N", help="default: one a GPU, or one without GPUs"
    )
    slurm.add_argument("--time", metavar="HH:MM:SS", help="time limit; the job saves and requeues before it")
    slurm.add_argument("--partition", metavar="NAME")
    slurm.add_argument("--job-name", metavar="NAME", help="default: the run folder's name")
    slurm.add_argument(
        "--with", dest="more", action="append", default=[], metavar="OPTION", help="one more option for sbatch"
    )

    torchrun = _start(kinds, "torchrun", "torchrun on this machine, or the same command on every node")
    torchrun.add_argument("--nnodes", type=int, default=1, metavar="N")
    torchrun.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="one a GPU")
    torchrun.add_argument("--head", metavar="HOST", help="the node that the others can reach by this name")
    torchrun.add_argument("--port", type=int, metavar="N", help="on the head; default: from the run folder's name")

    deepspeed = _start(kinds, "deepspeed", "the DeepSpeed launcher, over ssh to the hosts of a hostfile")
    deepspeed.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="lines of `host slots=8`; default: this machine"
    )
    deepspeed.add_argument("--nproc-per-node", type=int, default=0, metavar="N", help="default: the hostfile's slots")
    deepspeed.add_argument("--port", type=int, metavar="N", help="default: a free one")

    begin = kinds.add_parser("begin", help="for scripts: print the run folder, forget how the last start ended")
    _recipe(begin)
    following = kinds.add_parser("next", help="for scripts: what follows a start that has ended; exits with its code")
    following.add_argument("run", type=Path, metavar="RUN")
    following.add_argument("--job", metavar="ID", help="requeue this Slurm job if it should start again")
    following.add_argument("--asked", action="store_true", help="the script itself was asked to stop")
    port = kinds.add_parser("port", help="for scripts: print a free port, or the one that belongs to NAME")
    port.add_argument("name", nargs="?", metavar="NAME")
    return parser


def _start(kinds: Kinds, name: str, about: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = kinds.add_parser(name, help=about, description=about, epilog=EXAMPLES, formatter_class=raw)
    _recipe(parser)
    parser.add_argument("--submit", action="store_true", help="start it now; without, only print the command")
    return parser


def _recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe in launch/recipes/, or a YAML file")
    parser.add_argument("override", nargs="*", default=[], metavar="key.path=value", help="replaces one of its values")


if __name__ == "__main__":
    sys.exit(main())
