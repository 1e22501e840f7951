"""An exponential moving average of the weights, in float32, cut over the ranks as the optimizer's state is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzotint.training.fragments import WEIGHTS, Fragment


class Ema:
    """Average `a <- decay * a + (1 - decay) * w`, with the decay held down to (1 + n) / (10 + n) at update n.

    The early, smaller decay keeps the random start out of the average of a short run. Each rank averages the fragments
    that it holds.
    """

    def __init__(self, fragments: Sequence[Fragment], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.fragments = fragments
        self.values: list[Tensor] = [fragment.views[WEIGHTS].clone() for fragment in fragments]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after one optimizer step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        weights = [fragment.views[WEIGHTS] for fragment in self.fragments]
        torch._foreach_lerp_(self.values, weights, 1 - decay)
