"""Owns what is checked and counted in tokens that are read from end to end: ids, bytes of text, ends of documents."""

from dataclasses import dataclass

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.pieces import AT_ONCE, Piece
from mezzotint.data.tokenizer import Tokenizer


@dataclass
class Scan:
    """Counts of the documents seen so far. `end_id` is read as `<eos>`; -1 for none.

    `add` raises InputError for an id outside the vocabulary, and for `<mask>` and `<pad>`, which no text holds.
    """

    name: str  # of the file, for sentences
    tokenizer: Tokenizer
    end_id: int = -1
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    largest_id: int = 0
    ended: int = 0  # documents whose last id is <eos>
    first_ended: int = -1  # number of the first of them
    first_open: int = -1  # number of the first that ends otherwise
    inner: int = 0  # <eos> elsewhere in documents
    last_id: int = -1  # with which all documents end; -2 when they differ

    def add(self, piece: Piece) -> None:
        """Check and count whole documents."""
        ends = np.cumsum(piece.sizes)
        eos = 0
        for start in range(0, len(piece.tokens), AT_ONCE):
            eos += self._add_ids(piece.tokens[start : start + AT_ONCE], start, ends)
        if len(ends):
            self._add_ends(piece.tokens[ends - 1].astype(np.int64), eos)
        self.tokens += len(piece.tokens)
        self.documents += len(ends)

    def _add_ids(self, tokens: np.ndarray, start: int, ends: np.ndarray) -> int:
        """Count ids; how many of them are <eos>."""
        tokenizer = self.tokenizer
        lowest, largest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or largest >= tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else largest
            document = self._document(tokens == wrong, start, ends)
            raise InputError(
                f"{self.name} holds token id {wrong} in document {document}, but {tokenizer.files[0]} has ids up to "
                f"{tokenizer.vocab_size - 1}: name the tokenizer that made it"
            )
        counts = np.bincount(tokens.astype(np.int64, copy=False), minlength=tokenizer.vocab_size)
        for name, wrong in (("<mask>", tokenizer.mask_id), ("<pad>", tokenizer.pad_id)):
            if counts[wrong]:
                document = self._document(tokens == wrong, start, ends)
                raise InputError(
                    f"{self.name} holds {name} (id {wrong}) in document {document}, which no text produces: "
                    "write it again without, or name the tokenizer that made it"
                )
        if self.end_id >= 0 and self.end_id != tokenizer.eos_id:
            counts[tokenizer.eos_id] += counts[self.end_id]
            counts[self.end_id] = 0
        self.bytes += int(counts @ tokenizer.token_bytes.astype(np.int64))
        self.largest_id = max(self.largest_id, int(np.flatnonzero(counts)[-1]))
        return int(counts[tokenizer.eos_id])

    def _add_ends(self, last: np.ndarray, eos: int) -> None:
        """Count document ends: `last` (documents,) ids, of `eos` <eos> in all."""
        seen = set(np.unique(last).tolist()) | ({self.last_id} - {-1})
        self.last_id = seen.pop() if len(seen) == 1 else -2
        ended = (last == self.tokenizer.eos_id) | (last == self.end_id)
        if ended.any() and self.first_ended < 0:
            self.first_ended = self.documents + int(ended.argmax())
        if not ended.all() and self.first_open < 0:
            self.first_open = self.documents + int((~ended).argmax())
        self.ended += int(ended.sum())
        self.inner += eos - int(ended.sum())

    def _document(self, where: np.ndarray, start: int, ends: np.ndarray) -> int:
        """Number in the file of the document with the first True of `where`."""
        return self.documents + int(np.searchsorted(ends, start + int(where.argmax()), side="right"))
