"""Slabs: runs of rows whose temporaries stay in a CPU core's cache; on other devices everything is one slab."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ELEMENTS = 1 << 18  # of one temporary on a CPU: a megabyte in float32


def slabs(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` elements each."""
    step = max(1, rows if device.type != "cpu" else ELEMENTS // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
