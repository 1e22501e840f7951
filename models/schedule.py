"""Noise schedules: the share of masked tokens at a noise level and the loss weight that belongs to it."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError

SCHEDULES = ("linear", "cosine", "clipped")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`alpha_t`, the probability that a token is still clean at level t in (0, 1), with `m_t = 1 - alpha_t`.

    linear    m = t                        weight 1/t
    cosine    m = sin(pi t / 2)            weight (pi/2) cot(pi t / 2)            (MD4, MDLM)
    clipped   m = low + (high - low) t     weight (high - low) / m                (the mask rates of BD3-LM)

    The weight is always `-alpha'_t / (1 - alpha_t)`, so with `L(m)` the expected cross-entropy summed over masked
    tokens at mask rate m, every schedule estimates the integral of `L(m) / m dm` over its own mask rates, without bias.
    For linear and cosine these are 0 to 1: the estimate is of the negative ELBO, the bound on -log p(x), itself. For
    clipped they are `low` to `high`: the estimate is of exactly that part of the bound's integral. It is smaller than
    the bound (the levels outside are left out, nothing is put in their place), so it may be trained on but is never
    reported as a likelihood; validation always uses linear.

    Raises InputError for an unknown name and for clipping limits outside 0 <= low < high <= 1.
    """

    name: str = "linear"
    low: float = 0.0  # clipped only: smallest mask rate
    high: float = 1.0  # clipped only: largest mask rate

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            near = difflib.get_close_matches(self.name, SCHEDULES, n=1, cutoff=0.0)[0]
            raise InputError(f"unknown noise schedule {self.name!r}; the nearest of {', '.join(SCHEDULES)} is {near!r}")
        if not 0.0 <= self.low < self.high <= 1.0:
            raise InputError(f"schedule limits low {self.low} and high {self.high} must satisfy 0 <= low < high <= 1")
        if self.name != "clipped" and (self.low, self.high) != (0.0, 1.0):
            raise InputError(f"low and high belong to the schedule 'clipped', not to {self.name!r}: leave them out")

    def mask_rate(self, t: Tensor) -> Tensor:
        """`1 - alpha_t`, same shape and dtype as t; computed directly, since 1 - (1 - m) loses small m."""
        if self.name == "linear":
            return t
        if self.name == "cosine":
            return torch.sin(t * (math.pi / 2))
        return self.low + (self.high - self.low) * t

    def alpha(self, t: Tensor) -> Tensor:
        """Probability that a token is unmasked at level t."""
        return 1.0 - self.mask_rate(t)

    def weight(self, t: Tensor) -> Tensor:
        """`-alpha'_t / (1 - alpha_t)`, the factor of the cross-entropy of masked tokens; t > 0."""
        if self.name == "linear":
            return 1.0 / t
        if self.name == "cosine":
            return (math.pi / 2) / torch.tan(t * (math.pi / 2))
        return (self.high - self.low) / self.mask_rate(t)
