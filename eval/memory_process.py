"""What a whole process holds at its peak: resident pages on a CPU, the allocator's bytes on CUDA.

Both stand beside the count of storages (eval/memory.py): resident pages include libraries and what malloc keeps, and
understate where freed pages are used again; so they say something only in a process made for one cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # man 5 proc, clear_refs: the peak becomes what is resident now


def resident_bytes() -> int | None:
    """Bytes of this process in memory now; None where the system does not say."""
    return _status("VmRSS")


def resident_peak() -> int | None:
    """The most since the start, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Begin a new peak; where the system cannot, the old one stays."""
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def process_peak(calls: list[Callable[[], object]], *, device: str | torch.device) -> dict[str, int | None]:
    """The peak while each of `calls` runs twice (the second time with what the first has left behind).

    On a CPU {"process": bytes resident}; on CUDA {"allocated", "reserved": bytes of torch's allocator}.
    """
    on_card = torch.device(device).type == "cuda"
    if on_card:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak()
    for call in calls:
        for _ in range(2):
            call()
    if not on_card:
        return {"process": resident_peak()}
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }
