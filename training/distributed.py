"""Ranks: joining the process group, which devices are whose, and sums over all of them."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mezzotint.data.cli import verdict
from mezzotint.models.errors import InputError

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# how many processes these start at once; they do not say how the processes find each other
STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, float64 on the CPU in and out, the same bits on every rank; collective."""
        total = values.to(self.device, torch.float64, copy=True)
        if self.world > 1:
            dist.all_reduce(total)
        return total.cpu()

    def total(self, value: float) -> torch.Tensor:
        """Sum () over ranks, float64 on the device, which nobody waits for; collective."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def collect(self, values: list[int]) -> list[int]:
        """The lists of all ranks, one after the other, on every rank; collective, and slow."""
        found: list[list[int]] = [values] * self.world
        if self.world > 1:
            dist.all_gather_object(found, values)
        return [value for part in found for value in part]

    def alone(self, work: Callable[[], T]) -> T | None:
        """`work` on the main rank, None on the others; collective.

        When it fails there, the others leave as well, with the code that the main rank ends with.
        """
        done, failure = None, None
        if self.main:
            try:
                done = work()
            except Exception as error:
                failure = error
        code = int(self.total(0.0 if failure is None else verdict(failure, InputError)[0]))
        if code:
            raise failure or SystemExit(code)  # the main rank says why
        return done

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def say(self, sentence: str) -> None:
        """Print on the main rank, at once."""
        if self.main:
            with contextlib.suppress(OSError):  # the output may lie on the full disk that the sentence is about
                print(sentence, flush=True)


def join() -> Ranks:
    """Join the process group of the launcher's environment, or a group of one, until the process ends.

    A process joins once, and later calls find the same group: DeepSpeed keeps a hold of it, and builds no C++ extension
    for a group that it finds made. Raises InputError when a launcher set only some of the rendezvous variables.
    """
    if not dist.is_initialized():
        alone = _complete_environment()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # alone, a store in memory: a port found free may be taken before it is listened on
        rendezvous: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30), **rendezvous)
        atexit.register(dist.destroy_process_group)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def _complete_environment() -> bool:
    """Leave a launcher's variables alone; set those of a group of one, and return True, where there is no launcher."""
    given = [name for name in VARIABLES if name in os.environ]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        for name, starter in STARTERS.items():
            if int(os.environ.get(name, "1")) > 1:
                raise InputError(
                    f"{starter} started {os.environ[name]} processes, each of which would train alone on one run folder: "
                    "let it start one torchrun a node instead, as launch/slurm/train.sbatch does"
                )
        # DeepSpeed looks at all five; nothing listens on the port of a group of one
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
        return True
    if len(given) < len(VARIABLES):
        missing = ", ".join(name for name in VARIABLES if name not in given)
        raise InputError(
            f"the launcher set {', '.join(given)} but not {missing}: start with torchrun or deepspeed, or unset them"
        )
    return False
