"""The scan over chunk states as one Triton kernel each way: every state is written once, every update read once.

Plain torch does it in two small operations a chunk, each a launch of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .triton_lang import jit, next_power, tl, wide_type

TILE = 2048  # elements of a state that one program carries


def scan(update: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """`ssd_parts.scan_states`: update (Bt, Z, N, H, P), decay (Bt, Z, H), state (Bt, N, H, P) -> (Bt, Z+1, N, H, P)."""
    return _Scan.apply(update, decay, state)


def _sizes(states: Tensor) -> tuple[tuple[int, ...], dict]:
    """Grid and constants for states (Bt, Z+1, N, H, P)."""
    batch, _, N, H, P = states.shape
    BP = next_power(P, 1)
    BN = min(next_power(N, 1), max(1, TILE // BP))
    return (batch, H, -(-N // BN)), {"BN": BN, "BP": BP, "WIDE": wide_type(states.dtype)}


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, update: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        batch, Z, N, H, P = update.shape
        states = state.new_empty(batch, Z + 1, N, H, P)
        update, decay = update.contiguous(), decay.contiguous()
        grid, constants = _sizes(states)
        _forward_kernel[grid](update, decay, state.contiguous(), states, Z, N, H, P, **constants)
        ctx.save_for_backward(decay, states)
        ctx.update_dtype = update.dtype
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        decay, states = ctx.saved_tensors
        batch, Z, N, H, P = states[:, 1:].shape
        dupdate = grad.new_empty(batch, Z, N, H, P, dtype=ctx.update_dtype)
        dstate = torch.empty_like(states[:, 0])
        grid, constants = _sizes(states)
        shares = decay.new_empty(batch, Z, H, grid[2])  # of the sums over N and P
        _backward_kernel[grid](
            grad.contiguous(), decay, states, dupdate, dstate, shares, Z, N, H, P, grid[2], **constants
        )
        return dupdate, shares.sum(-1), dstate


@jit
def _forward_kernel(
    update, decay, state, states, Z, N, H, P, BN: tl.constexpr, BP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row, one head, BN of its N: grid (Bt, H, N / BN)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, p = tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BP)
    live = (n < N)[:, None] & (p < P)[None, :]
    place = n[:, None] * H * P + head * P + p[None, :]
    size = N * H * P
    carried = tl.load(state + row * size + place, mask=live, other=0.0).to(WIDE)
    tl.store(states + row * (Z + 1) * size + place, carried, mask=live)
    for z in range(0, Z):
        fade = tl.load(decay + (row * Z + z) * H + head).to(WIDE)
        carried = carried * fade + tl.load(update + (row * Z + z) * size + place, mask=live, other=0.0).to(WIDE)
        tl.store(states + (row * (Z + 1) + z + 1) * size + place, carried, mask=live)


@jit
def _backward_kernel(
    grad, decay, states, dupdate, dstate, shares, Z, N, H, P, tiles, BN: tl.constexpr, BP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The same programs from the last chunk to the first."""
    row, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n, p = tile * BN + tl.arange(0, BN), tl.arange(0, BP)
    live = (n < N)[:, None] & (p < P)[None, :]
    place = n[:, None] * H * P + head * P + p[None, :]
    size = N * H * P
    carried = tl.load(grad + (row * (Z + 1) + Z) * size + place, mask=live, other=0.0).to(WIDE)
    for back in range(0, Z):
        z = Z - 1 - back
        tl.store(dupdate + (row * Z + z) * size + place, carried.to(dupdate.dtype.element_ty), mask=live)
        entering = tl.load(states + (row * (Z + 1) + z) * size + place, mask=live, other=0.0).to(WIDE)
        tl.store(shares + ((row * Z + z) * H + head) * tiles + tile, tl.sum(tl.sum(carried * entering, axis=1), axis=0))
        fade = tl.load(decay + (row * Z + z) * H + head).to(WIDE)
        carried = carried * fade + tl.load(grad + (row * (Z + 1) + z) * size + place, mask=live, other=0.0).to(WIDE)
    tl.store(dstate + row * size + place, carried, mask=live)
