"""flash-attn behind the cached attention of denoise, advance and prefill; the one file that imports flash-attn."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .probe import Pair, failure


@functools.cache
def load() -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, str]:
    """flash_attn_with_kvcache, or None and why not."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except Exception as error:
        return None, f"flash-attn cannot be imported ({type(error).__name__}: {error})"
    return flash_attn_with_kvcache, ""


def declined(device: torch.device) -> str | None:
    """None if this backend serves `device`, else the reason in a sentence."""
    if device.type != "cuda":
        return f"flash-attn's kernels do not run on {device.type}"
    return load()[1] or _checked(device)


@functools.cache
def _checked(device: torch.device) -> str | None:
    return failure(lambda: _probe(device), 3e-2)  # bfloat16 outputs of size 1


def takes(q: Tensor) -> bool:
    """Whether queries (..., P) go through flash-attn: half precision, heads up to 256 wide, and nothing to differentiate."""
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return q.is_cuda and narrow and not torch.is_grad_enabled() and declined(q.device) is None


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks q (Bt, Hq, M, G, P) over keys [0, hi) of k, v (Bt, Hkv, S, P) -> out like q, log-sum-exp (Bt, Hq, M, G).

    hi (Bt, M) int32 on the device. Every block is a row of flash-attn's batch with a length of its own over the same
    cache, so nothing is masked and nothing written. A block that sees no key gets zeros and minus infinity.
    """
    kernel, _ = load()
    assert kernel is not None
    batch, heads, blocks, size, width = q.shape
    rows = q.permute(0, 2, 3, 1, 4).reshape(batch * blocks, size, heads, width)
    owner = torch.arange(batch, device=q.device, dtype=torch.int32).repeat_interleave(blocks)
    lengths = hi.flatten()
    out, lse = kernel(
        rows, k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=lengths, cache_batch_idx=owner, causal=False,
        return_softmax_lse=True,
    )  # fmt: skip
    blind = lengths == 0
    out = out.masked_fill(blind[:, None, None, None], 0)
    lse = lse.masked_fill(blind[:, None, None], -torch.inf)
    out = out.view(batch, blocks, size, heads, width).permute(0, 3, 1, 2, 4)
    return out, lse.view(batch, blocks, heads, size).transpose(1, 2)


def _probe(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
    """Grouped heads of 64, two rows of different length, one block that sees nothing."""
    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 2, 16, 64), (2, 2, 96, 64), (2, 2, 96, 64))
    q, k, v = (torch.randn(shape, generator=draws).to(device, dtype) for shape in shapes)
    hi = torch.tensor([[80, 0], [17, 96]], dtype=torch.int32, device=device)
    with torch.no_grad():
        out, _ = attend_prefix(q, k, v, hi)
        wide = [t.float().repeat_interleave(2, dim=1)[:, :, None] for t in (k, v)]
        scores = torch.matmul(q.float(), wide[0].transpose(-1, -2)) / 8
        seen = torch.arange(96, device=device) < hi[..., None]  # (B, M, S)
        weights = scores.masked_fill(~seen[:, None, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        return [(out.float(), torch.matmul(weights, wide[1]))]
