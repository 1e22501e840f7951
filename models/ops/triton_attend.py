"""Attention of a few blocks over a long cache as Triton kernels: keys are shared out over programs, parts joined behind.

Serves denoise, advance and prefill: every block sees a range of cached keys, a noisy one its own keys too. Ranges are
tensors on the device, so that a captured graph goes on working while the context grows. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_lang import dot_precision, dot_type, jit, next_power, tl, wide_type

ROWS, KEYS = 64, 64  # queries and keys of one product
SHARED_ROWS = 128  # queries of one product where several blocks share it
PROGRAMS = 512  # aimed at: some for each of a card's 132 multiprocessors
LEAST_KEYS = 256  # of one program, below which joining costs more than sharing brings


def attend_cache(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, own: tuple[Tensor, Tensor] | None, *, longest: int
) -> Tensor:
    """softmax(q k^T / sqrt(P)) v over what each block sees -> like q; arguments as of `attention.block_attention`.

    q (Bt, Hq, M, G, P), k, v (Bt, Hkv, S, P), lo, hi (Bt, M) int32 on the device, own (Bt, Hkv, M, G, P) twice or None.
    longest: at least the longest range, on the host. A block that sees nothing gets zeros.
    """
    batch, heads, M, G, P = q.shape
    kv_heads, rows = k.shape[1], heads // k.shape[1] * G
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    own_k, own_v = (t.contiguous() for t in own) if own is not None else (q, q)
    span = 1 if own is not None else M  # blocks whose queries share tiles: those of a prefill see nearly the same keys
    tile = min(next_power(span * rows), ROWS if span == 1 or q.dtype.itemsize > 2 else SHARED_ROWS)
    tiles = -(-span * rows // tile)
    programs = batch * (M // span) * tiles * kv_heads
    splits = max(1, min(-(-PROGRAMS // programs), longest // LEAST_KEYS))
    parts = splits + (own is not None)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(parts, batch, M, kv_heads, rows, P, dtype=wide, device=q.device)
    lse = torch.empty(parts, batch, M, kv_heads, rows, dtype=wide, device=q.device)
    _part_kernel[(batch * (M // span) * tiles, kv_heads, parts)](
        q, k, v, own_k, own_v, lo, hi, out, lse, P**-0.5, q.stride(0), q.stride(1), q.stride(2), q.stride(3), k.stride(0),
        k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2), batch, M, span, kv_heads, rows, G, P, tiles, splits,
        BR=tile, BK=KEYS, BP=next_power(P), BG=next_power(G), OWN=own is not None, WIDE=wide_type(wide),
        DOT=dot_type(q.dtype), PRECISION=dot_precision(),
        num_stages=2 if q.dtype.itemsize == 2 else 1,
        num_warps=8 if tile > ROWS else 4,
    )  # fmt: skip
    y = torch.empty(batch, heads, M, G, P, dtype=q.dtype, device=q.device)
    _join_kernel[(batch * M * kv_heads * rows,)](
        out, lse, y, batch * M * kv_heads * rows, M, kv_heads, rows, G, P, parts, BP=next_power(P), WIDE=wide_type(wide),
        num_warps=1,
    )  # fmt: skip
    return y


@jit
def _hear(
    q, keys, values, seen, scale, top, sums, total, DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr
):
    """One more tile of keys into the running softmax (maximum, sum of weights, weighted values)."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION, out_dtype=WIDE) * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - shift[:, None])
    fade = tl.exp(top - shift)
    sums = sums * fade + tl.sum(weights, axis=1)
    total = total * fade[:, None] + tl.dot(weights.to(DOT), values, input_precision=PRECISION, out_dtype=WIDE)
    return new_top, sums, total


