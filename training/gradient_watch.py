"""Which micro-batches of a step gave a loss or a gradient that is not finite, seen on this rank before any reduction."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GradientWatch:
    """Sums every gradient as it is made: one read of it, no wait for the device, the same under every ZeRO stage.

    A sum is not finite when one of its terms is not (an overflow of finite terms would end the run as well).
    """

    def __init__(self, module: nn.Module) -> None:
        self.place = 0  # micro-batch that is being computed
        self._flags: Tensor = torch.zeros(0)
        self._hooks = [p.register_hook(self._look) for p in module.parameters()]

    def start(self, micro_batches: int, device: torch.device) -> None:
        """Forget the step before; `micro_batches` follow."""
        self._flags = torch.zeros(micro_batches, device=device)
        self.place = 0

    def bad(self, losses: Tensor) -> Tensor:
        """(micro-batches,) bool, on the device: the loss () of each, or one of its gradients, is not finite."""
        return ~(torch.isfinite(self._flags) & torch.isfinite(losses))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, gradient: Tensor) -> None:
        # 0 * sum: stays 0, or turns into NaN for good
        self._flags[self.place] += 0 * gradient.detach().sum(dtype=torch.float32)
