"""Owns the one protocol by which rows read tokens, whoever made the file and in whatever format."""

from typing import Protocol

import numpy as np


class TokenFile(Protocol):
    """Token documents by number, laid end to end; none is empty. Nothing is held in memory that grows with the tokens.

    `adds_eos` is 1 when each document ends with an `<eos>` that the file does not hold: readers add it; else 0.
    """

    documents: int
    adds_eos: int

    def sizes(self, first: int, last: int) -> np.ndarray:
        """(last - first,) int64: stored tokens of documents first .. last - 1."""

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) stored tokens [start, start + count) of all documents laid end to end, of any integer dtype."""


class EndsRenamed:
    """A token file whose documents end with an id of their own: it is read as `<eos>`, wherever it stands."""

    def __init__(self, file: TokenFile, end_id: int, eos_id: int) -> None:
        self._file, self._end_id, self._eos_id = file, end_id, eos_id
        self.documents, self.adds_eos = file.documents, file.adds_eos

    def sizes(self, first: int, last: int) -> np.ndarray:
        return self._file.sizes(first, last)

    def read(self, start: int, count: int) -> np.ndarray:
        tokens = self._file.read(start, count).astype(np.int64)
        tokens[tokens == self._end_id] = self._eos_id
        return tokens
