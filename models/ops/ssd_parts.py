"""The three differentiable parts of the SSD: in-block products, the scan over chunk states, and the read from them.

Backward passes are written by hand so that decays are made again instead of kept: no (G, G) matrix per head survives the
forward pass. In-block work goes slab by slab, so that its matrices stay in the cache of a CPU core.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import pick
from . import triton_checks

SLAB_ELEMENTS = 1 << 17  # entries of one (blocks, H, G, G) temporary on a CPU: half a megabyte in float32


def in_block(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
    """What the tokens of a block tell each other -> (F, G, H, P); forward for j <= i, backward for j > i.

    x (F, G, H, P), dt (F, G, 2, H), A (H,), B, C (F, G, N), skip (H,): the D of y += D x, None for none. One matrix
    (G, G) a head holds both directions; its diagonal is the forward one plus the skip.
    """
    return _InBlock.apply(x, dt, A, B, C, skip)


def scan_states(update: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """S_0 = state, S_{z+1} = decay_z S_z + update_z; update (Bt, Z, N, H, P), decay (Bt, Z, H) -> (Bt, Z+1, N, H, P)."""
    if triton_checks.scans(state):
        from .triton_scan import scan

        return scan(update, decay, state)
    return _StateScan.apply(update, decay, state)


def read_states(y: Tensor, C: Tensor, states: Tensor, scale: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    """y + scale (C S) -> (Bt, M, G, H, P), each block with the state of its index.

    y (Bt, M, G, H, P), C (Bt, M, G, N), states (Bt, Z, N, H, P), scale (Bt, M, G, H); indices: consecutive runs of blocks,
    (Bt, m) each on the CPU, together M.
    """
    return _ReadStates.apply(y, C, states, scale, indices)


def _slabs(blocks: int, heads: int, size: int, device: torch.device) -> Iterator[slice]:
    step = max(1, blocks if device.type != "cpu" else SLAB_ELEMENTS // (heads * size * size))
    for first in range(0, blocks, step):
        yield slice(first, min(first + step, blocks))


class _InBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
        blocks, size, heads, _ = x.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for slab in _slabs(blocks, heads, size, x.device):
            decay, step, scores = _factors(dt[slab], A, B[slab], C[slab])
            weights = decay.mul_(step).mul_(scores)
            if skip is not None:
                weights.diagonal(dim1=-2, dim2=-1).add_(skip.to(weights.dtype)[:, None])
            y[slab] = torch.matmul(weights.to(x.dtype), x[slab].transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(x, dt, A, B, C, skip)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, dt, A, B, C, skip = ctx.saved_tensors
        blocks, size, heads, _ = x.shape
        dx, ddt = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(dt)
        dB, dC = torch.empty_like(B, memory_format=torch.contiguous_format), torch.empty_like(C)
        dA, dskip = torch.zeros_like(dt[0, 0, 0]), torch.zeros_like(dt[0, 0, 0])
        for slab in _slabs(blocks, heads, size, x.device):
            decay, step, scores = _factors(dt[slab], A, B[slab], C[slab])
            seen, heard = x[slab].transpose(1, 2), grad[slab].transpose(1, 2)  # (f, H, G, P)
            dweights = torch.matmul(heard, seen.transpose(-1, -2)).to(decay.dtype)
            if skip is not None:
                dskip += dweights.diagonal(dim1=-2, dim2=-1).sum((0, 2))
            dstep = dweights.mul_(decay)
            weights = decay.mul_(step).mul_(scores)
            if skip is not None:
                weights.diagonal(dim1=-2, dim2=-1).add_(skip.to(weights.dtype)[:, None])
            dx[slab] = torch.matmul(weights.to(x.dtype).transpose(-1, -2), heard).transpose(1, 2)
            dscores = torch.mul(dstep, step, out=weights).sum(1).to(B.dtype)  # (f, G, G)
            dB[slab] = torch.matmul(dscores.transpose(-1, -2), C[slab])
            dC[slab] = torch.matmul(dscores, B[slab])
            dexponent = weights.mul_(scores)
            da, dsteps = _decay_backward(dexponent, dstep.mul_(scores))
            ddt[slab] = torch.addcmul(dsteps, da, A.to(da.dtype))
            dA += (da * dt[slab]).sum((0, 1, 2))
        return dx, ddt, dA.to(A.dtype), dB, dC, None if skip is None else dskip.to(skip.dtype)


def _factors(dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp of the decays (f, H, G, G), step sizes (f, H, G, G) and scores C_i.B_j (f, 1, G, G), both directions in one.

    With n the inclusive sum of the forward a and s the exclusive sum of the backward a, both falling, n_i - n_j is the
    smaller of the two exponents below the diagonal and s_j - s_i above it.
    """
    a = (dt * A.to(dt.dtype)).permute(2, 0, 3, 1)  # (2, f, H, G)
    n = a[0].cumsum(-1)
    s = a[1].cumsum(-1) - a[1]
    exponent = n[..., :, None] - n[..., None, :]
    decay = torch.minimum(exponent, s[..., None, :] - s[..., :, None], out=exponent).exp_()
    lower = torch.ones(dt.shape[1], dt.shape[1], dtype=torch.bool, device=dt.device).tril_()
    forward, backward = dt.permute(2, 0, 3, 1)[..., None, :]
    return decay, torch.where(lower, forward, backward), torch.matmul(C, B.transpose(-1, -2)).to(dt.dtype)[:, None]


