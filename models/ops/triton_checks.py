"""Which of our Triton kernels a device is trusted with: each is run there once, beside plain torch, before it is chosen."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import triton_lang
from .probe import Pair, failure

NARROW = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 3e-2  # operands of the checks are bfloat16


def attend_declined(device: torch.device) -> str | None:
    """None if the cached attention serves `device`, else the reason in a sentence."""
    return triton_lang.declined(device) or _attend_checked(device)


def read_declined(device: torch.device) -> str | None:
    """None if the read of the prefix serves `device`, else the reason in a sentence."""
    return triton_lang.declined(device) or _read_checked(device)


def scan_declined(device: torch.device) -> str | None:
    """None if the scan over chunk states serves `device`, else the reason in a sentence."""
    return triton_lang.declined(device) or _scan_checked(device)


def scans(state: Tensor) -> bool:
    """Whether chunk states (..., float32) are scanned by the kernel, which has a backward pass."""
    return state.is_cuda and state.dtype == torch.float32 and scan_declined(state.device) is None


def reads(x: Tensor) -> bool:
    """Whether blocks x read their prefix through the kernel, which has no backward pass and no float64."""
    return x.is_cuda and not torch.is_grad_enabled() and x.dtype in NARROW and read_declined(x.device) is None


@functools.cache
def _attend_checked(device: torch.device) -> str | None:
    return failure(lambda: _attend(device), TOLERANCE)


@functools.cache
def _scan_checked(device: torch.device) -> str | None:
    return failure(lambda: _scan(device), 1e-4)  # in float32


@functools.cache
def _read_checked(device: torch.device) -> str | None:
    return failure(lambda: _read(device), TOLERANCE)


def _attend(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
    """Grouped heads of 64, two rows of different length, one of them shorter than a share of the keys."""
    from .attention import softmax_tiles
    from .tiles import plan_tiles
    from .triton_attend import attend_cache

    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 1, 32, 64), (2, 2, 1000, 64), (2, 2, 1000, 64), (2, 2, 1, 32, 64), (2, 2, 1, 32, 64))
    q, k, v, *own = (torch.randn(shape, generator=draws).to(device, dtype) for shape in shapes)
    lo, hi = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[1000], [37]])
    ranges = [t.to(device, torch.int32) for t in (lo, hi)]
    found = attend_cache(q, k, v, ranges[0], ranges[1], (own[0], own[1]), longest=1000)
    tiles = plan_tiles(lo, hi, block_length=32, device=device, dtype=q.dtype)
    return [(found, softmax_tiles(q, k, v, (own[0], own[1]), tiles))]


def _read(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
    """One document of six blocks in chunks of four, read at every frontier, against the whole prefix written out."""
    from .triton_read import read_prefix

    draws = torch.Generator().manual_seed(0)
    m, G, H, P, N, R = 6, 32, 2, 64, 64, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).to(device)

    x, B, C = normal(1, m, G, H, P), normal(1, m, G, N) / 8, normal(1, m, G, N) / 8
    dt = 0.1 * normal(1, m, G, H).sigmoid()
    run = (-dt).cumsum(2)
    states = normal(1, 2, N, H, P)
    frontiers = torch.arange(m)[None]
    expected = torch.zeros_like(x)
    for f in range(m):
        low, total = f // R * R, torch.zeros(H, device=device)
        for b in reversed(range(low, f)):
            total = total + run[0, b, -1]
            weight = (total - run[0, b]).exp() * dt[0, b]  # (G, H)
            expected[0, f] += torch.einsum("in,jn,jh,jhp->ihp", C[0, f], B[0, b], weight, x[0, b])
        expected[0, f] += total.exp()[:, None] * torch.einsum("in,nhp->ihp", C[0, f], states[0, f // R])
        expected[0, f] *= run[0, f].exp()[..., None]
    narrow = [t.to(dtype) for t in (C, x, B)]
    found = read_prefix(
        torch.zeros_like(x), narrow[0], run, narrow[1], narrow[2], dt, run, states, frontiers=frontiers,
        starts=torch.zeros_like(frontiers), chunk_blocks=R,
    )  # fmt: skip
    return [(found, expected)]


def _scan(device: torch.device) -> list[Pair]:
    """Four chunks of a state of 64 x 2 x 64, with gradients."""
    from .ssd_parts import _StateScan
    from .triton_scan import scan

    draws = torch.Generator().manual_seed(0)
    update, state = (torch.randn(shape, generator=draws).to(device) for shape in ((2, 4, 64, 2, 64), (2, 64, 2, 64)))
    decay = torch.rand((2, 4, 2), generator=draws).to(device)
    results = []
    for function in (scan, _StateScan.apply):
        own = [leaf.detach().requires_grad_() for leaf in (update, decay, state)]
        states = function(*own)
        results.append([states.detach(), *torch.autograd.grad(states.square().sum(), own)])
    return list(zip(results[0], results[1]))
