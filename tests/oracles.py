"""Independent oracles of the operations: literal loops over tokens, written from the formulas alone.

Slow on purpose. Nothing here calls the package's own tensor code, and nothing here is chunked, cumulated or masked:
a token-by-token recurrence, a loop over (query, key) pairs, a loop over taps. Everything is differentiable, so
gradients are held against these as well. Run in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def ssd_row(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    clean_blocks: int,
    frontiers: list,
    starts: list,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """One row of `ssd_oracle`: x (M, G, H, P), dt (M, G, 2, H), A (H,), B and C (M, G, N), state (N, H, P)."""
    blocks, length = x.shape[:2]
    outputs: dict[tuple[int, int], Tensor] = {}

    def forward(block: int, h: Tensor) -> Tensor:
        for i in range(length):
            decay = torch.exp(dt[block, i, 0] * A)  # (H,)
            update = B[block, i][:, None, None] * (dt[block, i, 0][:, None] * x[block, i])[None]
            h = decay[None, :, None] * h + update
            outputs[block, i] = torch.einsum("n,nhp->hp", C[block, i], h)
        return h

    def backward(block: int) -> None:
        # token i reads what j > i wrote, each passed on through the decays of i .. j-1
        r = torch.zeros_like(state)
        for i in reversed(range(length)):
            r = torch.exp(dt[block, i, 1] * A)[None, :, None] * r
            outputs[block, i] = outputs[block, i] + torch.einsum("n,nhp->hp", C[block, i], r)
            r = r + B[block, i][:, None, None] * (dt[block, i, 1][:, None] * x[block, i])[None]

    entering, h = state, state
    ends = []  # ends[b]: the state after clean block b
    for b in range(clean_blocks):
        if starts[b] == b and b > 0:
            h = torch.zeros_like(h)
        h = forward(b, h)
        backward(b)
        ends.append(h)
    for k, f in enumerate(frontiers):
        first_of_document = starts[f] == f
        if f == 0:
            before = entering
        elif first_of_document:
            before = torch.zeros_like(entering)
        else:
            before = ends[f - 1]
        forward(clean_blocks + k, before)
        backward(clean_blocks + k)
    y = torch.stack([torch.stack([outputs[m, i] for i in range(length)]) for m in range(blocks)])
    return y, h


def ssd_oracle(
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
) -> tuple[Tensor, Tensor]:
    """Block-bidirectional SSD, token by token, without the D skip.

    x (Bt, M, G, H, P): `clean_blocks` clean blocks, then one noisy block per frontier; dt (Bt, M, G, 2, H), forward
    then backward; A (H,); B, C (Bt, M, G, N); frontiers (Bt, K); starts (Bt, >= largest frontier + 1): first block of
    each block's document, 0 for one that continues from `state` (Bt, N, H, P). Returns y like x, and the last state.
    """
    rows = [
        ssd_row(
            x[r],
            dt[r],
            A,
            B[r],
            C[r],
            clean_blocks=clean_blocks,
            frontiers=frontiers[r].tolist(),
            starts=starts[r].tolist(),
            state=state[r],
        )
        for r in range(x.shape[0])
    ]
    return torch.stack([y for y, _ in rows]), torch.stack([h for _, h in rows])


def backward_double_sum(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """One block's backward scan as its double sum: x (G, H, P), dt (G, H) of the backward direction -> (G, H, P)."""
    a = dt * A
    y = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for j in range(i + 1, x.shape[0]):
            decay = torch.exp(sum(a[m] for m in range(i, j)))
            y[i] = y[i] + decay[:, None] * torch.dot(C[i], B[j]) * dt[j][:, None] * x[j]
    return y


def attention_row(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query (P,) over a list of visible keys and values (P,)."""
    scores = torch.stack([torch.dot(query, key) / math.sqrt(query.numel()) for key in keys])
    weights = torch.softmax(scores, dim=0)
    return sum(w * v for w, v in zip(weights, values))


def block_attention_oracle(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, own=None) -> Tensor:
    """Every query of block m sees keys [lo, hi) and, with `own`, the keys of its own noisy block.

    q (Bt, Hq, M, G, P), k and v (Bt, Hkv, S, P), lo and hi (Bt, M), own a pair (Bt, Hkv, M, G, P) -> like q.
    """
    batch, heads, blocks, length, _ = q.shape
    group = heads // k.shape[1]
    rows = []
    for r, head, m, i in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, blocks, length))).tolist():
        shared = head // group
        seen = range(int(lo[r, m]), int(hi[r, m]))
        keys, values = [k[r, shared, s] for s in seen], [v[r, shared, s] for s in seen]
        if own is not None:
            keys += list(own[0][r, shared, m])
            values += list(own[1][r, shared, m])
        rows.append(attention_row(q[r, head, m, i], keys, values))
    return torch.stack(rows).reshape(q.shape)


def block_conv_oracle(u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of blocks: u (Bt, M, G, Ch), left (Bt, M, W-1, Ch), weight (Ch, W)."""
    width = weight.shape[1]
    rows = []
    for r in range(u.shape[0]):
        for m in range(u.shape[1]):
            line = [*left[r, m], *u[r, m]]
            for i in range(u.shape[2]):
                rows.append(F.silu(sum((weight[:, w] * line[i + w] for w in range(width)), start=bias)))
    return torch.stack(rows).reshape(u.shape)
