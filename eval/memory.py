"""Bytes: what the machine can still give, what tensors hold at their peak, what an out-of-memory error looks like."""

from __future__ import annotations

import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GB, GIB = 10**9, 2**30
HEADROOM = 0.92  # share of the available memory that a cell may be predicted to need

# (limit, usage) of the memory control group, versions 2 and 1
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def both_units(count: float) -> str:
    """Bytes in GB (10^9) and GiB (2^30), since the two differ by 7%."""
    return f"{count / GB:.2f} GB ({count / GIB:.2f} GiB)"


def available_bytes(device: str | torch.device = "cpu", *, limit: int | None = None) -> int:
    """Bytes that can still be allocated: the least of free memory, the control group's and the process's limits.

    limit: bytes of address space that a new process will be given (RLIMIT_AS), of which its libraries take their part.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    limits = [psutil.virtual_memory().available]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - psutil.Process().memory_info().vms)
    if limit is not None:
        limits.append(limit - mapped_when_fresh())
    for limit_file, usage in _GROUPS:
        if Path(limit_file).exists() and (most := Path(limit_file).read_text().strip()) != "max":
            limits.append(int(most) - int(Path(usage).read_text()))
    return max(0, min(limits))


@lru_cache(maxsize=1)
def mapped_when_fresh() -> int:
    """Bytes of address space of a process that has only imported what measures; asked of one, since this one has grown."""
    code = "import psutil, mezzotint.eval.speed_cell; print(psutil.Process().memory_info().vms)"
    return int(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True).stdout)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out; torch raises a plain RuntimeError for it on a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory")
    )


class StoragePeak(TorchDispatchMode):
    """Counts bytes of the storages that come into being inside it; `peak` is the most that lived at one time.

    Each storage counts once, whatever the number of its views, until it is freed. Counting slows every operation
    down: never inside a timed run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage_id(leaf) not in before:
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage, identity = tensor.untyped_storage(), _storage_id(tensor)
        if identity in self._known:
            return
        size = storage.nbytes()
        self._known.add(identity)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, identity, size)

    def _release(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.live -= size


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storage_peak(call: Callable[[], object]) -> int:
    """Most bytes of new tensors alive at one time while `call` runs once (its result included).

    Not in inference mode: operations that are made of others then hide what they hold on the way.
    """
    assert not torch.is_inference_mode_enabled(), "the count would leave out temporaries"
    with StoragePeak() as counter:
        result = call()
    del result
    return counter.peak
