"""Ranks: joining the process group, which devices are whose, and sums over all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mezzotint.models.errors import InputError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def say(self, sentence: str) -> None:
        """Print on the main rank, at once."""
        if self.main:
            print(sentence, flush=True)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group that the launcher's environment describes, or a group of one on a free port; leave at the end.

    DeepSpeed finds the group made and builds no C++ extension for it. Raises InputError when a launcher set only some of
    the rendezvous variables.
    """
    given = [name for name in VARIABLES if name in os.environ]
    launched = "RANK" in given or "WORLD_SIZE" in given
    if launched and len(given) < len(VARIABLES):
        missing = ", ".join(name for name in VARIABLES if name not in given)
        raise InputError(
            f"the launcher set {', '.join(given)} but not {missing}: start with torchrun or deepspeed, or unset them"
        )
    if not launched:
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        os.environ.update(alone)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
        if not launched:
            for name in alone:
                del os.environ[name]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
