"""Owns a `tokenizer.json` made elsewhere: its own vocabulary, with mask, eos and pad ids appended beyond it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.files import read_json, sha256_of
from mezzotint.data.tokenizer import SPACE, require_ids, require_round_trip, utf8


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`; see `Tokenizer` for what it promises.

    Literal special tokens in a text are read as ordinary text, so no text produces an id that is special to the file.
    Where the file writes spaces as U+2581 and has byte pieces, the character itself goes through those. A file that
    composes characters (NFC) is taken as it is: its ids then stand for the composed text.
    Raises InputError for a damaged file and one that changes plain text.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        spec = read_json(path)
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the binding raises bare Exception and ValueError for a damaged file
            raise InputError(f"{path} is no Hugging Face tokenizer ({error}): export or copy it again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        own = max(vocabulary.values()) + 1
        self.mask_id, self.eos_id, self.pad_id = own, own + 1, own + 2
        self.vocab_size = own + 3
        self.token_bytes = np.zeros(self.vocab_size, dtype=np.int32)
        for piece, i in vocabulary.items():
            self.token_bytes[i] = len(_piece_bytes(piece, spec))
        for i, token in self._tokenizer.get_added_tokens_decoder().items():
            self.token_bytes[i] = len(token.content.encode())
        bytes_of_space = [vocabulary.get(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._space_ids = (
            [i for i in bytes_of_space if i is not None] if "ByteFallback" in str(spec.get("decoder")) else []
        )
        self.sha256 = sha256_of(content)
        self.files: tuple[Path, ...] = (path,)
        require_round_trip(self, path)

    def encode(self, text: str) -> list[int]:
        utf8(text)
        if len(self._space_ids) != 3:  # a byte-level file, for which U+2581 is a character like any other
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        parts = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in text.split(SPACE)]
        return [i for n, part in enumerate(parts) for i in (*(self._space_ids if n else ()), *part)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            utf8(text)
        if self._space_ids and any(SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        control = (self.mask_id, self.eos_id, self.pad_id)
        own = [i for i in require_ids(ids, self.vocab_size) if i not in control]
        return self._tokenizer.decode(own, skip_special_tokens=False)


def _piece_bytes(piece: str, spec: dict) -> bytes:
    """The UTF-8 bytes a piece of the vocabulary stands for, by the alphabet the file's decoder names."""
    decoder = str(spec.get("decoder"))  # nested objects; only the names of its steps are looked for
    if "ByteLevel" in decoder:
        return bytes(BYTE_OF[character] for character in piece if character in BYTE_OF)
    if "ByteFallback" in decoder and len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    if "Metaspace" in decoder or SPACE in decoder:
        return piece.replace(SPACE, " ").encode()
    return piece.removeprefix("##").encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2): itself when printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
