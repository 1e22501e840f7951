"""Owns the order of rows: each source shuffled anew every epoch, then mixed by weight; any position at once."""

import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mezzotint.data.rows import RowSource

WINDOW = 1 << 24  # tokens that are shuffled together where whole stretches are read


def mixed_order(sources: list[RowSource], weights: list[float], seed: int) -> Sequence[tuple[int, int]]:
    """The infinite order of (source, row).

    A source's rows are shuffled one by one over the whole of it; parquet, of which a row group is the least that can be
    read, in windows: stretches of neighbouring row groups in random order, their rows shuffled within every WINDOW
    tokens. Sources are mixed in exact proportion at every position, with weights rounded down to hundredths of the
    smallest (0.7 and 0.3 are 233 and 100).
    """
    grain = _grain()
    shuffled = []
    for number, source in enumerate(sources):
        own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])  # no two sources share an order
        stretches = source.stretches()
        if stretches is None:
            rows: Any = grain.MapDataset.source(_Rows(number, len(source)))
            shuffled.append(rows.shuffle(seed=own_seed).repeat())
        else:
            windows = Windows(number, stretches, max(1, WINDOW // source.row_length), own_seed)
            shuffled.append(grain.MapDataset.source(windows))
    if len(shuffled) == 1:
        return shuffled[0]
    return grain.MapDataset.mix(shuffled, weights=weights)


class _Rows:
    """What grain shuffles: (number of the source, row) pairs, not the rows themselves."""

    def __init__(self, source: int, length: int) -> None:
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self._source, int(row)


class Windows:
    """An infinite order of the rows of one source in which neighbours in time are neighbours on disk.

    Each epoch lays the stretches (`starts` (n + 1,), the first row of each) in a new random order, cuts that into windows
    of about `window` rows at the ends of stretches, and shuffles the rows of each window.
    """

    def __init__(self, source: int, starts: np.ndarray, window: int, seed: int) -> None:
        self._source, self._starts, self._window, self._seed = source, starts, window, seed
        self._rows = int(starts[-1])
        self._epoch = lru_cache(maxsize=2)(self._lay)
        self._shuffled = lru_cache(maxsize=4)(self._shuffle)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(int(position), self._rows)
        _, firsts, _ = self._epoch(epoch)
        window = int(np.searchsorted(firsts, place, side="right")) - 1
        return self._source, int(self._shuffled(epoch, window)[place - int(firsts[window])])

    def _lay(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stretches in the epoch's order, the place of each window's first row, and its first stretch in the order."""
        order = self._random(epoch).permutation(len(self._starts) - 1)
        places = np.concatenate([[0], np.cumsum(np.diff(self._starts)[order])])
        _, heads = np.unique(places[:-1] // self._window, return_index=True)
        return order, places[heads], np.append(heads, len(order))

    def _shuffle(self, epoch: int, window: int) -> np.ndarray:
        """The rows of a window, in order."""
        order, _, heads = self._epoch(epoch)
        stretches = order[heads[window] : heads[window + 1]]
        rows = np.concatenate([np.arange(self._starts[s], self._starts[s + 1]) for s in stretches])
        return self._random(epoch, window).permutation(rows)

    def _random(self, *key: int) -> np.random.RandomState:
        """RandomState, since its stream, unlike Generator's, is promised to be the same in every numpy."""
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, *key])))


def _grain() -> Any:
    """The grain module, without its remark that jax is not installed (it is not needed)."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    import grain

    absl.setLevel(level)
    return grain
