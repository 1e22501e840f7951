"""causal-conv1d's fused kernel behind `block_conv`; the one file that imports causal-conv1d."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .probe import Pair, failure

WIDTHS = (2, 3, 4)  # taps that the kernel is built for
VECTOR = 8  # channels that it loads at once: rows must begin at a multiple


@functools.cache
def load() -> tuple[Callable[..., Tensor] | None, str]:
    """causal_conv1d_fn, or None and why not."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except Exception as error:
        return None, f"causal-conv1d cannot be imported ({type(error).__name__}: {error})"
    return causal_conv1d_fn, ""


def declined(device: torch.device) -> str | None:
    """None if this backend serves `device`, else the reason in a sentence."""
    if device.type != "cuda":
        return f"causal-conv1d's kernel does not run on {device.type}"
    return load()[1] or _checked(device)


@functools.cache
def _checked(device: torch.device) -> str | None:
    return failure(lambda: _probe(device), 1e-4)


def takes(u: Tensor, weight: Tensor) -> bool:
    """Whether these tensors go through the kernel: its device, taps, alignment, and no float64."""
    if not u.is_cuda or u.dtype == torch.float64 or weight.shape[1] not in WIDTHS or weight.shape[0] % VECTOR:
        return False
    return declined(u.device) is None


def block_conv(u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`conv.block_conv`: every block is a row of the batch, and its left context that row's initial state.

    u (B, M, G, Ch), left (B, M, W-1, Ch), weight (Ch, W), bias (Ch) -> like u. Channels are innermost, as the kernel
    wants them beside initial states.
    """
    convolve, _ = load()
    assert convolve is not None
    rows, context = (t.flatten(0, 1).contiguous().transpose(1, 2) for t in (u, left.to(u.dtype)))
    y = convolve(rows, weight.contiguous(), bias, initial_states=context, activation="silu")
    return y.transpose(1, 2).reshape(u.shape)


def _plain(u: Tensor, left: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = torch.cat([left, u], dim=2).flatten(0, 1).transpose(1, 2)
    y = F.silu(F.conv1d(rows, weight[:, None], bias, groups=len(weight)))
    return y.transpose(1, 2).view(u.shape)


def _probe(device: torch.device) -> list[Pair]:
    """Blocks of 32 tokens and 64 channels behind a context, with gradients."""
    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 32, 64), (2, 3, 3, 64), (64, 4), (64,))
    leaves = [torch.randn(shape, generator=draws).to(device) for shape in shapes]
    results = []
    for function in (block_conv, _plain):
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        y = function(*own)
        # weights sum over all tokens: as means they stay of size 1
        grads = torch.autograd.grad(y.square().sum(), own)
        results.append([y.detach(), *grads[:2], *(grad / 192 for grad in grads[2:])])
    return list(zip(results[0], results[1]))
