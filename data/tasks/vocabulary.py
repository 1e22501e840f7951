"""What tasks are written in: the tokens of a tokenizer, or plain symbols where there is none, and real text in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mezzotint.data.corpus import corpus_documents
from mezzotint.data.errors import InputError
from mezzotint.data.files import sha256_of
from mezzotint.data.manifest import check_tokenizer, read_manifest
from mezzotint.data.open_files import open_files
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer

TEXT_TOKENS = 2**20  # of real text that haystacks are cut from, the first of the folder or corpus
STDLIB = "stdlib"


@dataclass(frozen=True)
class RealText:
    """Tokens of running text without control ids."""

    tokens: np.ndarray  # (n,) int32
    ends_line: np.ndarray  # (n,) bool: the token is the last of a line
    fingerprint: str


class Vocabulary:
    """The ids that prompts are made of. `tokenizer` None: plain symbols, for the tasks that need no words.

    text: where real text comes from, a prepared folder of the same tokenizer or `stdlib`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        size: int,
        control: tuple[int, int, int],
        text: str | Path = STDLIB,
    ) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.mask_id, self.eos_id, self.pad_id = control
        self._text = str(text)
        if tokenizer is None:
            self.symbols = np.array([i for i in range(size) if i not in control])
            self.fingerprint = f"symbols-{size}-{'-'.join(map(str, control))}"
        else:
            self.symbols = np.flatnonzero(tokenizer.token_bytes > 0)
            self.fingerprint = tokenizer.sha256[:16]
        self.encode = functools.lru_cache(maxsize=4096)(self._encode)

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, text: str | Path = STDLIB) -> Vocabulary:
        control = (tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id)
        return cls(tokenizer, size=tokenizer.vocab_size, control=control, text=text)

    @classmethod
    def load(cls, path: str | Path, *, text: str | Path = STDLIB) -> Vocabulary:
        """That of a tokenizer file, or of a folder that holds one. Raises InputError."""
        return cls.of(load_tokenizer(path), text=text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._words("a text").encode(text))

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Tokens of each line, not remembered."""
        return self._words("a text").encode_batch(lines)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; ids of a padded vocabulary, beyond the tokenizer's, stand for no text."""
        tokenizer = self._words("a text")
        return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])

    def _words(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{what} needs a tokenizer, and there is none: only mqar and copy do without")
        return self.tokenizer

    @functools.cached_property
    def real_text(self) -> RealText:
        """The first TEXT_TOKENS tokens of the folder or corpus. Raises InputError where it has none, or other tokens."""
        tokenizer = self._words("real text")
        tokens = self._corpus_tokens(tokenizer) if self._text == STDLIB else self._folder_tokens(tokenizer)
        if len(tokens) < 1000:
            raise InputError(f"{self._text} holds {len(tokens)} tokens of text: give a folder with 1000 or more")
        last = np.array([tokenizer.decode([int(i)]).endswith("\n") for i in range(tokenizer.vocab_size)])
        return RealText(tokens, last[tokens], sha256_of(tokens.astype("<i4").tobytes())[:16])

    def _corpus_tokens(self, tokenizer: Tokenizer) -> np.ndarray:
        pieces, found = [], 0
        for _, text in corpus_documents(STDLIB):
            pieces.append(np.array(tokenizer.encode(text), dtype=np.int32))
            found += len(pieces[-1])
            if found >= TEXT_TOKENS:
                break
        return np.concatenate(pieces)[:TEXT_TOKENS]

    def _folder_tokens(self, tokenizer: Tokenizer) -> np.ndarray:
        manifest = read_manifest(self._text)
        check_tokenizer(manifest, tokenizer)
        pieces, left = [], TEXT_TOKENS
        for file, shard in zip(open_files(manifest), manifest.shards):
            stored = shard.tokens - (shard.documents if file.adds_eos else 0)
            piece = file.read(0, min(left, stored))
            pieces.append(piece[tokenizer.token_bytes[piece] > 0].astype(np.int32))
            left -= len(piece)
            if left <= 0:
                break
        return np.concatenate(pieces)
