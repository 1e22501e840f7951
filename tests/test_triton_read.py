"""The Triton read of the clean prefix against the token-by-token recurrence, in the interpreter or on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from oracles import ssd_oracle
from support import generator, starts_of
from torch import Tensor
from triton_support import DEVICE, DTYPE, MARKS, close, on_device

from mezzotint.models.ops.triton_read import read_prefix

pytestmark = MARKS


def chunk_states(x, dt, A, B, starts, state, R: int) -> Tensor:
    """(Bt, Z, N, H, P): the state entering each chunk, token by token, zero where a document starts inside the last one."""
    rows = []
    for r in range(len(x)):
        h, found = state[r], [state[r]]
        for b in range(x.shape[1]):
            if starts[r, b] == b and b > 0:
                h = torch.zeros_like(h)
            for i in range(x.shape[2]):
                write = B[r, b, i][:, None, None] * (dt[r, b, i][:, None] * x[r, b, i])
                h = torch.exp(dt[r, b, i] * A)[None, :, None] * h + write
            if (b + 1) % R == 0:
                found.append(h)
        rows.append(torch.stack([*found, torch.full_like(h, torch.nan)]))  # a chunk behind the last is read by nobody
    return torch.stack(rows)


CASES = {
    "one chunk": dict(lengths=[[5], [5]], frontiers=[[0, 2, 5], [1, 3, 4]], R=7),
    "chunks of two": dict(lengths=[[5], [5]], frontiers=[[0, 2, 5], [1, 3, 4]], R=2),
    "chunks of one block": dict(lengths=[[3], [3]], frontiers=[[0, 3], [2, 1]], R=1),
    "documents": dict(lengths=[[2, 3, 2], [1, 1, 5]], frontiers=[[1, 3, 6], [1, 4, 6]], R=3),
    "documents that start with a chunk": dict(lengths=[[3, 3], [1, 5]], frontiers=[[3, 4, 5], [0, 1, 3]], R=3),
    "three rows": dict(lengths=[[3], [1, 2], [2, 1]], frontiers=[[2], [1], [2]], R=2),
}


@pytest.mark.parametrize("sizes", [dict(G=3, H=3, P=5, N=7), dict(G=5, H=1, P=67, N=19)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_read_is_the_recurrence(name, sizes):
    """Clean blocks read their prefix as noisy blocks do: the in-block part and the states come from elsewhere."""
    case, g = CASES[name], generator(5)
    G, H, P, N = (sizes[k] for k in "GHPN")
    starts, frontiers = starts_of(case["lengths"]), torch.tensor(case["frontiers"])
    batch, m = starts.shape
    M = m + frontiers.shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    x, B, C, state = normal(batch, M, G, H, P), normal(batch, M, G, N), normal(batch, M, G, N), normal(batch, N, H, P)
    dt = 0.4 * torch.rand((batch, M, G, 2, H), generator=g, dtype=torch.float64)
    A = -torch.rand(H, generator=g, dtype=torch.float64) - 0.1
    reach = torch.cat([starts, starts[:, -1:]], dim=1)
    expected, _ = ssd_oracle(x, dt, A, B, C, clean_blocks=m, frontiers=frontiers, starts=reach, state=state)
    alone = torch.zeros(batch, M, dtype=torch.int64)  # every block from an empty state: its own part
    y, _ = ssd_oracle(x, dt, A, B, C, clean_blocks=0, frontiers=alone, starts=alone, state=torch.zeros_like(state))
    states = chunk_states(x[:, :m], dt[:, :m, :, 0], A, B[:, :m], starts, state, case["R"])
    index = torch.cat([torch.arange(m).expand(batch, -1), frontiers], dim=1)
    run = (dt[:, :, :, 0] * A).cumsum(2)
    wide = torch.cat([x.flatten(3), B, C], dim=-1).to(
        DEVICE, DTYPE
    )  # x, B and C as views of one tensor, as in the mixer
    x, B, C = wide.split([H * P, N, N], dim=-1)
    found = read_prefix(
        *on_device(y), C, *on_device(run), x[:, :m].unflatten(-1, (H, P)), B[:, :m],
        *on_device(dt[:, :m, :, 0], run[:, :m], states), frontiers=index, starts=reach.gather(1, index),
        chunk_blocks=case["R"],
    )  # fmt: skip
    close(found, expected)
