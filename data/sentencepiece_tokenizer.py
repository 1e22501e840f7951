"""Owns the sentencepiece tokenizer: text through byte fallback, U+2581 through its own bytes, control ids apart."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.files import sha256_of
from mezzotint.data.tokenizer import MASK, SPACE, require_ids, require_round_trip, utf8


class SentencePieceTokenizer:
    """A `tokenizer.model`; see `Tokenizer` for what it promises.

    Raises InputError for a damaged file, one without byte fallback (text would be lost) and one that changes text.
    Control ids the file lacks are appended beyond its vocabulary, in the order eos, pad, mask.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        content = path.read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{path} is no sentencepiece model, or a damaged one: train or copy it again") from error
        if self._processor.get_piece_size() == 0:
            raise InputError(f"{path} is an empty sentencepiece model: train or copy it again")
        self._pieces = _piece_bytes(self._processor)
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if not all(self._processor.is_byte(i) for i in self._space_ids):
            raise InputError(f"{path} has no byte fallback, so text would be lost: train one with byte fallback")
        self.eos_id = self._own_or_appended(self._processor.eos_id())
        self.pad_id = self._own_or_appended(self._processor.pad_id())
        mask = self._processor.piece_to_id(MASK)
        self.mask_id = self._own_or_appended(mask if self._processor.is_control(mask) else -1)
        self.vocab_size = len(self._pieces)
        self.token_bytes = np.array([len(piece) for piece in self._pieces], dtype=np.int32)
        self.sha256 = sha256_of(content)
        self.files: tuple[Path, ...] = (path,)
        require_round_trip(self, path)

    def _own_or_appended(self, own: int) -> int:
        """The file's own control id, or a new one when it has none (-1)."""
        if own >= 0:
            return own
        self._pieces.append(b"")
        return len(self._pieces) - 1

    def encode(self, text: str) -> list[int]:
        utf8(text)
        ids: list[int] = []
        for n, part in enumerate(text.split(SPACE)):
            if n:
                ids += self._space_ids
            ids += self._processor.encode(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[i] for i in require_ids(ids, self.vocab_size)).decode("utf-8", errors="replace")


def _piece_bytes(processor) -> list[bytes]:
    """The UTF-8 bytes each id of the model stands for; empty for control and unknown ids."""
    pieces = []
    for i in range(processor.get_piece_size()):
        piece = processor.id_to_piece(i)
        if processor.is_byte(i):
            pieces.append(bytes([int(piece[3:5], 16)]))  # "<0x41>"
        elif processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i):
            pieces.append(b"")
        else:
            pieces.append(piece.replace(SPACE, " ").encode())
    return pieces
