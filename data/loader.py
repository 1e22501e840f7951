"""Owns the one infinite order of rows: shuffled, mixed by weight, addressed by position; its state is one integer."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mezzotint.data.errors import InputError
from mezzotint.data.files import sha256_of
from mezzotint.data.order import mixed_order
from mezzotint.data.prefetch import prefetch
from mezzotint.data.rows import RowSource

ORDER_PROBE = 256  # first row ids that enter the hash, so that a change of grain's order is noticed


@dataclass(frozen=True)
class DataConfig:
    """Which prepared folders, in what proportion, in what order."""

    sources: tuple[tuple[str, float], ...]  # (folder, weight): a source gives weight / sum of weights of all rows
    row_length: int = 1024  # tokens, a multiple of the block length
    seed: int = 0  # of the order; each epoch of each source is shuffled anew
    align: bool = True  # False: documents are not filled to whole blocks (a block as long as the row)
    prefetch: int = 2  # batches made ahead


@dataclass(frozen=True)
class Batch:
    """`n` rows of `T` tokens, on the CPU."""

    tokens: torch.Tensor  # (n, T) int64
    documents: torch.Tensor  # (n, T) int64: document of each token, from 0 in each row; -1 where padded
    fill: torch.Tensor  # (n, T) bool: <eos> that fills a document's last block
    blocks: torch.Tensor  # (n,) int64: valid blocks of each row
    row_ids: torch.Tensor  # (n,) int64: number of the row in all sources laid end to end


class Loader:
    """Rows by position in the one order all ranks, micro-batches and workers share.

    Position `p` always holds the same row, whoever asks: rank and accumulation only decide which are asked for.
    Raises InputError for missing, damaged or mismatched sources (see `RowSource`) and weights that are not positive.
    """

    def __init__(self, config: DataConfig, block_length: int) -> None:
        _check(config)
        self.config = config
        self.sources = [
            RowSource(folder, config.row_length, block_length, align=config.align) for folder, _ in config.sources
        ]
        self.manifests = tuple(source.manifest for source in self.sources)
        _require_one_tokenizer(self.sources)
        self._first_ids = np.cumsum([0, *map(len, self.sources)])  # (sources + 1,) id of each source's row 0
        self._order = mixed_order(self.sources, [weight for _, weight in config.sources], config.seed)
        self.hash = self._hash(block_length)

    def row_ids(self, start: int, count: int) -> list[int]:
        """Ids of the rows at positions start .. start + count - 1."""
        return [int(self._first_ids[source]) + row for source, row in self._pairs(start, count)]

    def batch(self, start: int, count: int) -> Batch:
        """The rows at positions start .. start + count - 1 of the infinite order."""
        pairs = self._pairs(start, count)
        rows = [self.sources[source][row] for source, row in pairs]
        return Batch(
            tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
            documents=torch.from_numpy(np.stack([row.documents for row in rows])),
            fill=torch.from_numpy(np.stack([row.fill for row in rows])),
            blocks=torch.tensor([row.blocks for row in rows], dtype=torch.int64),
            row_ids=torch.tensor([int(self._first_ids[source]) + row for source, row in pairs], dtype=torch.int64),
        )

    def iterate(
        self, first_step: int, rows_per_step: int, offset: int = 0, count: int | None = None
    ) -> Iterator[Batch]:
        """Without end, for s = first_step, ...: rows s * rows_per_step + offset .. + count, made ahead in a thread.

        A rank passes its own `offset` and `count`; `count=None` takes the whole step. To resume, pass the step.
        """
        count = rows_per_step - offset if count is None else count
        if offset < 0 or count < 1 or offset + count > rows_per_step:
            raise InputError(f"rows {offset} .. {offset + count} do not lie in a step of {rows_per_step} rows")
        return prefetch(self._steps(first_step, rows_per_step, offset, count), self.config.prefetch)

    def _pairs(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source, row) at positions start .. start + count - 1."""
        if start < 0:
            raise IndexError(f"position {start}: positions begin at 0")
        return [self._order[position] for position in range(start, start + count)]

    def _steps(self, step: int, rows_per_step: int, offset: int, count: int) -> Iterator[Batch]:
        while True:
            yield self.batch(step * rows_per_step + offset, count)
            step += 1

    def _hash(self, block_length: int) -> str:
        """Hash of data and order: equal hashes mean the same rows at the same positions."""
        identity = {
            "data": [manifest.sha256 for manifest in self.manifests],
            "weights": [weight for _, weight in self.config.sources],
            "row_length": self.config.row_length,
            "block_length": block_length,
            "align": self.config.align,
            "seed": self.config.seed,
            "order": self.row_ids(0, ORDER_PROBE),
        }
        return sha256_of(json.dumps(identity, sort_keys=True).encode())


def _check(config: DataConfig) -> None:
    """InputError for a config no loader can be made of."""
    if not config.sources:
        raise InputError("sources is empty: name at least one prepared folder and its weight")
    for folder, weight in config.sources:
        if not 0 < weight < math.inf:
            raise InputError(f"source {folder} has weight {weight}: give a positive weight, or leave the source out")
    if config.seed < 0:
        raise InputError(f"seed is {config.seed}: give a number from 0 on")


def _require_one_tokenizer(sources: list[RowSource]) -> None:
    """InputError when two sources were tokenized differently."""
    first = sources[0].manifest
    for source in sources[1:]:
        if source.manifest.tokenizer_sha256 != first.tokenizer_sha256:
            raise InputError(
                f"{source.manifest.folder} and {first.folder} were made with different tokenizers: "
                "prepare one of them again"
            )
