"""The likelihood bound on held-out rows under fixed noise, with its standard error, by noise level and by position."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from mezzotint.training.breakdown import Breakdown, means, named
from mezzotint.training.distributed import Ranks
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import BlockSums, Objective


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
    # nats per masked token, NaN where nothing was masked: by noise level, by place in the row
    nll_by_level: tuple[float, ...]
    nll_by_position: tuple[float, ...]
    row_blocks: int

    def record(self) -> dict[str, float]:
        names = ("nats_per_token", "nats_per_token_error", "bits_per_byte", "bits_per_byte_error")
        values = {name: value for name, value in vars(self).items() if name in names}
        return values | named(self.nll_by_level, self.nll_by_position, row_blocks=self.row_blocks)


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
def bound(
    objective: Objective,
    held_out: HeldOut,
    *,
    config: ValidationConfig,
    micro_rows: int,
    ranks: Ranks,
    stopped: Callable[[], bool],
) -> Bound | None:
    """The bound of the model inside `objective`, whatever it is trained with: all frontiers, linear noise; collective.

    The noise is fixed by (validation seed, draw, row), so two bounds differ by their models alone. Levels are
    stratified over all rows and blocks of a draw. The standard error is over rows, by linearising the
    ratio of sums: it holds the spread of rows and of noise together (stratification makes it a little too large).
    Before every micro-batch the ranks agree whether `stopped` is true on one of them: then all return None.
    """
    size = objective.model.config.block_length
    judge = Objective(objective.model, Schedule(), loss_chunk=objective.loss_chunk)
    rows, length = held_out.tokens.shape
    source = NoiseSource(
        seed=config.seed, rows_per_step=rows, row_blocks=length // size, slots=length // size, block_length=size
    )
    row_sums, breakdown = torch.zeros(rows, dtype=torch.float64), Breakdown(length // size, torch.device("cpu"))
    batches = [(draw, first) for draw in range(config.draws) for first in range(0, rows, micro_rows)]
    for turn in range(0, len(batches), ranks.world):  # the same number of turns on all ranks
        if ranks.sum(torch.tensor([float(stopped())])) > 0:
            return None
        for draw, first in batches[turn + ranks.rank : turn + ranks.rank + 1]:  # none left for some in the last turn
            part = slice(first, min(first + micro_rows, rows))
            noise = source.draw(step=draw, first_row=first, blocks=held_out.blocks[part])
            tokens, documents = (x[part].to(ranks.device) for x in (held_out.tokens, held_out.documents))
            _, sums = judge(tokens, documents, noise)
            sums = BlockSums(sums.nll.double().cpu(), sums.masked.cpu())
            row_sums[part] += (sums.nll / noise.levels * noise.share[:, None]).sum(dim=1)
            breakdown.add([(noise, sums)])
    total = ranks.sum(torch.cat([row_sums, breakdown.take()]))
    return summarize(total[:rows] / config.draws, held_out, total[rows:], row_blocks=length // size)


def summarize(row_sums: Tensor, held_out: HeldOut, bin_sums: Tensor, *, row_blocks: int) -> Bound:
    """From nats of each row (R,), and the sums of a Breakdown."""
    tokens = (held_out.documents >= 0).sum(dim=1).double()
    nats, nats_error = ratio(row_sums, tokens)
    bits, bits_error = ratio(row_sums / math.log(2), held_out.bytes)
    by_level, by_position = means(bin_sums)
    return Bound(
        nats_per_token=nats,
        nats_per_token_error=nats_error,
        bits_per_byte=bits,
        bits_per_byte_error=bits_error,
        nll_by_level=tuple(by_level),
        nll_by_position=tuple(by_position),
        row_blocks=row_blocks,
    )


def ratio(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """`sum(sums) / sum(counts)` and its standard error over rows: spread of `sums - ratio * counts`."""
    value = sums.sum() / counts.sum()
    rows = len(sums)
    error = ((sums - value * counts).square().sum() * rows / (rows - 1)).sqrt() / counts.sum()
    return float(value), float(error)