@jit
def _part_kernel(
    q, k, v, own_k, own_v, lo, hi, out, lse, scale, q_row, q_head, q_block, q_token, k_row, k_head, k_token, v_row, v_head,
    v_token, batch, M, span, kv_heads, rows, G, P, tiles, splits, BR: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    BG: tl.constexpr, OWN: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the queries of `span` blocks, one key head, one share of the keys.

    Grid (Bt * M / span * tiles, Hkv, shares and own keys); span is 1 or M.
    """
    task, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = (task // tiles).to(tl.int64)  # of `span` blocks, over all rows
    row, first_block = group // (M // span), group % (M // span) * span
    place_in_span = (task % tiles) * BR + tl.arange(0, BR)
    live_r = place_in_span < span * rows
    m, r = first_block + place_in_span // rows, place_in_span % rows  # r: heads that share keys behind each other
    p = tl.arange(0, BP)
    live_p = p < P
    query_head = head * (rows // G) + r // G
    first_of_row = row * q_row + query_head * q_head + m * q_block + (r % G) * q_token
    queries = tl.load(q + first_of_row[:, None] + p[None, :], mask=live_r[:, None] & live_p[None, :], other=0.0)
    top = tl.full([BR], float("-inf"), dtype=WIDE)
    sums, total = tl.zeros([BR], dtype=WIDE), tl.zeros([BR, BP], dtype=WIDE)
    lows = tl.load(lo + row * M + m, mask=live_r, other=2147483647)
    highs = tl.load(hi + row * M + m, mask=live_r, other=0)
    low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
    share = ((high - low + BK - 1) // BK + splits - 1) // splits * BK
    first = low + part * share
    last = tl.minimum(first + share, high)
    if OWN:
        last = tl.where(part == splits, first, last)
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    for key in range(first, last, BK):
        s = key + tl.arange(0, BK)
        live = (s < last)[:, None] & live_p[None, :]
        seen = (s[None, :] >= lows[:, None]) & (s[None, :] < tl.minimum(highs, last)[:, None])
        place = s.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_token + p[None, :], mask=live, other=0.0)
        values = tl.load(v + place * v_token + p[None, :], mask=live, other=0.0)
        top, sums, total = _hear(queries, keys, values, seen, scale, top, sums, total, DOT, WIDE, PRECISION)
    if OWN:  # noqa: SIM102 (the outer one is decided when the kernel is compiled)
        if part == splits:
            mine = tl.arange(0, BG)
            own_at = (((row * kv_heads + head) * M + first_block) * G + mine)[:, None] * P + p[None, :]
            own_live = (mine < G)[:, None] & live_p[None, :]
            own_keys = tl.load(own_k + own_at, mask=own_live, other=0.0)
            own_values = tl.load(own_v + own_at, mask=own_live, other=0.0)
            top, sums, total = _hear(
                queries, own_keys, own_values, (mine < G)[None, :], scale, top, sums, total, DOT, WIDE, PRECISION
            )
    some = sums > 0
    total = total / tl.where(some, sums, 1.0)[:, None]
    at = (((part * batch + row) * M + m) * kv_heads + head) * rows + r
    tl.store(out + at[:, None] * P + p[None, :], total, mask=live_r[:, None] & live_p[None, :])
    tl.store(lse + at, tl.where(some, top + tl.log(tl.where(some, sums, 1.0)), float("-inf")), mask=live_r)


@jit
def _join_kernel(out, lse, y, stride, M, kv_heads, rows, G, P, parts, BP: tl.constexpr, WIDE: tl.constexpr):
    """One query: its parts weighed by the exponential of their log-sum-exp."""
    at = tl.program_id(0).to(tl.int64)
    r, head, block = at % rows, at // rows % kv_heads, at // (rows * kv_heads)
    p = tl.arange(0, BP)
    live = p < P
    top = tl.load(lse + at)
    for part in range(1, parts):
        top = tl.maximum(top, tl.load(lse + part * stride + at))
    top = tl.where(top == float("-inf"), 0.0, top)
    sums, total = top * 0.0, tl.zeros([BP], dtype=WIDE)
    for part in range(0, parts):
        weight = tl.exp(tl.load(lse + part * stride + at) - top)
        sums += weight
        total += weight * tl.load(out + (part * stride + at) * P + p, mask=live, other=0.0)
    total = total / tl.where(sums > 0, sums, 1.0)
    row, m = block // M, block % M
    query_head = head * (rows // G) + r // G
    place = ((row * kv_heads * (rows // G) + query_head) * M + m) * G + r % G
    tl.store(y + place * P + p, total.to(y.dtype.element_ty), mask=live)
