"""The likelihood bound on held-out rows under fixed noise, with its standard error, and by noise level."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mezzotint.data.loader import DataConfig
from mezzotint.data.manifest import check_tokenizer
from mezzotint.data.rows import RowSource
from mezzotint.data.tokenizer import Tokenizer
from mezzotint.models.errors import InputError
from mezzotint.models.schedule import Schedule
from mezzotint.training.distributed import Ranks
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective

LEVELS = 10  # bins of the noise level


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """folder: prepared held-out data, null for none; every: steps between bounds (the last step always has one)."""

    folder: str | None = None
    every: int = 500
    rows: int = 64  # evenly spread over the folder; fewer if it holds fewer
    draws: int = 1  # independent noise draws of each row, the same ones every time
    seed: int = 1_000_003

    def __post_init__(self) -> None:
        if self.every < 1 or self.rows < 2 or self.draws < 1:
            raise InputError("validation.every and validation.draws must be at least 1, validation.rows at least 2")


@dataclass(frozen=True)
class HeldOut:
    """Fixed validation rows on the CPU."""

    tokens: Tensor  # (R, T) int64
    documents: Tensor  # (R, T) int64
    blocks: Tensor  # (R,) int64
    bytes: Tensor  # (R,) float64, bytes of text; fill and control ids stand for none


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound on -log p: nats per token (fill included) and bits per byte of text (fill excluded)."""

    nats_per_token: float
    nats_per_token_error: float  # standard error over rows
    bits_per_byte: float
    bits_per_byte_error: float
    nll_by_level: tuple[float, ...]  # nats per masked token at noise levels 0 .. 0.1, 0.1 .. 0.2, ...

    def record(self) -> dict:
        values = {name: value for name, value in vars(self).items() if name != "nll_by_level"}
        return values | {f"nll_level_{i / LEVELS:.1f}": value for i, value in enumerate(self.nll_by_level)}


def load_held_out(
    config: ValidationConfig, *, data: DataConfig, block_length: int, tokenizer: Tokenizer
) -> HeldOut | None:
    """Rows spread evenly over the held-out folder, cut as the training data is; None without a folder."""
    if config.folder is None:
        return None
    source = RowSource(config.folder, data.row_length, block_length, align=data.align)
    check_tokenizer(source.manifest, tokenizer)
    if len(source) < 2:
        raise InputError(
            f"validation.folder {config.folder} holds one row of {data.row_length} tokens; give at least two"
        )
    places = np.unique(np.linspace(0, len(source) - 1, min(config.rows, len(source))).round().astype(int))
    rows = [source[int(place)] for place in places]
    text_bytes = [tokenizer.token_bytes[row.tokens[(row.documents >= 0) & ~row.fill]].sum() for row in rows]
    return HeldOut(
        torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)),
        torch.from_numpy(np.stack([row.documents for row in rows]).astype(np.int64)),
        torch.tensor([row.blocks for row in rows]),
        torch.tensor(text_bytes, dtype=torch.float64),
    )


@torch.no_grad()
def bound(objective: Objective, held_out: HeldOut, *, config: ValidationConfig, micro_rows: int, ranks: Ranks) -> Bound:
    """The bound of the model inside `objective`, whatever it is trained with: all frontiers, linear noise; collective.

    The noise is fixed by (validation seed, draw, row), so two bounds differ by their models alone. Levels are
    stratified over all rows and blocks of a draw. The standard error is over rows, by linearising the
    ratio of sums: it holds the spread of rows and of noise together (stratification makes it a little too large).
    """
    size = objective.model.config.block_length
    judge = Objective(objective.model, Schedule(), loss_chunk=objective.loss_chunk)
    rows, length = held_out.tokens.shape
    source = NoiseSource(
        seed=config.seed, rows_per_step=rows, row_blocks=length // size, slots=length // size, block_length=size
    )
    row_sums = torch.zeros(rows, dtype=torch.float64)
    level_sums = torch.zeros(2, LEVELS, dtype=torch.float64)
    batches = [(draw, first) for draw in range(config.draws) for first in range(0, rows, micro_rows)]
    for draw, first in batches[ranks.rank :: ranks.world]:
        part = slice(first, min(first + micro_rows, rows))
        noise = source.draw(step=draw, first_row=first, blocks=held_out.blocks[part])
        tokens, documents = (x[part].to(ranks.device) for x in (held_out.tokens, held_out.documents))
        _, sums = judge(tokens, documents, noise)
        nll, masked = sums.nll.double().cpu(), sums.masked.double().cpu()
        row_sums[part] += (nll / noise.levels * noise.share[:, None]).sum(dim=1)
        bins = (noise.levels * LEVELS).long().clamp(max=LEVELS - 1)
        level_sums[0].index_add_(0, bins.flatten(), nll.flatten())
        level_sums[1].index_add_(0, bins.flatten(), masked.flatten())
    total = ranks.sum(torch.cat([row_sums, level_sums.flatten()]))
    return summarize(total[:rows] / config.draws, held_out, total[rows:].view(2, LEVELS))


def summarize(row_sums: Tensor, held_out: HeldOut, level_sums: Tensor) -> Bound:
    """From nats of each row (R,), and (2, LEVELS) sums of nats and of masked tokens."""
    tokens = (held_out.documents >= 0).sum(dim=1).double()
    nats, nats_error = ratio(row_sums, tokens)
    bits, bits_error = ratio(row_sums / math.log(2), held_out.bytes)
    by_level = (level_sums[0] / level_sums[1].clamp(min=1)).tolist()
    return Bound(
        nats_per_token=nats,
        nats_per_token_error=nats_error,
        bits_per_byte=bits,
        bits_per_byte_error=bits_error,
        nll_by_level=tuple(by_level),
    )


def ratio(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """`sum(sums) / sum(counts)` and its standard error over rows: spread of `sums - ratio * counts`."""
    value = sums.sum() / counts.sum()
    rows = len(sums)
    error = ((sums - value * counts).square().sum() * rows / (rows - 1)).sqrt() / counts.sum()
    return float(value), float(error)
