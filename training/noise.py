"""Random draws of the objective: frontiers, noise levels and masks, keyed by (seed, step, row, purpose) alone."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mezzotint.models.errors import InputError


class Purpose(IntEnum):
    """What a stream of random numbers is for; the values are part of the format of a run and never change."""

    FRONTIER = 1
    LEVEL = 2
    MASK = 3
    STRATUM = 4


def generator(*, seed: int, step: int, row: int, purpose: Purpose) -> np.random.Generator:
    """An independent stream for each key: Philox keyed by (seed, purpose), counting up from (row, step)."""
    return np.random.Generator(np.random.Philox(key=[seed, int(purpose)], counter=[0, row, step, 0]))


@dataclass(frozen=True)
class Noise:
    """Draws for B rows with K frontier slots each, blocks of G tokens, on the CPU.

    A row with fewer valid blocks than slots has invalid slots at its end; they repeat a valid frontier (0 if none is).
    """

    frontiers: Tensor  # (B, K) int64, ascending within a row
    valid: Tensor  # (B, K) bool
    levels: Tensor  # (B, K) float64, t in (0, 1)
    uniforms: Tensor  # (B, K, G) float64; a token is masked where its uniform is below the mask rate of its block
    share: Tensor  # (B,) float64, n/k: valid blocks of the row over frontiers drawn; 0 for a row without a valid block

    def fingerprint(self, row_ids: Tensor) -> int:
        """A number that changes with any row or draw; it adds up over micro-batches and ranks (32 bits a row)."""
        parts = [field.name for field in dataclasses.fields(self)]
        rows = zip(row_ids.tolist(), *(getattr(self, name).numpy() for name in parts))
        return sum(zlib.crc32(b"".join(np.asarray(value).tobytes() for value in row)) for row in rows)

    def select(self, rows: Tensor) -> Noise:
        """The same draws for some of the rows, given by index."""
        return Noise(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


@dataclass(frozen=True, kw_only=True)
class NoiseSource:
    """The draws of a whole run: `source.draw(step, first_row, blocks)`.

    slots: frontiers per row, K; a row of n valid blocks uses min(K, n) of them.
    """

    seed: int
    rows_per_step: int
    row_blocks: int  # blocks of a full row, T/G
    slots: int
    block_length: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= self.row_blocks:
            raise InputError(
                f"objective.frontiers asks for {self.slots} frontiers, but a row holds {self.row_blocks} blocks: 1 to "
                f"{self.row_blocks}, 'one' or 'all'"
            )

    def draw(self, *, step: int, first_row: int, blocks: Tensor) -> Noise:
        """Draws for rows first_row .. of the global batch of `step`; blocks (B,): valid blocks of each.

        The noise level of (row r, slot s) is `(p[r*K+s] + u) / (rows*K)` with p one permutation of the step: the levels
        of a step are spread evenly over (0, 1), and no level is a function of its place.
        """
        counts = blocks.tolist()
        rows, slots = len(counts), self.slots
        if not 0 <= first_row <= first_row + rows <= self.rows_per_step:
            raise ValueError(f"rows {first_row}..{first_row + rows - 1} are not in a batch of {self.rows_per_step}")
        frontiers = np.zeros((rows, slots), dtype=np.int64)
        valid = np.zeros((rows, slots), dtype=bool)
        offsets = np.empty((rows, slots))
        uniforms = np.empty((rows, slots, self.block_length))
        for i, count in enumerate(counts):
            key = {"seed": self.seed, "step": step, "row": first_row + i}
            chosen = choose_frontiers(generator(**key, purpose=Purpose.FRONTIER), count, slots)
            valid[i, : len(chosen)] = True
            frontiers[i, : len(chosen)] = chosen
            frontiers[i, len(chosen) :] = chosen[-1] if len(chosen) else 0
            offsets[i] = generator(**key, purpose=Purpose.LEVEL).random(slots)
            uniforms[i] = generator(**key, purpose=Purpose.MASK).random((slots, self.block_length))
        cells = self.rows_per_step * slots
        strata = _strata(self.seed, step, cells)[first_row * slots : (first_row + rows) * slots].reshape(rows, slots)
        # the half of a float64 step keeps t above 0, where the weight would be infinite
        levels = (strata + offsets + 2.0**-54) / cells
        share = blocks.numpy() / np.maximum(valid.sum(axis=1), 1)
        return Noise(*(torch.from_numpy(array) for array in (frontiers, valid, levels, uniforms, share)))


def choose_frontiers(random: np.random.Generator, blocks: int, slots: int) -> np.ndarray:
    """`min(slots, blocks)` distinct block indices below `blocks`, each subset equally likely, ascending."""
    if slots >= blocks:
        return np.arange(blocks)
    return np.sort(random.permutation(blocks)[:slots])


@lru_cache(maxsize=4)
def _strata(seed: int, step: int, cells: int) -> np.ndarray:
    """The step's permutation of its strata; cached because every micro-batch of a step asks for it."""
    permutation = generator(seed=seed, step=step, row=0, purpose=Purpose.STRATUM).permutation(cells)
    permutation.flags.writeable = False
    return permutation
