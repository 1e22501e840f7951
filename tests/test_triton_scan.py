"""The Triton scan over chunk states against its literal loop, values and gradients, in the interpreter or on a card."""

from __future__ import annotations

import pytest
import torch
from support import generator
from triton_support import DEVICE, MARKS, close, on_device

from mezzotint.models.ops import triton_scan

pytestmark = MARKS


def literal(update, decay, state):
    states = [state]
    for z in range(update.shape[1]):
        states.append(decay[:, z, None, :, None] * states[-1] + update[:, z])
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("Z, N, H, P", [(5, 7, 3, 5), (1, 1, 1, 1), (3, 33, 2, 70), (0, 4, 2, 3)], ids=str)
def test_scan_is_the_literal_loop(Z, N, H, P, monkeypatch):
    monkeypatch.setattr(triton_scan, "TILE", 256)  # N goes in several parts
    g = generator(1)
    leaves = [
        torch.randn((2, Z, N, H, P), generator=g, dtype=torch.float64),
        torch.rand((2, Z, H), generator=g, dtype=torch.float64),
        torch.randn((2, N, H, P), generator=g, dtype=torch.float64),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    here = [leaf.requires_grad_() for leaf in on_device(*leaves)]
    found, expected = triton_scan.scan(*here), literal(*leaves)
    close(found, expected)
    weight = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    mine = torch.autograd.grad((found * weight.to(found)).sum(), here)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    for a, b in zip(mine, theirs):
        if a.numel():
            close(a, b)


def test_updates_in_bfloat16_are_summed_in_float32():
    g = generator(2)
    update = torch.randn((1, 64, 2, 1, 2), generator=g).to(DEVICE, torch.bfloat16)
    decay, state = torch.ones(1, 64, 1, device=DEVICE), torch.zeros(1, 2, 1, 2, device=DEVICE)
    close(triton_scan.scan(update, decay, state)[:, -1], update.cpu().double().sum(1), 1e-6)
