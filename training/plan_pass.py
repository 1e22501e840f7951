"""The micro-batch that a plan is made for: what its bytes depend on, and the rows that need most."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzotint.models.config import ModelConfig
from mezzotint.training.engine import EngineConfig
from mezzotint.training.noise import Noise
from mezzotint.training.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A micro-batch of one rank: everything that its bytes depend on."""

    model: ModelConfig
    objective: ObjectiveConfig
    engine: EngineConfig
    rows: int
    row_length: int


@dataclass(frozen=True)
class Rows:
    """A micro-batch on the CPU."""

    tokens: Tensor  # (B, T) int64
    documents: Tensor  # (B, T) int64
    noise: Noise


def micro_batch(p: Pass) -> Rows:
    """The micro-batch that needs most: frontiers at the rows' ends and in no run, so that states are copied; documents
    that leave every tile its own mask for every row but hide almost no key.

    Half of the tokens are masked, and three standard deviations more: levels of few blocks may be high by chance.
    """
    size, row_blocks = p.model.block_length, p.row_length // p.model.block_length
    slots = p.objective.slots(row_blocks)
    tokens = torch.full((p.rows, p.row_length), _ordinary(p.model))
    documents = torch.zeros_like(tokens)
    first = size if size < p.row_length else 1  # where the second document of a row starts
    documents[:, first:] = 1
    documents[0, : p.row_length - first] = 0
    rate = min(1.0, 0.5 + 3 / math.sqrt(12 * p.rows * slots))
    uniforms = torch.linspace(0, 1, size + 1, dtype=torch.float64)[:-1].expand(p.rows, slots, -1) * 0.5 / rate
    frontiers = torch.arange(row_blocks - slots, row_blocks).repeat(p.rows, 1)
    if slots < row_blocks:
        frontiers[slots == 1 :, 0] -= 1  # a single frontier stays at the end in the first row
    noise = Noise(
        frontiers=frontiers,
        valid=torch.ones(p.rows, slots, dtype=torch.bool),
        levels=torch.full((p.rows, slots), 0.5, dtype=torch.float64),
        uniforms=uniforms,
        share=torch.ones(p.rows, dtype=torch.float64),
    )
    return Rows(tokens, documents, noise)


def _ordinary(model: ModelConfig) -> int:
    special = {model.mask_token_id, model.eos_token_id, model.pad_token_id}
    return next(token for token in range(model.vocab_size) if token not in special)
