"""Attention of one tile on torch's fused CPU kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def declined(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """None if this backend serves `device` and `dtype`, else the reason in a sentence."""
    if device.type != "cpu":
        return f"the fused CPU kernel does not run on {device.type}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"):
        return f"torch {torch.__version__} has no fused CPU attention that returns its log-sum-exp"
    if dtype.itemsize < 4:
        return f"the fused CPU kernel is slower in {dtype} than products and a softmax"  # LOG.md has the figures
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, blind: bool) -> tuple[Tensor, Tensor]:
    """See `products.forward`; queries that see no key get zeros, and the log-sum-exp 0."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, False, attn_mask=mask)
    return out, lse[..., None]


def backward(grad, q, k, v, out, lse, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `products.backward`."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse[..., 0], 0.0, False, attn_mask=mask)
