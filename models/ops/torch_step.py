"""A Mamba layer's step from cached state in plain torch: at most one clean block that advances it, one noisy block.

The formulas are those of `ssd.py` where nothing has to be looked up: no chunks, no documents, no table of frontiers. A step
of 32 rows is some dozen small operations beside products of a millisecond, so every one that is left out counts; and what is
left is a function of tensors alone, which `models/compiled.py` compiles. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PAIRS = 1 << 20  # most entries of the in-block matrices of a pass: 4 MB in float32; more go slab by slab in `ssd.py`


@dataclass(frozen=True)
class StepWeights:
    """The parameters of a Mamba layer that the step uses."""

    conv_weight: Tensor  # (Ch, W)
    conv_bias: Tensor  # (Ch,)
    dt_bias: Tensor  # (2, H)
    A_log: Tensor  # (H,)
    D: Tensor  # (H,)
    norm: Tensor  # (H*P,)
    eps: float


BlockStep = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, StepWeights, Tensor | None, int], tuple[Tensor, Tensor, Tensor]
]


def serves(device: torch.device, *, batch: int, blocks: int, heads: int, size: int, width: int) -> bool:
    """Whether the step takes (batch, blocks) blocks of `size` tokens and a convolution of `width`, without gradients."""
    if device.type != "cpu" or torch.is_grad_enabled():
        return False
    return size >= width - 1 and batch * blocks * heads * size * size <= PAIRS


def block_step(
    z: Tensor,
    u: Tensor,
    dt: Tensor,
    state: Tensor,
    tail: Tensor,
    weights: StepWeights,
    valid: Tensor | None,
    clean: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, Lo, H*P) before out_proj, the next state (B, N, H, P) and the next tail (B, W-1, Ch).

    Of `clean` (0 or 1) clean blocks and then at most one noisy block: u (B, M, G, Ch) convolution inputs, dt (B, M, G, 2, H)
    step sizes before bias and softplus, z (B, Lo, H*P) gates of all their tokens or of the noisy block's alone: the tokens
    whose outputs are wanted. state (B, N, H, P) is float32 or wider, tail (B, W-1, Ch) the inputs before the first block.
    valid (B,): 1 where the clean block counts, None for everywhere; where it does not, state and tail stay, and the noisy
    block reads them as they were. Without a clean block both come back themselves.
    """
    y, after, following = _scans(u, dt, state, tail, weights, valid, clean, u.shape[1] - z.shape[1] // u.shape[2])
    return _gate(y.flatten(3).flatten(1, 2), z, weights), after, following


def _scans(
    u: Tensor,
    dt: Tensor,
    state: Tensor,
    tail: Tensor,
    weights: StepWeights,
    valid: Tensor | None,
    clean: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The step before its gate: (B, M-first, G, H, P) of the blocks from `first` on, the next state and tail."""
    blocks, size = u.shape[1:3]
    _, N, H, P = state.shape
    wide = torch.promote_types(u.dtype, torch.float32)
    dt = F.softplus(dt.to(wide) + weights.dt_bias.to(wide))
    left, following = tail[:, None].to(u.dtype), tail
    if clean:
        late = u[:, 0, size - tail.shape[1] :]
        if valid is not None:  # a block that does not count is as one that says nothing and takes no time
            out = (valid == 0)[:, None, None]
            late = torch.where(out, left[:, 0], late)
            dt = torch.cat([dt[:, :1].masked_fill(out[..., None, None], 0), dt[:, 1:]], dim=1)
            u = torch.cat([u[:, :1].masked_fill(out[..., None], 0), u[:, 1:]], dim=1)
        following = late.to(tail.dtype, copy=True)
        left = torch.cat([left, late[:, None]], dim=1)[:, :blocks]
    u = _conv(torch.cat([left, u], dim=2), weights, size)
    x, B, C = u.split([H * P, N, N], dim=-1)
    x = x.unflatten(-1, (H, P))  # (B, M, G, H, P)
    a = dt * -torch.exp(weights.A_log.to(wide))
    run = a[:, :, :, 0].cumsum(2)  # n: (B, M, G, H)
    after = _next_state(x[:, 0], dt[:, 0, :, 0], run[:, 0], B[:, 0], state) if clean else state
    if first == blocks:
        return x[:, first:], after, following
    x, dt, a, run, B, C = (t[:, first:] for t in (x, dt, a, run, B, C))
    y = _in_block(x, dt, a, run, B, C, weights.D)
    states = [state, after][first:blocks] if clean else [state]  # that each block sees
    read = [torch.matmul(C[:, i], seen.to(C.dtype).flatten(2)) for i, seen in enumerate(states)]
    seen = read[0][:, None] if len(read) == 1 else torch.stack(read, dim=1)
    y = seen.unflatten(-1, (H, P)).to(wide).mul_(run.exp()[..., None]).add_(y)
    return y.to(x.dtype), after, following


def _conv(u: Tensor, weights: StepWeights, size: int) -> Tensor:
    """silu of the causal convolution over (B, M, W-1+G, Ch), (B, M, G, Ch) in its type; sums in float32 or wider."""
    wide = torch.promote_types(u.dtype, torch.float32)
    taps, inputs = weights.conv_weight.to(wide).t(), u.to(wide)
    width = len(taps)
    y = torch.addcmul(weights.conv_bias.to(wide), inputs[:, :, width - 1 :], taps[-1])
    for tap in range(width - 2, -1, -1):
        y.addcmul_(inputs[:, :, tap : tap + size], taps[tap])
    return F.silu(y, inplace=True).to(u.dtype)


def _next_state(x: Tensor, dt: Tensor, run: Tensor, B: Tensor, state: Tensor) -> Tensor:
    """The state behind a clean block: x (B, G, H, P), dt and run (B, G, H), B (B, G, N)."""
    last = run[:, -1]
    scale = torch.exp(last[:, None] - run) * dt
    values = (x * scale[..., None]).flatten(2).to(B.dtype)
    update = torch.matmul(B.transpose(-1, -2), values).view(state.shape)
    return state * last.exp()[:, None, :, None] + update


def _in_block(x: Tensor, dt: Tensor, a: Tensor, run: Tensor, B: Tensor, C: Tensor, skip: Tensor) -> Tensor:
    """What the tokens of a block tell each other, (B, M, G, H, P): one matrix (G, G) a head for both directions."""
    size = x.shape[2]
    n = run.transpose(-1, -2)  # (B, M, H, G)
    s = a[:, :, :, 1].transpose(-1, -2)
    s = s.cumsum(-1) - s
    # below the diagonal the smaller of the two exponents is the forward one, above it the backward one
    decay = torch.minimum(n[..., :, None] - n[..., None, :], s[..., None, :] - s[..., :, None]).exp_()
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    forward, backward = dt.permute(3, 0, 1, 4, 2)[..., None, :]
    scores = torch.matmul(C, B.transpose(-1, -2)).to(dt.dtype)[:, :, None]
    weights = decay.mul_(torch.where(lower, forward, backward)).mul_(scores)
    weights.diagonal(dim1=-2, dim2=-1).add_(skip.to(dt.dtype)[:, None])
    return torch.matmul(weights.to(x.dtype), x.transpose(2, 3)).transpose(2, 3)


def _gate(y: Tensor, z: Tensor, weights: StepWeights) -> Tensor:
    """rms_norm(y * silu(z)), (B, Lo, H*P)."""
    wide = torch.promote_types(y.dtype, torch.float32)
    gated = F.silu(z.to(wide)).mul_(y)
    mean = torch.linalg.vector_norm(gated, dim=-1, keepdim=True).square_().div_(gated.shape[-1])
    inverse = mean.add_(weights.eps).rsqrt_()
    return gated.mul_(inverse).mul_(weights.norm.to(wide)).to(y.dtype)