def _decay_backward(dexponent: Tensor, dstep: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a and dt (f, G, 2, H), from those of the exponents and of the step sizes (both are overwritten)."""
    dsteps_all = dstep.sum(-2)
    dsteps_forward = dstep.tril_().sum(-2)
    into_all, out_all = dexponent.sum(-1), dexponent.sum(-2)  # at i, at j
    lower = dexponent.tril_()
    into, out = lower.sum(-1), lower.sum(-2)
    # n_i - n_j below: an inclusive sum, so a_m gets what n_m and all later n get
    forward = (into - out).flip(-1).cumsum(-1).flip(-1)
    # s_j - s_i above: an exclusive sum, so a_m gets what all later s get
    ds = (out_all - out) - (into_all - into)
    backward = ds.flip(-1).cumsum(-1).flip(-1) - ds
    pairs = torch.stack([forward, backward]), torch.stack([dsteps_forward, dsteps_all - dsteps_forward])
    da, ddt = (pair.permute(1, 3, 0, 2) for pair in pairs)
    return da, ddt


class _StateScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, update: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        chunks = update.shape[1]
        states = state.new_empty(len(state), chunks + 1, *state.shape[1:])
        states[:, 0] = state
        for z in range(chunks):
            torch.mul(states[:, z], decay[:, z, None, :, None], out=states[:, z + 1])
            states[:, z + 1] += update[:, z]
        ctx.save_for_backward(decay, states)
        ctx.update_dtype = update.dtype
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        decay, states = ctx.saved_tensors
        chunks = decay.shape[1]
        dupdate = grad.new_empty(grad[:, :chunks].shape, dtype=ctx.update_dtype)
        ddecay = torch.empty_like(decay)
        carried = grad[:, chunks].clone()
        for z in reversed(range(chunks)):
            dupdate[:, z] = carried
            ddecay[:, z] = (carried * states[:, z]).sum((1, 3))
            carried = torch.addcmul(grad[:, z], carried, decay[:, z, None, :, None])
        return dupdate, ddecay, carried


def _runs(indices: tuple[Tensor, ...]) -> Iterator[tuple[slice, Tensor]]:
    first = 0
    for index in indices:
        yield slice(first, first + index.shape[1]), index
        first += index.shape[1]


class _ReadStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, C: Tensor, states: Tensor, scale: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
        flat = states.to(C.dtype).flatten(3)  # (Bt, Z, N, HP)
        read = torch.empty(*C.shape[:3], flat.shape[-1], dtype=C.dtype, device=C.device)
        for part, index in _runs(indices):
            read[:, part] = torch.matmul(C[:, part], pick(flat, index))
        read = read.unflatten(-1, states.shape[3:])
        ctx.save_for_backward(C, states, scale, read)
        ctx.indices = indices
        return torch.addcmul(y.to(scale.dtype), read.to(scale.dtype), scale[..., None]).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        C, states, scale, read = ctx.saved_tensors
        wide = grad.to(scale.dtype)
        dscale = (wide * read).sum(-1)
        dread = (wide * scale[..., None]).to(C.dtype).flatten(3)  # (Bt, M, G, HP)
        flat, dstates, dC = states.to(C.dtype).flatten(3), torch.zeros_like(states), torch.empty_like(C)
        rows = torch.arange(len(C), device=C.device)[:, None]
        for part, index in _runs(ctx.indices):
            dC[:, part] = torch.matmul(dread[:, part], pick(flat, index).transpose(-1, -2))
            dstate = torch.matmul(C[:, part].transpose(-1, -2), dread[:, part]).unflatten(-1, states.shape[3:])
            target = pick(dstates, index)
            if target._base is not None:  # a view of consecutive states
                target += dstate
            else:
                dstates.index_put_((rows, index.to(C.device)), dstate.to(states.dtype), accumulate=True)
        return grad, dC, dstates, dscale, None
