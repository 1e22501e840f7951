"""Where the kernel tests run: on a CUDA device if there is one (and then under `-m gpu`), else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
# float64 in the interpreter proves the formulas; a card's kernels are written for float32 and narrower, whose products of
# some tens of terms of size 1 go through three roundings to tf32 each: a wrong term would move them by 1e-2 and more
DTYPE, TOLERANCE = (torch.float32, 1e-4) if CUDA else (torch.float64, 1e-10)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().to(DEVICE, DTYPE if t.is_floating_point() else t.dtype) for t in tensors]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal to `tolerance` of the expected values' own size."""
    error = (actual.detach().cpu().double() - expected.detach().double()).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"off by {error:.2e}"
