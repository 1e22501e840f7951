"""Slabs: runs of rows whose temporaries stay in a CPU core's cache; on other devices everything is one slab."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

ELEMENTS = 1 << 18  # of one temporary on a CPU: a megabyte in float32


def slabs(t: Tensor) -> Iterator[slice]:
    """Slices that cover the first dimension of `t`."""
    rows = t.shape[0]
    step = max(1, rows if t.device.type != "cpu" else ELEMENTS * rows // max(1, t.numel()))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def rows_of(t: Tensor) -> Tensor:
    """(..., D) -> (rows, D); a view wherever the strides allow one, and always of a tensor that was just made."""
    return t.reshape(-1, t.shape[-1])
