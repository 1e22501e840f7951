"""A Mamba layer's step from cached state as three Triton kernels: at most one clean block that advances it, one noisy block.

Everything between in_proj and out_proj of `denoise`, `advance` and the commit of one block: convolution behind the cached
tail; step sizes, both scans inside a block, the read of the state, the skip and the gate; and the norm, which sums over
heads. Every element of the SSM state is read once and, with a clean block, written once. The convolution is a kernel of its
own: computed again by every head it spilled registers (255 and a stack of 2 KB when compiled for sm_90). The formulas are
those of `ssd.py`. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_step import StepWeights
from .triton_lang import dot_precision, dot_type, jit, next_power, tl, wide_type

# channels a program: wider ones spill registers when compiled for sm_90
CONV_CHANNELS, HEAD_CHANNELS, STATE_ROWS = 64, 64, 64


def block_step(
    projected: Tensor,
    state: Tensor,
    tail: Tensor,
    weights: StepWeights,
    *,
    block_length: int,
    clean_blocks: int,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, M*G, H*P) before out_proj, the next state (B, N, H, P) and the next tail (B, W-1, Ch).

    projected (B, M*G, H*P + Ch + 2H): in_proj's output of `clean_blocks` (0 or 1) clean blocks and then of at most one
    noisy block. state is float32 or wider. valid (B,): 1 where the clean block counts, None for everywhere; where it does
    not, state and tail stay, and the noisy block reads them as they were. Without a clean block both come back themselves.
    """
    batch, tokens, _ = projected.shape
    _, N, H, P = state.shape
    channels, W = weights.conv_weight.shape
    projected, state, tail = projected.contiguous(), state.contiguous(), tail.contiguous()
    inner, size, blocks = H * P, block_length, tokens // block_length
    checked = valid is not None
    alive = tail if valid is None else valid.to(projected.device, torch.int32)
    wide, BG = wide_type(state.dtype), next_power(size)
    u = projected.new_empty(batch, tokens, channels)
    common = {"CLEAN": clean_blocks, "CHECKED": checked, "BG": BG, "WIDE": wide}
    _conv_kernel[(batch, blocks, -(-channels // CONV_CHANNELS))](
        projected, tail, alive, weights.conv_weight.contiguous(), weights.conv_bias, u, projected.shape[2], tokens, size,
        inner, channels, W=W, BC=CONV_CHANNELS, **common,
    )  # fmt: skip
    gated = torch.empty(batch, tokens, inner, dtype=state.dtype, device=projected.device)
    following = torch.empty_like(state) if clean_blocks else state
    part = min(next_power(P), HEAD_CHANNELS)
    _step_kernel[(batch, H, -(-P // part))](
        projected, u, state, alive, weights.dt_bias.contiguous(), weights.A_log, weights.D, gated, following,
        projected.shape[2], tokens, size, H, P, N, channels, NOISY=blocks - clean_blocks, BP=part,
        BN=min(next_power(N), STATE_ROWS), DOT=dot_type(projected.dtype), PRECISION=dot_precision(), num_stages=1,
        num_warps=8, **common,
    )  # fmt: skip
    y = projected.new_empty(gated.shape)
    _norm_kernel[(batch * tokens,)](
        gated, weights.norm, y, inner, weights.eps, BLOCK=next_power(inner), WIDE=wide, num_warps=8
    )
    if not clean_blocks:
        return y, state, tail
    clean = projected[:, :size, inner : inner + channels]
    return y, following, _next_tail(clean, tail, alive if checked else None)


def _next_tail(clean: Tensor, tail: Tensor, alive: Tensor | None) -> Tensor:
    """The last W-1 inputs behind the clean block (B, G, Ch), or the old ones (B, W-1, Ch) where it does not count."""
    width, size = tail.shape[1], clean.shape[1]
    late = clean[:, max(size - width, 0) :].to(tail.dtype)
    late = late if size >= width else torch.cat([tail[:, size:], late], dim=1)
    return late.contiguous() if alive is None else torch.where(alive[:, None, None] != 0, late, tail)


@jit
def _softplus(x):
    """log(1 + e^x) whose small values keep their digits: below 2^-7 by its series, which is exact to 5e-12 there.

    Rounded to float32, 1 + u holds few digits of a small u: above the limit at most 1e-5 of the step is lost.
    """
    u = tl.exp(tl.minimum(x, 20.0))
    series = u * (1.0 - u * (0.5 - u * (1.0 / 3.0 - u * (0.25 - u * 0.2))))
    return tl.where(x > 20.0, x, tl.where(u < 0.0078125, series, tl.log(1.0 + u)))


@jit
def _conv_kernel(
    proj, tail, valid, weight, bias, out, width, tokens, G, inner, channels, W: tl.constexpr, CLEAN: tl.constexpr,
    CHECKED: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """silu(convolution) of one block and BC channels: grid (B, M, Ch / BC). Left of the pass's first token is the tail.

    A clean block that does not count is zeros, and the noisy block behind it has the tail at its left.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    proj += row * tokens * width + inner
    tail += row * (W - 1) * channels
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    live = channel < channels
    token = tl.arange(0, BG)
    count = G  # inputs of a clean block that count
    if CHECKED:
        count = tl.where(tl.load(valid + row) != 0, G, 0)
    own_from, own_to, behind = 0, G, 0  # tokens of this block that are read, and those of the clean block before it
    if CLEAN:
        own_to = tl.where(block == 0, count, G)
        behind = tl.where(block == 0, 0, count)
    total = tl.load(bias + channel, mask=live, other=0.0).to(WIDE)[None, :] + tl.zeros([BG, BC], dtype=WIDE)
    for k in tl.static_range(W):
        place = token + (k - (W - 1))
        at = tl.where(place >= own_from, block * G + place, place + behind)
        seen = (token < G) & (at >= 0) & (place < own_to)
        value = tl.load(
            proj + at[:, None] * width + channel[None, :], mask=seen[:, None] & live[None, :], other=0.0
        ).to(WIDE)
        early = (token < G) & (at < 0)
        value += tl.load(
            tail + (at + (W - 1))[:, None] * channels + channel[None, :], mask=early[:, None] & live[None, :], other=0.0
        ).to(WIDE)
        total += value * tl.load(weight + channel * W + k, mask=live, other=0.0).to(WIDE)[None, :]
    total = total / (1.0 + tl.exp(-total))
    place = (row * tokens + block * G + token)[:, None] * channels + channel[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(token < G)[:, None] & live[None, :])


@jit
def _steps(proj, dt_bias, column, first, size, width, BG: tl.constexpr, WIDE: tl.constexpr):
    """Step sizes (BG,) of one head and direction; zero for tokens that do not count."""
    token = tl.arange(0, BG)
    live = token < size
    raw = tl.load(proj + (first + token) * width + column, mask=live, other=0.0).to(WIDE)
    return tl.where(live, _softplus(raw + tl.load(dt_bias).to(WIDE)), 0.0)


@jit
def _in_block(scores, ahead, back, A, BG: tl.constexpr):
    """Weights (BG, BG) of what token j tells token i, both directions, from the scores C_i.B_j and the step sizes."""
    n = tl.cumsum(ahead * A, axis=0)
    s = tl.cumsum(back * A, axis=0) - back * A
    decay = tl.exp(tl.minimum(n[:, None] - n[None, :], s[None, :] - s[:, None]))
    token = tl.arange(0, BG)
    step = tl.where(token[:, None] >= token[None, :], ahead[None, :], back[None, :])
    return scores * decay * step


@jit
def _put(out, value, proj, first, p, live_p, head, G, P, width, inner, BG: tl.constexpr, WIDE: tl.constexpr):
    """Store value * silu(z) of a block."""
    token = tl.arange(0, BG)
    live = (token < G)[:, None] & live_p[None, :]
    column = (head * P + p)[None, :]
    z = tl.load(proj + (first + token)[:, None] * width + column, mask=live, other=0.0).to(WIDE)
    tl.store(out + (first + token)[:, None] * inner + column, value * z / (1.0 + tl.exp(-z)), mask=live)


@jit
def _step_kernel(
    proj, u, state, valid, dt_bias, A_log, skip, out, following, width, tokens, G, H, P, N, channels,
    CLEAN: tl.constexpr, NOISY: tl.constexpr, CHECKED: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr,
    BN: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, one head, BP of its channels: grid (B, H, P / BP). The state passes through once, BN of its N at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = H * P
    proj += row * tokens * width
    u += row * tokens * channels
    state += row * N * inner
    following += row * N * inner
    out += row * tokens * inner
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    live_p = p < P
    token = tl.arange(0, BG)
    live_t = token < G
    A = -tl.exp(tl.load(A_log + head).to(WIDE))
    D = tl.load(skip + head).to(WIDE)
    column = inner + channels + head  # of the forward step sizes
    x_place = token[:, None] * channels + (head * P + p)[None, :]
    live_x = live_t[:, None] & live_p[None, :]
    first = 0
    if CLEAN:
        count = G
        if CHECKED:
            count = tl.where(tl.load(valid + row) != 0, G, 0)
        first = G
        x_clean = tl.load(u + x_place, mask=live_x, other=0.0)
        ahead_clean = _steps(proj, dt_bias + head, column, 0, count, width, BG, WIDE)
        back_clean = _steps(proj, dt_bias + H + head, column + H, 0, count, width, BG, WIDE)
        n_clean = tl.cumsum(ahead_clean * A, axis=0)
        total = tl.sum(ahead_clean * A, axis=0)
        written = (x_clean.to(WIDE) * (tl.exp(total - n_clean) * ahead_clean)[:, None]).to(DOT)
        scores_clean, read_clean = tl.zeros([BG, BG], dtype=WIDE), tl.zeros([BG, BP], dtype=WIDE)
    noisy = u + first * channels
    if NOISY:
        x_noisy = tl.load(noisy + x_place, mask=live_x, other=0.0)
        ahead = _steps(proj, dt_bias + head, column, first, G, width, BG, WIDE)
        back = _steps(proj, dt_bias + H + head, column + H, first, G, width, BG, WIDE)
        scores, read = tl.zeros([BG, BG], dtype=WIDE), tl.zeros([BG, BP], dtype=WIDE)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        live_n = n < N
        place = n[:, None] * inner + (head * P + p)[None, :]
        live = live_n[:, None] & live_p[None, :]
        S = tl.load(state + place, mask=live, other=0.0).to(WIDE)
        live_b = live_t[:, None] & live_n[None, :]
        b_place = token[:, None] * channels + (inner + n)[None, :]
        if CLEAN:
            B = tl.load(u + b_place, mask=live_b, other=0.0)
            C = tl.load(u + b_place + N, mask=live_b, other=0.0)
            scores_clean += tl.dot(C, tl.trans(B), input_precision=PRECISION, out_dtype=WIDE)
            read_clean += tl.dot(C, S.to(DOT), input_precision=PRECISION, out_dtype=WIDE)
            S = tl.exp(total) * S + tl.dot(tl.trans(B), written, input_precision=PRECISION, out_dtype=WIDE)
            tl.store(following + place, S, mask=live)
        if NOISY:
            B = tl.load(noisy + b_place, mask=live_b, other=0.0)
            C = tl.load(noisy + b_place + N, mask=live_b, other=0.0)
            scores += tl.dot(C, tl.trans(B), input_precision=PRECISION, out_dtype=WIDE)
            read += tl.dot(C, S.to(DOT), input_precision=PRECISION, out_dtype=WIDE)
    if CLEAN:
        weights = _in_block(scores_clean, ahead_clean, back_clean, A, BG).to(DOT)
        y = tl.dot(weights, x_clean, input_precision=PRECISION, out_dtype=WIDE)
        y += tl.exp(n_clean)[:, None] * read_clean + D * x_clean.to(WIDE)
        _put(out, y, proj, 0, p, live_p, head, G, P, width, inner, BG, WIDE)
    if NOISY:
        weights = _in_block(scores, ahead, back, A, BG).to(DOT)
        y = tl.dot(weights, x_noisy, input_precision=PRECISION, out_dtype=WIDE)
        y += tl.exp(tl.cumsum(ahead * A, axis=0))[:, None] * read + D * x_noisy.to(WIDE)
        _put(out, y, proj, first, p, live_p, head, G, P, width, inner, BG, WIDE)


@jit
def _norm_kernel(gated, weight, out, inner, eps, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """RMSNorm of one token's gated channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < inner
    y = tl.load(gated + row * inner + channel, mask=live, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(y * y, axis=0) / inner + eps)
    y = y * inverse * tl.load(weight + channel, mask=live, other=0.0).to(WIDE)
    tl.store(out + row * inner + channel, y.to(out.dtype.element_ty), mask=live)
