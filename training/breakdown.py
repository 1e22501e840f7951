"""Loss by noise level and by position in the row: nats per masked token, in bins, summed on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mezzotint.training.noise import Noise
from mezzotint.training.objective import BlockSums

LEVELS = 10  # bins of the noise level t, over (0, 1)
POSITIONS = 8  # bins of the frontier's place in the row, over its blocks
BINS = LEVELS + POSITIONS


class Breakdown:
    """Sums of nats and of masked tokens by bin, over any number of micro-batches; nothing waits for the device."""

    def __init__(self, row_blocks: int, device: torch.device) -> None:
        self.row_blocks = row_blocks
        self._sums = torch.zeros(2, BINS, dtype=torch.float64, device=device)

    def add(self, details: Sequence[tuple[Noise, BlockSums]]) -> None:
        """Take in draws and their sums, each (B, K); slots that are not valid hold zero and change nothing."""
        for noise, sums in details:
            bins = torch.cat([level_bins(noise).flatten(), LEVELS + position_bins(noise, self.row_blocks).flatten()])
            values = torch.stack([sums.nll, sums.masked.to(sums.nll)]).flatten(1).to(self._sums)
            self._sums.index_add_(1, bins.to(self._sums.device, non_blocking=True), values.repeat(1, 2))

    def take(self) -> Tensor:
        """The sums since the last call, (2 * BINS,) float64 on the CPU: they add up over ranks. Waits for the device."""
        taken = self._sums.flatten().cpu()
        self._sums = torch.zeros_like(self._sums)
        return taken


def level_bins(noise: Noise) -> Tensor:
    """(B, K) bin of each frontier's noise level."""
    return (noise.levels * LEVELS).long().clamp(max=LEVELS - 1)


def position_bins(noise: Noise, row_blocks: int) -> Tensor:
    """(B, K) bin of each frontier's block among the blocks of a full row; a short row uses few bins."""
    return noise.frontiers * POSITIONS // row_blocks


def means(sums: Tensor) -> tuple[list[float], list[float]]:
    """Nats per masked token by level and by position, from `take` or a sum of such; NaN where nothing was masked."""
    nll, masked = sums.view(2, BINS)
    values = (nll / masked).tolist()
    return values[:LEVELS], values[LEVELS:]


def named(by_level: Sequence[float], by_position: Sequence[float], *, row_blocks: int) -> dict[str, float]:
    """Keys of a record, each with its bin's lower edge; positions that a row of so few blocks does not have are left out."""
    used = {block * POSITIONS // row_blocks for block in range(row_blocks)}
    levels = {f"nll_level_{i / LEVELS:.1f}": value for i, value in enumerate(by_level)}
    return levels | {f"nll_position_{i / POSITIONS:.3f}": v for i, v in enumerate(by_position) if i in used}
