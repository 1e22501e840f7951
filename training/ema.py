"""An exponential moving average of the weights, kept in float32 or wider beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """Average `a <- decay * a + (1 - decay) * w`, with the decay held down to (1 + n) / (10 + n) at update n.

    The early, smaller decay keeps the random start out of the average of a short run.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = {name: _wide(p.detach()).clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after one optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach().to(self.weights[name].dtype), 1 - decay)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights inside the `with`; the trained ones are put back bit for bit."""
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            _copy(self.weights, model)
            yield
        finally:
            _copy(trained, model)

    def load(self, weights: dict[str, Tensor], updates: int) -> None:
        """Continue from saved averages."""
        for name, saved in weights.items():
            self.weights[name].copy_(saved)
        self.updates = updates


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


@torch.no_grad()
def _copy(weights: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
