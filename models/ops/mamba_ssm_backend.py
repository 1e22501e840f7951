"""mamba-ssm's public scan behind our in-block and clean SSD; the one file that imports mamba-ssm."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .probe import Pair, failure

LEAST_CHUNK, LONG_CHUNK = 16, 128  # tokens; its products want 16, and 128 is where its own defaults start


@functools.cache
def load() -> tuple[Callable[..., Tensor] | None, str]:
    """mamba_chunk_scan_combined, or None and why not. Installed without its CUDA modules it does not import."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:
        return None, f"mamba-ssm cannot be imported ({type(error).__name__}: {error})"
    return mamba_chunk_scan_combined, ""


def declined(device: torch.device) -> str | None:
    """None if this backend serves `device`, else the reason in a sentence."""
    if device.type != "cuda":
        return f"mamba-ssm's kernels do not run on {device.type}"
    return load()[1] or _checked(device)


@functools.cache
def _checked(device: torch.device) -> str | None:
    return failure(lambda: _probe(device), 2e-2)  # its products may round to tf32


def takes(x: Tensor) -> bool:
    """Whether blocks x go through mamba-ssm: a device that it serves, and not float64, which it computes in float32.

    Training keeps `ssd_parts.in_block`: two scans over flipped copies move more bytes than its one (G, G) matrix a head.
    """
    return x.is_cuda and x.dtype != torch.float64 and not torch.is_grad_enabled() and declined(x.device) is None


def in_block(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
    """`ssd_parts.in_block` as two causal scans, the second over flipped tokens -> (F, G, H, P).

    A causal scan of flipped tokens lets token i hear j >= i, itself included: what it says to itself is taken off.
    """
    ahead = _scan(x, dt[:, :, 0], A, B, C, skip)
    turned = [t.flip(1) for t in (x, dt[:, :, 1], B, C)]
    back = _scan(turned[0], turned[1], A, turned[2], turned[3], None).flip(1)
    itself = (C.to(dt.dtype) * B).sum(-1)[:, :, None] * dt[:, :, 1]  # (F, G, H)
    return (ahead + back - (itself[..., None] * x)).to(x.dtype)


def clean_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, starts: Tensor, state: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The clean stream with nothing beside it: outputs (Bt, m, G, H, P) and the state behind it (Bt, N, H, P).

    x (Bt, m, G, H, P), dt (Bt, m, G, 2, H), B, C (Bt, m, G, N), starts (Bt, m): first block of each block's document, 0
    where it goes on from `state` (Bt, N, H, P).
    """
    size = x.shape[2]
    tokens = [t.flatten(1, 2) for t in (x, dt[:, :, :, 0], B, C)]
    documents = starts.to(x.device, torch.int32).repeat_interleave(size, dim=1)
    entering = state.permute(0, 2, 3, 1).contiguous()
    scan, _ = load()
    assert scan is not None
    chunk = min(LONG_CHUNK, _chunk(tokens[0].shape[1]))
    y, after = scan(
        tokens[0], tokens[1].contiguous(), A.to(dt.dtype), tokens[2][:, :, None], tokens[3][:, :, None], chunk,
        D=None if skip is None else skip.to(dt.dtype), initial_states=entering, seq_idx=documents,
        return_final_states=True,
    )  # fmt: skip
    flat = [t.flatten(0, 1) for t in (x, dt, B, C)]
    both = flat[1] * flat[1].new_tensor([0.0, 1.0])[:, None]  # the scan has the forward direction already
    back = in_block(flat[0], both, A, flat[2], flat[3], None)
    return y.unflatten(1, x.shape[1:3]) + back.view_as(x), after.permute(0, 3, 1, 2).to(state.dtype).contiguous()


def _scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> Tensor:
    scan, _ = load()
    assert scan is not None
    wide = None if skip is None else skip.to(dt.dtype)
    return scan(
        x.contiguous(), dt.contiguous(), A.to(dt.dtype), B[:, :, None].contiguous(), C[:, :, None].contiguous(),
        _chunk(x.shape[1]), D=wide,
    )  # fmt: skip


def _chunk(tokens: int) -> int:
    return max(LEAST_CHUNK, 1 << (tokens - 1).bit_length())


def _probe(device: torch.device) -> list[Pair]:
    """Two blocks of 32 tokens, heads of 64, states of 128, with gradients."""
    from .ssd_parts import in_block as reference

    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 32, 4, 64), (2, 32, 2, 4), (4,), (2, 32, 128), (2, 32, 128))
    x, dt, A, B, C = (torch.randn(shape, generator=draws).to(device) for shape in shapes)
    B, C = B / 128**0.25, C / 128**0.25
    leaves = [x, 0.2 * dt.sigmoid(), -A.exp(), B, C]
    results = []
    for function in (in_block, reference):
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        y = function(own[0], own[1], own[2], own[3], own[4], None)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), own)])
    return list(zip(results[0], results[1]))
