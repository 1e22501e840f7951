"""What blocks read of the clean prefix, as one Triton kernel: the state at their chunk's start and the chunk's tokens.

The part of `ssd.py` that every block of either stream does at its own frontier. Nothing of the size of a chunk's tokens
is made for a frontier: blocks before it are walked backwards, decays are made on the way. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_lang import dot_precision, dot_type, jit, next_power, tl, wide_type

HEAD_CHANNELS = 64


def read_prefix(
    y: Tensor,
    C: Tensor,
    run: Tensor,
    x: Tensor,
    B: Tensor,
    dt: Tensor,
    clean_run: Tensor,
    states: Tensor,
    *,
    frontiers: Tensor,
    starts: Tensor,
    chunk_blocks: int,
) -> Tensor:
    """y plus what every block sees before its frontier -> (Bt, M, G, H, P), in the type of y.

    Of the blocks that read: y (Bt, M, G, H, P), C (Bt, M, G, N), run (Bt, M, G, H) the running sum of dt A inside a block,
    frontiers and starts (Bt, M): it sees clean blocks [start, frontier). Of the clean stream: x (Bt, m, G, H, P),
    B (Bt, m, G, N), dt and clean_run (Bt, m, G, H), states (Bt, Z, N, H, P) at the start of each chunk of
    `chunk_blocks` blocks, Z beyond m / chunk_blocks. A document that starts inside the chunk sees no state.
    """
    batch, blocks, G, H, P = y.shape
    N = C.shape[-1]
    x, B, C = _even(x), _even(B), _even(C)
    frontiers, starts = (t.to(y.device, torch.int32).contiguous() for t in (frontiers, starts))
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    part = min(next_power(P), HEAD_CHANNELS)
    _read_kernel[(batch * blocks, H, -(-P // part))](
        y.contiguous(), C, run.contiguous(), x, B, dt.contiguous(), clean_run.contiguous(), states.contiguous(), frontiers,
        starts, out, C.stride(0), C.stride(2), x.stride(0), x.stride(2), B.stride(0), B.stride(2), blocks, x.shape[1],
        states.shape[1], G, H, P, N, chunk_blocks, BG=next_power(G), BP=part, BN=next_power(N),
        WIDE=wide_type(dt.dtype), DOT=dot_type(x.dtype), PRECISION=dot_precision(), num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def _even(t: Tensor) -> Tensor:
    """(Bt, m, G, ...) whose blocks lie behind each other and whose innermost part is dense; a copy where it is not."""
    dense = t[:1, :1, :1].is_contiguous() and (t.shape[1] < 2 or t.stride(1) == t.shape[2] * t.stride(2))
    return t if dense else t.contiguous()


@jit
def _read_kernel(
    y, C, run, x, B, dt, clean_run, states, frontiers, starts, out, C_row, C_token, x_row, x_token, B_row, B_token, M, m,
    Z, G, H, P, N, R, BG: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block that reads, one head, BP of its channels: grid (Bt * M, H, P / BP)."""
    reader, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = reader // M
    frontier, start = tl.load(frontiers + reader), tl.load(starts + reader)
    chunk = frontier // R
    low = tl.maximum(start, chunk * R)
    token, n = tl.arange(0, BG), tl.arange(0, BN)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    live_t, live_n, live_p = token < G, n < N, p < P
    live_b, live_x = live_t[:, None] & live_n[None, :], live_t[:, None] & live_p[None, :]
    c_place = row * C_row + (reader % M) * G * C_token + token[:, None] * C_token + n[None, :]
    queries = tl.load(C + c_place, mask=live_b, other=0.0)
    seen = tl.zeros([BG, BP], dtype=WIDE)
    after = tl.zeros([1], dtype=WIDE)  # running sum from the walked block to the frontier
    for back in range(0, frontier - low):
        block = frontier - 1 - back
        sums = ((row * m + block) * G + token) * H + head
        inside = tl.load(clean_run + sums, mask=live_t, other=0.0)
        after += tl.load(clean_run + ((row * m + block) * G + G - 1) * H + head)
        step = tl.load(dt + sums, mask=live_t, other=0.0)
        weight = tl.where(live_t, tl.exp(after - inside) * step, 0.0)
        first = row * B_row + block.to(tl.int64) * G * B_token
        keys = tl.load(B + first + token[:, None] * B_token + n[None, :], mask=live_b, other=0.0)
        first = row * x_row + block.to(tl.int64) * G * x_token
        values = tl.load(x + first + token[:, None] * x_token + (head * P + p)[None, :], mask=live_x, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION, out_dtype=WIDE)
        seen += tl.dot((scores * weight[None, :]).to(DOT), values, input_precision=PRECISION, out_dtype=WIDE)
    if (start < chunk * R) | (start == 0):
        place = ((row * Z + chunk) * N + n)[:, None] * H * P + (head * P + p)[None, :]
        S = tl.load(states + place, mask=live_n[:, None] & live_p[None, :], other=0.0).to(DOT)
        seen += tl.exp(after)[:, None] * tl.dot(queries, S, input_precision=PRECISION, out_dtype=WIDE)
    decay = tl.exp(tl.load(run + (reader * G + token) * H + head, mask=live_t, other=0.0))
    place = (reader * G + token)[:, None] * H * P + (head * P + p)[None, :]
    seen = seen * decay[:, None] + tl.load(y + place, mask=live_x, other=0.0).to(WIDE)
    tl.store(out + place, seen.to(out.dtype.element_ty), mask=live_x)
