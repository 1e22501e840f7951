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

from ..layout import pick
from . import mamba_ssm_backend, triton_checks
from .ssd_parts import in_block, read_states, scan_states


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
    skip: Tensor | None = None,
    clean_output: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs (Bt, M, G, H, P) and the state behind the clean blocks (Bt, N, H, P).

    x (Bt, M, G, H, P) holds the clean blocks and then the K noisy ones; dt (Bt, M, G, 2, H) is non-negative (forward,
    backward; zero for tokens that must not count); A (H,) is negative; B, C (Bt, M, G, N). frontiers (Bt, K) and starts
    (Bt, M') are CPU tensors: noisy block k sees clean blocks [starts[f], f) of this pass, and the state where its
    document goes on from there (start 0). `chunk_blocks` = Q / G changes the cost only. skip (H,): D of y += D x.
    clean_output False: outputs of the noisy blocks alone, (Bt, K, G, H, P).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt.to(wide)
    if clean_blocks and not frontiers.shape[1] and clean_output and mamba_ssm_backend.takes(x):
        return mamba_ssm_backend.clean_scan(x, dt, A, B, C, starts=starts[:, :clean_blocks], state=state, skip=skip)
    run = (dt[..., 0, :] * A.to(wide)).cumsum(2)  # n: (Bt, M, G, H)
    prefix = _Prefix(x, dt, run, B, starts, state.to(wide), clean_blocks, chunk_blocks)
    # a copy, since who keeps the state would keep those of all chunks alive; a backward pass keeps them anyway
    after = prefix.states[:, -1].to(state.dtype, copy=clean_blocks > 0 and not torch.is_grad_enabled())
    readers = [torch.arange(clean_blocks).expand(len(x), -1), frontiers]
    if not clean_output:
        readers = readers[1:]
        x, dt, run, B, C = (t[:, clean_blocks:] for t in (x, dt, run, B, C))
    batch = x.shape[:2]
    y = in_block(x.flatten(0, 1), dt.flatten(0, 1), A, B.flatten(0, 1), C.flatten(0, 1), skip).unflatten(0, batch)
    readers = [index for index in readers if index.shape[1]]
    if readers and chunk_blocks > 1 and triton_checks.reads(x):
        return prefix.read_fused(y, C, run, torch.cat(readers, dim=1)), after
    return (prefix.read(y, C, run.exp(), readers) if readers else y), after


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
        return scan_states(update, total.exp() * keeps.to(total.dtype), state)

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

    def read_fused(self, y: Tensor, C: Tensor, run: Tensor, frontiers: Tensor) -> Tensor:
        """`read` by our Triton kernel; run = n (Bt, M, G, H)."""
        from .triton_read import read_prefix

        x, B, dt, before = (t.flatten(1, 2) for t in (self.x, self.B, self.dt, self.run))
        starts = self.starts.gather(1, frontiers)
        places = {"frontiers": frontiers, "starts": starts, "chunk_blocks": self.R}
        return read_prefix(y, C, run, x, B, dt, before, self.states, **places)

    def read(self, y: Tensor, C: Tensor, decay: Tensor, readers: list[Tensor]) -> Tensor:
        """y plus what every block sees of its prefix; decay = exp(n) (Bt, M, G, H), readers: frontiers (Bt, m), M in all."""
        chunks = tuple(frontier // self.R for frontier in readers)
        frontier, chunk = torch.cat(readers, dim=1), torch.cat(chunks, dim=1)
        start = self.starts.gather(1, frontier)
        scale = decay * self._enters(chunk, start)[:, :, None].to(decay.dtype)
        if self.R == 1:
            return read_states(y, C, self.states, scale, chunks)
        weights, total = self._weights(chunk, frontier, start)
        y = read_states(y, C, self.states, scale * total.exp()[:, :, None], chunks)
        values = (pick(self.x, chunk) * weights[..., None]).flatten(4).flatten(2, 3).to(C.dtype)  # (Bt, M, Q, HP)
        scores = torch.matmul(C, pick(self.B, chunk).flatten(2, 3).transpose(-1, -2))  # (Bt, M, G, Q)
        seen = torch.matmul(scores, values).unflatten(-1, self.state_shape[2:])
        return y + (seen * decay[..., None]).to(y.dtype)
