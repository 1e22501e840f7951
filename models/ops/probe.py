"""A backend's check on the machine it would run on: asked once, and its failure is the sentence that declines it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def failure(run: Callable[[], list[Pair]], tolerance: float) -> str | None:
    """None if every pair (found, expected) that `run` gives agrees to `tolerance` of the expected values' size.

    Else why not, in a sentence. Whatever a foreign kernel raises is an answer here, not an error. The answer does not depend
    on where it is asked: gradients are on and autocast is off.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            pairs = run()
        errors = [(found.double() - expected.double()).abs().max().item() for found, expected in pairs]
        sizes = [max(1.0, expected.abs().max().item()) for _, expected in pairs]
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        return f"its check on this device ended in {type(error).__name__}: {first}"
    for off, size in zip(errors, sizes):
        if not off <= tolerance * size:
            return f"its check on this device was off by {off:.1e}, more than {tolerance * size:.1e}"
    return None
