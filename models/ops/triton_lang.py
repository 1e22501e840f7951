"""The one file that imports Triton: names for the kernels, and whether they can run on a device."""

from __future__ import annotations

import functools

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    MISSING = None
except Exception as error:  # an installation may also break on its driver; kernels are then never called
    triton = tl = None
    MISSING = f"Triton cannot be imported ({type(error).__name__}: {error})"

    def jit(function):
        return function


def declined(device: torch.device) -> str | None:
    """None if Triton kernels run on `device`, else the reason in a sentence.

    On a CPU they run in Triton's interpreter alone (TRITON_INTERPRET=1), which is for tests and is never chosen.
    """
    if device.type != "cuda":
        return f"Triton kernels do not run on {device.type}"
    return MISSING or _too_old(device.index)


@functools.cache
def _too_old(index: int | None) -> str | None:
    major, minor = torch.cuda.get_device_capability(index)
    return (
        None if major >= 8 else f"compute capability {major}.{minor} is below 8.0, which these kernels are written for"
    )


def next_power(size: int, least: int = 16) -> int:
    """The smallest power of two that holds `size`; tl.dot wants no side below 16."""
    return max(least, 1 << (size - 1).bit_length())


def wide_type(dtype: torch.dtype):
    """Triton's type of sums and decays: float32, or float64 for float64 inputs."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dot_type(dtype: torch.dtype):
    """Triton's type of the operands of products."""
    return {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16}.get(dtype, tl.bfloat16)


def dot_precision() -> str:
    """How float32 products are computed: in tf32 where torch may, else as three of those, nearly as exact as float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
