"""Cached attention in Triton against the literal loop over (query, key) pairs, in the interpreter or on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from oracles import block_attention_oracle
from support import generator
from triton_support import DEVICE, MARKS, close, on_device

from mezzotint.models.ops import triton_attend

pytestmark = MARKS


@pytest.mark.parametrize("own", (True, False), ids=("with own keys", "prefix alone"))
@pytest.mark.parametrize("heads, G, P", [((2, 2), 3, 5), ((6, 2), 5, 20), ((1, 1), 1, 3)], ids=str)
@pytest.mark.parametrize("shares", (1, 3))
def test_attention_is_the_literal_loop(heads, G, P, own, shares, monkeypatch):
    """Ranges of every length from nothing to all of 75 keys, over a state whose unwritten part is NaN."""
    monkeypatch.setattr(triton_attend, "LEAST_KEYS", 75 // shares)
    monkeypatch.setattr(triton_attend, "KEYS", 16)
    if shares > 1:  # several tiles of queries, which end inside a block
        monkeypatch.setattr(triton_attend, "ROWS", 16)
    g, M, S = generator(2), 3, 75

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, k, v = normal(2, heads[0], M, G, P), normal(2, heads[1], S, P), normal(2, heads[1], S, P)
    mine = (normal(2, heads[1], M, G, P), normal(2, heads[1], M, G, P)) if own else None
    lo, hi = torch.tensor([[0, 0, 7], [3, 0, 0]]), torch.tensor([[75, 1, 40], [20, 64, 33]])
    if own:  # a block of which only its own keys are seen
        hi[1, 2] = 0
    expected = block_attention_oracle(q, k, v, lo, hi, mine)
    k[1, :, 64:], v[1, :, 64:] = torch.nan, torch.nan
    ranges = [t.to(DEVICE, torch.int32) for t in (lo, hi)]
    own_here = None if mine is None else tuple(on_device(*mine))
    wide = torch.stack(on_device(q, q), dim=1)[:, 0]  # a view with strides of its own
    found = triton_attend.attend_cache(wide, *on_device(k, v), *ranges, own_here, longest=S)
    close(found, expected)


def test_a_block_that_sees_nothing_gets_zeros():
    q, k = (torch.randn(1, 2, 1, 3, 4, generator=generator(1), dtype=torch.float64) for _ in range(2))
    nothing = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    keys = on_device(k[:, :, 0], k[:, :, 0])
    found = triton_attend.attend_cache(*on_device(q), *keys, nothing, nothing, None, longest=3)
    assert torch.equal(found.cpu(), torch.zeros_like(found.cpu()))
