"""The command lines that start a recipe on a cluster, put together and checked before anything is queued."""

from __future__ import annotations

import os
import random
import shlex
import socket
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mezzotint.models.errors import InputError
from mezzotint.training.config import TrainConfig

HERE = Path(__file__).resolve().parent
SBATCH = HERE / "slurm" / "train.sbatch"
TORCHRUN = HERE / "torchrun.sh"
DEEPSPEED = HERE / "deepspeed.sh"
PORTS = range(10_000, 30_000)  # below the ports that systems give to connections going out


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line and the variables it needs on top of the environment."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """One line that a shell reads back to the same."""
        set_ = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*set_, shlex.join(self.arguments)])

    def run(self) -> None:
        """Become this command; does not return. Raises InputError when it is not installed."""
        try:
            os.execvpe(self.arguments[0], list(self.arguments), {**os.environ, **self.variables})
        except FileNotFoundError:
            raise InputError(
                f"{self.arguments[0]} is not on this machine: run the printed command where it is"
            ) from None


def check_world(config: TrainConfig, processes: int) -> str:
    """A sentence on how the rows are shared out; InputError when they cannot be."""
    if processes < 1:
        raise InputError(f"{processes} processes: give at least one")
    accumulation = config.accumulation(processes)
    rows = f"{config.rows_per_step} rows a step"
    return f"{processes} processes, {rows}, {config.micro_rows} at once, accumulation {accumulation}"


def slurm(
    recipe: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int,
    processes_per_node: int,
    time: str | None,
    partition: str | None,
    name: str,
    more: Sequence[str],
) -> Command:
    """sbatch of the project's batch file; `recipe` is the recipe and its overrides, `more` are sbatch's own options."""
    options = [f"--nodes={nodes}", f"--job-name={name}"]
    options += [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    options += [f"--time={time}"] if time else []
    options += [f"--partition={partition}"] if partition else []
    exported = f"--export=ALL,PYTHON={sys.executable},PROCESSES_PER_NODE={processes_per_node}"
    return Command(arguments=("sbatch", *options, exported, *more, str(SBATCH), *recipe))


def torchrun(
    recipe: Sequence[str], *, nodes: int, processes_per_node: int, head: str | None, port: int | None, run: str
) -> Command:
    """The project's torchrun script, for every node alike.

    Nodes must name the same port without talking: it follows from the run folder, so that two runs differ.
    """
    variables = {"PYTHON": sys.executable, "PROCESSES_PER_NODE": str(processes_per_node)}
    if nodes > 1:
        if head is None:
            raise InputError(f"{nodes} nodes must find each other: give --head HOST, the name of one of them")
        variables |= {"NODES": str(nodes), "HEAD": head, "PORT": str(port or port_of(run))}
    elif port is not None:
        variables["PORT"] = str(port)
    return Command(arguments=("bash", str(TORCHRUN), *recipe), variables=variables)


def deepspeed(recipe: Sequence[str], *, hostfile: Path | None, processes_per_node: int, port: int | None) -> Command:
    """The project's DeepSpeed script, started once, on the first host."""
    variables = {"PYTHON": sys.executable}
    if hostfile is not None:
        variables["HOSTFILE"] = str(hostfile.resolve())
    if processes_per_node:
        variables["PROCESSES_PER_NODE"] = str(processes_per_node)
    if port is not None:
        variables["PORT"] = str(port)
    return Command(arguments=("bash", str(DEEPSPEED), *recipe), variables=variables)


def slots(hostfile: Path) -> dict[str, int]:
    """Processes by host of a DeepSpeed hostfile, lines of `host slots=N`. Raises InputError naming the line."""
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{hostfile} cannot be read ({error.strerror}): give a file of lines `host slots=8`") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        count = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else ""
        if not count.isdigit() or not int(count):
            raise InputError(f"{hostfile}, line {number}: {line.strip()!r} is not `host slots=N`")
        if words[0] in found:
            raise InputError(f"{hostfile}, line {number}: {words[0]} is there twice; give it all its slots in one line")
        found[words[0]] = int(count)
    if not found:
        raise InputError(f"{hostfile} names no host: give lines `host slots=8`")
    return found


def port_of(name: str) -> int:
    """A port that everybody who knows the name agrees on."""
    return PORTS[zlib.crc32(name.encode()) % len(PORTS)]


def free_port() -> int:
    """A port of this machine on which nothing listens, and which no connection going out is given meanwhile."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise InputError(f"no free port among {PORTS.start} to {PORTS.stop - 1}: give one with --port")
