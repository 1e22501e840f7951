"""The one table of operations: what each op is called, which backends serve it, and why the others are declined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import flash_cpu


@dataclass(frozen=True)
class Backend:
    """One way to compute one op; `declined` is None where it can be used, else a sentence that says why not."""

    op: str
    name: str
    declined: str | None


def backends(device: torch.device) -> list[Backend]:
    """Every backend of every op on `device`, the preferred one of an op first."""
    return [
        Backend("attention", "flash_cpu", flash_cpu.declined(device)),
        Backend("attention", "softmax_tiles", None),
        Backend("ssd", "torch", None),
        Backend("conv", "torch", None),
    ]
