"""Single operations at the sizes of a preset: every backend that can be used, beside plain torch, and how far apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mezzotint.eval.bench_gpu import PROTOCOL
from mezzotint.eval.timing import interleave
from mezzotint.models.config import ModelConfig
from mezzotint.models.layout import make_layout
from mezzotint.models.mamba2 import Mamba2
from mezzotint.models.ops import (
    causal_conv1d_backend,
    flash_attn_backend,
    fused_step,
    mamba_ssm_backend,
    triton_checks,
)
from mezzotint.models.ops.attention import softmax_tiles
from mezzotint.models.ops.conv import _BlockConv
from mezzotint.models.ops.ssd_parts import in_block
from mezzotint.models.ops.tiles import plan_tiles
from mezzotint.models.state import SSMState

Variants = dict[str, Callable[[], Tensor]]
OPS = ("mamba step", "cached attention", "conv", "in-block ssd")


@torch.no_grad()
def op_rows(op: str, config: ModelConfig, *, context: int, device: str, dtype: torch.dtype) -> list[dict]:
    """One row a backend: ms, and ms and largest difference of plain torch beside it."""
    variants = _VARIANTS[op](config, context, torch.device(device), dtype)
    expected = variants["torch"]().double()
    size = expected.abs().max().clamp_min(1e-9)
    times = interleave(variants, protocol=PROTOCOL, device=device)
    beside = times["torch"].p50
    return [
        {"pass": op, "mode": name, "ms": timing.p50 * 1e3, "floor_ms": beside * 1e3, "ratio": timing.p50 / beside,
         "difference": ((variants[name]().double() - expected).abs().max() / size).item(), "context": context}
        for name, timing in times.items()
    ]  # fmt: skip


def _normal(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    draws = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=draws, device=device).to(dtype)


def _mamba_step(config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> Variants:
    """The advance of one layer."""
    normal, g = _normal(device, dtype), config.block_length
    mixer = Mamba2(config).requires_grad_(False)
    for parameter in mixer.parameters():
        parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    mixer = mixer.to(device, dtype)
    empty = mixer.start(1, 0, dtype, device)
    state = SSMState(normal(*empty.ssm.shape).to(empty.ssm), normal(*empty.conv.shape))
    layout = make_layout(block_length=g, clean_tokens=g, frontiers=torch.ones(1, 1, dtype=torch.long))
    x = normal(1, 2 * g, config.d_model)
    variants: Variants = {"torch": lambda: mixer.general(x, layout, state)[0]}
    if fused_step.declined(device) is None:
        variants["triton"] = lambda: fused_step.run(mixer, x, layout, state)[0]
    return variants


def _attention(config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> Variants:
    """One block over `context` keys and its own."""
    normal, g, p = _normal(device, dtype), config.block_length, config.head_dim
    q = normal(1, config.n_heads, 1, g, p)
    k, v = normal(1, config.n_kv_heads, context, p), normal(1, config.n_kv_heads, context, p)
    own = normal(1, config.n_kv_heads, 1, g, p), normal(1, config.n_kv_heads, 1, g, p)
    lo, hi = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), context)
    tiles = plan_tiles(lo, hi, block_length=g, device=device, dtype=dtype)
    variants: Variants = {"torch": lambda: softmax_tiles(q, k, v, own, tiles)}
    low, high = (t.to(device, torch.int32) for t in (lo, hi))
    if triton_checks.attend_declined(device) is None:
        from mezzotint.models.ops.triton_attend import attend_cache

        variants["triton"] = lambda: attend_cache(q, k, v, low, high, own, longest=context)
    if flash_attn_backend.takes(q):
        from mezzotint.models.ops.cuda_attention import _join

        variants["flash-attn"] = lambda: _join(q, flash_attn_backend.attend_prefix(q, k, v, high), own)
    return variants


def _conv(config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> Variants:
    """The blocks of a training row."""
    normal, channels = _normal(device, dtype), config.conv_channels
    blocks = max(1, min(context, 4096) // config.block_length)
    u, left = normal(1, blocks, config.block_length, channels), normal(1, blocks, config.d_conv - 1, channels)
    weight, bias = normal(channels, config.d_conv), normal(channels)
    variants: Variants = {"torch": lambda: _BlockConv.apply(u, left, weight, bias)}
    if causal_conv1d_backend.takes(u, weight):
        variants["causal-conv1d"] = lambda: causal_conv1d_backend.block_conv(u, left, weight, bias)
    return variants


def _in_block(config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> Variants:
    """Both scans inside the blocks of a training row."""
    normal, g, h = _normal(device, dtype), config.block_length, config.ssm_heads
    blocks = max(1, min(context, 4096) // g)
    x, B, C = (
        normal(blocks, g, h, config.ssm_head_dim),
        normal(blocks, g, config.d_state),
        normal(blocks, g, config.d_state),
    )
    B, C = B / config.d_state**0.25, C / config.d_state**0.25
    dt = 0.1 * normal(blocks, g, 2, h).float().sigmoid()
    A = -torch.ones(h, device=device)
    variants: Variants = {"torch": lambda: in_block(x, dt, A, B, C, None)}
    if mamba_ssm_backend.declined(device) is None:
        variants["mamba-ssm"] = lambda: mamba_ssm_backend.in_block(x, dt, A, B, C, None)
    return variants


_VARIANTS = {"mamba step": _mamba_step, "cached attention": _attention, "conv": _conv, "in-block ssd": _in_block}
