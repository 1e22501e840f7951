"""State-space duality over blocks: every block, clean or noisy, sees itself in both directions and reads its prefix once.

Source: Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) for the forward direction. Shape letters: Bt batch, M blocks, G block
length, H heads, P head size, N state size, Z chunks of R blocks. A clean block `b` reads the clean prefix exactly as a
noisy block of frontier `b` does, so one function serves both streams:

    y_i = sum_{j<=i} exp(n_i - n_j) (C_i.B_j) dt_j x_j                       own block, forward
        + sum_{j>i}  exp(sum_{m=i}^{j-1} a^b_m) (C_i.B_j) dt^b_j x_j         own block, backward
        + exp(n_i) [ sum_{j before f in its chunk} exp(e_f - c_j) (C_i.B_j) dt_j x_j + exp(e_f) C_i S ]

with `n` the running sum of a = dt A inside the block, `c` inside chunk and document, `e_f` its value before block `f`, and
`S` the state entering the chunk. Every exponent is at most zero. What belongs to another document is left out by a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import pick


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    clean_blocks: int,
    frontiers: Tensor,
    starts: Tensor,
    state: Tensor,
    chunk_blocks: int = 1,
) -> tuple[Tensor, Tensor]:
    """Outputs (Bt, M, G, H, P) without the D skip, and the state behind the clean blocks (Bt, N, H, P).

    x (Bt, M, G, H, P) holds the clean blocks and then the K noisy ones; dt (Bt, M, G, 2, H) is non-negative (forward,
    backward; zero for tokens that must not count); A (H,) is negative; B, C (Bt, M, G, N). frontiers (Bt, K) and starts
    (Bt, M') are CPU tensors: noisy block k sees clean blocks [starts[f], f) of this pass, and the state where its
    document goes on from there (start 0). `chunk_blocks` = Q / G changes the cost only.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(wide)
    a = dt * A.to(wide)
    run = a[..., 0, :].cumsum(2)  # n: (Bt, M, G, H)
    y = in_block(x, dt, run, a[..., 1, :], B, C)
    prefix = _Prefix(x, dt, run, B, starts, state.to(wide), clean_blocks, chunk_blocks)
    readers = []
    if clean_blocks:
        readers.append(prefix.read(C[:, :clean_blocks], torch.arange(clean_blocks).expand(len(x), -1)))
    if frontiers.shape[1]:
        readers.append(prefix.read(C[:, clean_blocks:], frontiers))
    read = readers[0] if len(readers) == 1 else torch.cat(readers, dim=1)
    return y + (read * run.exp()[..., None]).to(y.dtype), prefix.states[:, -1].to(state.dtype)


def in_block(x: Tensor, dt: Tensor, run: Tensor, back: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """What the tokens of a block tell each other: forward for j <= i, backward for j > i; shapes as in `ssd`.

    `back` (Bt, M, G, H) is a^b; one matrix (G, G) a head holds both directions, its diagonal is the forward one.
    """
    size = x.shape[2]
    before = back.cumsum(2) - back  # sum of a^b over tokens before i
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    n, s = run.transpose(2, 3), before.transpose(2, 3)  # (Bt, M, H, G)
    exponent = torch.where(lower, n[..., :, None] - n[..., None, :], s[..., None, :] - s[..., :, None])
    forward, backward = dt.unbind(3)
    step = torch.where(lower, forward.transpose(2, 3)[..., None, :], backward.transpose(2, 3)[..., None, :])
    scores = torch.matmul(C, B.transpose(-1, -2))  # (Bt, M, G, G)
    weights = exponent.exp() * step * scores[:, :, None]
    return torch.matmul(weights.to(x.dtype), x.transpose(2, 3)).transpose(2, 3)


class _Prefix:
    """The clean stream as readers see it: the state entering each chunk, and the chunk's own tokens before a frontier."""

    def __init__(self, x, dt, run, B, starts, state, clean_blocks: int, chunk_blocks: int) -> None:
        self.R, self.starts, self.device = chunk_blocks if clean_blocks else 1, starts, x.device
        self.state_shape = state.shape  # (Bt, N, H, P)
        clean = slice(0, clean_blocks)
        # a frontier behind the last clean block may open a new chunk: pad so that its (empty) chunk exists
        self.Z = clean_blocks if self.R == 1 else clean_blocks // self.R + 1
        self.real = clean_blocks
        self.x = self._chunk(x[:, clean])  # (Bt, Z, R, G, H, P)
        self.B = self._chunk(B[:, clean])
        self.dt = self._chunk(dt[:, clean, :, 0])  # (Bt, Z, R, G, H)
        self.run = self._chunk(run[:, clean])
        self.states = self._scan(state)

    def _chunk(self, t: Tensor) -> Tensor:
        missing = self.Z * self.R - t.shape[1]
        if missing:
            t = F.pad(t, [0, 0] * (t.ndim - 2) + [0, missing])
        return t.unflatten(1, (self.Z, self.R))

    def _scan(self, state: Tensor) -> Tensor:
        """(Bt, Z+1, N, H, P): the state entering each chunk, and the one behind the last."""
        if self.Z == 0:
            return state[:, None]
        chunk = torch.arange(self.Z).expand(len(state), -1)
        last = (chunk * self.R + self.R - 1).clamp(max=self.real - 1)
        weights, total = self._weights(chunk, chunk * self.R + self.R, self.starts.gather(1, last))
        keys = self.B.flatten(2, 3).transpose(-1, -2)  # (Bt, Z, N, Q)
        values = (self.x * weights[..., None]).flatten(4).flatten(2, 3).to(self.B.dtype)
        update = torch.matmul(keys, values).unflatten(-1, self.state_shape[2:])
        keeps = self._enters(chunk, self.starts.gather(1, last))
        return _StateScan.apply(update, total.exp() * keeps.to(total.dtype), state)

    def _enters(self, chunk: Tensor, start: Tensor) -> Tensor:
        """(Bt, F, 1) on the device: does the state entering `chunk` belong to the document that starts at `start`?"""
        return ((start < chunk * self.R) | (start == 0))[..., None].to(self.device)

    def _weights(self, chunk: Tensor, frontier: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """exp(e_f - c_j) dt_j (Bt, F, R, G, H) for the chunk's tokens of [start, frontier), else 0, and e_f (Bt, F, H).

        chunk, frontier, start: (Bt, F) on the CPU.
        """
        dt, run = pick(self.dt, chunk), pick(self.run, chunk)
        block = chunk[..., None] * self.R + torch.arange(self.R)  # (Bt, F, R)
        seen = ((block >= start[..., None]) & (block < frontier[..., None])).to(self.device)[..., None]
        sums = run[:, :, :, -1] * seen.to(run.dtype)  # (Bt, F, R, H)
        after = sums.flip(2).cumsum(2).flip(2)  # running sums from each block to the frontier
        exponent = after[:, :, :, None] - run
        weights = exponent.masked_fill(~seen[..., None], -torch.inf).exp() * dt
        return weights, after[:, :, 0]

    def read(self, C: Tensor, frontier: Tensor) -> Tensor:
        """(Bt, F, G, H, P) what blocks with queries C (Bt, F, G, N) at `frontier` (Bt, F) see, before exp(n_i)."""
        chunk = frontier // self.R
        start = self.starts.gather(1, frontier)
        heads = self.state_shape[2:]
        entering = self._enters(chunk, start)
        states = self.states.to(C.dtype)
        if self.R == 1:
            seen = torch.matmul(C, pick(states, chunk).flatten(-2)).unflatten(-1, heads)
            return seen * entering[..., None, None].to(seen.dtype)
        weights, total = self._weights(chunk, frontier, start)
        seen = self._from_states(C, states, chunk).unflatten(-1, heads)
        seen = seen * (total.exp() * entering.to(total.dtype))[:, :, None, :, None]
        values = (pick(self.x, chunk) * weights[..., None]).flatten(4).flatten(2, 3).to(C.dtype)  # (Bt, F, Q, HP)
        scores = torch.matmul(C, pick(self.B, chunk).flatten(2, 3).transpose(-1, -2))  # (Bt, F, G, Q)
        return seen + torch.matmul(scores, values).unflatten(-1, heads)

    def _from_states(self, C: Tensor, states: Tensor, chunk: Tensor) -> Tensor:
        """C S of each reader; readers that come chunk after chunk share the chunk's state, which is not copied."""
        count = C.shape[1]
        if torch.equal(chunk, (torch.arange(count) // self.R).expand_as(chunk)):
            short = -count % self.R
            grouped = F.pad(C, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, self.R)).flatten(2, 3)
            read = torch.matmul(grouped, states[:, : grouped.shape[1]].flatten(-2))
            return read.unflatten(2, (self.R, -1)).flatten(1, 2)[:, :count]
        return torch.matmul(C, pick(states, chunk).flatten(-2))


class _StateScan(torch.autograd.Function):
    """S_0 = state, S_{z+1} = decay_z S_z + update_z; update (Bt, Z, N, H, P), decay (Bt, Z, H) -> (Bt, Z+1, N, H, P)."""

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
