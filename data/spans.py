"""Owns where documents lie once they are filled to whole blocks: a coarse index in memory, sizes left in their files."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mezzotint.data.token_file import TokenFile

STEP = 256  # documents under one entry of the index: 300 billion tokens in documents of 800 take 36 MB, not 6 GB
AT_ONCE = STEP << 12  # documents whose sizes are in memory while the index is made


class Span(NamedTuple):
    """The documents of a stretch of laid-out tokens, in order."""

    starts: np.ndarray  # (n + 1,) int64: laid-out token at which each document starts, and the last ends
    lengths: np.ndarray  # (n,) int64: tokens of each, <eos> included, fill left out
    stored: np.ndarray  # (n,) int64: tokens of each that its file holds
    first_stored: int  # stored tokens of all files before the first of these documents


class Spans:
    """Documents of `files`, laid end to end, each filled up to a multiple of `multiple` tokens."""

    def __init__(self, files: Sequence[TokenFile], multiple: int) -> None:
        self._files, self._multiple = files, multiple
        filled, stored, owner, first = [], [], [], []
        for number, file in enumerate(files):
            for start in range(0, file.documents, AT_ONCE):
                sizes = file.sizes(start, min(start + AT_ONCE, file.documents))
                places = np.arange(0, len(sizes), STEP)
                filled.append(np.add.reduceat(self._filled(sizes + file.adds_eos), places))
                stored.append(np.add.reduceat(sizes, places))
                owner.append(np.full(len(places), number))
                first.append(start + places)
        self._laid = _prefix_sums(filled)  # (entries + 1,) laid-out tokens before each entry
        self._stored = _prefix_sums(stored)  # (entries + 1,) stored tokens before it
        self._owner = np.concatenate(owner)  # (entries,) number of its file
        self._first = np.concatenate(first)  # (entries,) number in its file of its first document
        self.total = int(self._laid[-1])

    def between(self, low: int, high: int) -> Span:
        """The documents that hold laid-out tokens [low, high), 0 <= low < high <= total."""
        entry = int(np.searchsorted(self._laid, low, side="right")) - 1
        end = int(np.searchsorted(self._laid, high, side="left"))  # one past the last entry
        stored, lengths = self._sizes(entry, end)
        starts = _prefix_sums([self._filled(lengths)]) + self._laid[entry]
        first = int(np.searchsorted(starts, low, side="right")) - 1
        last = int(np.searchsorted(starts, high, side="left"))
        before = int(self._stored[entry]) + int(stored[:first].sum())
        return Span(starts[first : last + 1], lengths[first:last], stored[first:last], before)

    def file_starts(self) -> np.ndarray:
        """(files + 1,) int64: stored tokens before each file."""
        entries = np.searchsorted(self._owner, np.arange(len(self._files) + 1), side="left")
        return self._stored[entries]

    def starts_in(self, number: int, documents: np.ndarray) -> np.ndarray:
        """(n,) int64: laid-out tokens before `documents` (n,), numbers in file `number` that may be one past its last.

        Reads the sizes of the whole file.
        """
        file = self._files[number]
        base = self._laid[int(np.searchsorted(self._owner, number, side="left"))]
        return base + _prefix_sums([self._filled(file.sizes(0, file.documents) + file.adds_eos)])[documents]

    def _sizes(self, entry: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Stored tokens and tokens with `<eos>` of each document of entries entry .. end - 1."""
        stored, lengths = [], []
        while entry < end:
            number = self._owner[entry]
            file = self._files[number]
            of_file = entry + int(np.searchsorted(self._owner[entry:end], number, side="right"))
            last = int(self._first[of_file - 1]) + STEP
            sizes = file.sizes(int(self._first[entry]), min(last, file.documents))
            stored.append(sizes)
            lengths.append(sizes + file.adds_eos)
            entry = of_file
        return (stored[0], lengths[0]) if len(stored) == 1 else (np.concatenate(stored), np.concatenate(lengths))

    def _filled(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self._multiple) * self._multiple


def _prefix_sums(parts: Sequence[np.ndarray]) -> np.ndarray:
    """(n + 1,) int64: 0, then the running sum of all of `parts`."""
    return np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *parts]), dtype=np.int64)])
