"""The small parts every layer is made of: RMSNorm, SwiGLU, rotary tables, noise-level features; no cache, no mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import NOISE_FEATURES, ModelConfig
from .ops.linear import linear
from .ops.norm import rms_norm
from .ops.swiglu import gated


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class WideLinear(nn.Linear):
    """nn.Linear without bias for layers of many outputs: few rows go through `ops.linear`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); (..., D) -> (..., D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = WideLinear(width, hidden)
        self.up_proj = WideLinear(width, hidden)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


def rope_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine (B, L, 1, P/2) of `positions` (B, L), under the configured scaling rule.

    `linear` divides positions by the factor; `ntk` raises the base so that the lowest frequency is divided by it; `yarn`
    interpolates by wavelength and scales both tables (Peng et al. 2023, arXiv 2309.00071, sections 3.1 to 3.4).
    """
    half = config.head_dim // 2
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(half, device=positions.device, dtype=torch.float64) / half
    theta, factor, scale = config.rope_theta, config.rope_factor, 1.0
    if config.rope_scaling == "ntk":
        theta *= factor ** (half / max(half - 1, 1))
    frequency = theta**-exponent
    if config.rope_scaling == "linear":
        frequency = frequency / factor
    if config.rope_scaling == "yarn":
        turns = config.rope_trained_length * frequency / (2 * math.pi)
        keep = ((turns - 1) / (32 - 1)).clamp(0, 1)  # 1: many turns, left alone; 0: less than one turn, interpolated
        frequency = frequency * (keep + (1 - keep) / factor)
        scale = 0.1 * math.log(factor) + 1
    angle = positions[:, :, None, None].to(torch.float64) * frequency
    return (angle.cos() * scale).to(wide), (angle.sin() * scale).to(wide)


def noise_level_features(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Sinusoidal features (..., NOISE_FEATURES) of noise levels in [0, 1]."""
    half = NOISE_FEATURES // 2
    rates = torch.exp(torch.linspace(0, math.log(1000.0), half, device=levels.device, dtype=torch.float64))
    angle = levels[..., None].to(torch.float64) * rates
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)
