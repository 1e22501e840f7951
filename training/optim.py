"""AdamW with decay on matrices only, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from mezzotint.models.errors import InputError

SHAPES = ("wsd", "cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate. Raises InputError for values that cannot work."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
    warmup_steps: int = 0
    shape: str = "wsd"  # after warm-up: wsd holds, then falls linearly; cosine falls from the start; constant holds
    decay_share: float = 0.2  # wsd only: last share of all steps, over which the rate falls
    final_share: float = 0.0  # rate after the last step, as a share of lr

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InputError(f"optim.shape is {self.shape!r}; use one of {', '.join(SHAPES)}")
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0 or self.clip < 0 or self.warmup_steps < 0:
            raise InputError("optim: lr and eps must be above 0; weight_decay, clip and warmup_steps at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise InputError(f"optim.beta1 {self.beta1} and optim.beta2 {self.beta2} must be in [0, 1)")
        if not (0 < self.decay_share <= 1 and 0 <= self.final_share <= 1):
            raise InputError("optim.decay_share must be in (0, 1] and optim.final_share in [0, 1]")


def learning_rate(config: OptimConfig, *, step: int, steps: int) -> float:
    """Rate of step `step` (from 0) of `steps`; depends on nothing else, so a resumed run cannot drift."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.shape == "constant":
        share = 1.0
    elif config.shape == "cosine":
        progress = max(0, step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        left = (steps - step) / max(1, round(config.decay_share * steps))
        share = config.final_share + (1 - config.final_share) * max(0.0, min(1.0, left))
    return config.lr * warmup * share


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: weights of linear layers decay; all else does not.

    Not decayed: embeddings (a tied head is one), norms, biases, convolutions, `A_log`, `D` and `dt_bias`.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    matrices -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if id(p) in matrices]
    free = [p for p in model.parameters() if id(p) not in matrices]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """torch's own AdamW: DeepSpeed's would compile a C++ extension."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
