"""A linear layer of few rows: on a CPU a wide weight goes run by run of its outputs, so that a run stays in the cache.

MKL packs the weight anew in every product. Beside 32 rows that packing is most of the work, and a run of outputs at a
time it reads what it has just written: on an AMD EPYC (avx2, one thread, float32) 768 to 32,768 at 32 rows 68 ms whole and
47 ms in runs, 768 to 5,120 9.8 and 6.6 ms; nothing is gained below WIDE entries, or from 256 rows on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE = 1 << 21  # entries of a weight that is worth it
ROWS = 128  # most rows
RUN = 512  # outputs of one product


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, (..., I) by (O, I) -> (..., O)."""
    if not in_runs(x, weight):
        return F.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), len(weight))
    for first in range(0, len(weight), RUN):
        torch.mm(rows, weight[first : first + RUN].t(), out=out[:, first : first + RUN])
    return out.view(*x.shape[:-1], -1)


def in_runs(x: Tensor, weight: Tensor) -> bool:
    """Whether the product goes run by run: few rows, a wide plain weight in float32 or wider, nothing differentiated."""
    if weight.numel() < WIDE or x.device.type != "cpu" or torch.is_grad_enabled():
        return False
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype == x.dtype and weight.dtype.itemsize >= 4
    return plain and 0 < x.numel() <= ROWS * x.shape[-1] and not torch.is_autocast_enabled("cpu")
