"""A text file of any length as pieces of tokens: read, decoded and tokenized a little at a time."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mezzotint.data.tokenizer import Tokenizer
from mezzotint.models.errors import InputError

READ = 1 << 16  # bytes read at once
HELD = 1 << 18  # characters that wait for a good place to cut; then they are cut at any place
CUT = re.compile(r"(?<=[^\W_])(?=\n)")  # where a line ends with a letter or a digit


@dataclass(frozen=True)
class Document:
    """A UTF-8 text file, counted: `tokens` and `bytes` of the whole, `sha256` of its bytes."""

    path: Path
    tokens: int
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name


def open_document(path: str | Path, tokenizer: Tokenizer) -> Document:
    """Reads the file once. Raises InputError for one that cannot be read, is no UTF-8 text or is empty."""
    digest, tokens, size = hashlib.sha256(), 0, 0
    for text in _texts(Path(path)):
        content = text.encode()
        digest.update(content)
        size += len(content)
        tokens += len(tokenizer.encode(text))
    if tokens == 0:
        raise InputError(f"the document {path} is empty: there is nothing to score")
    return Document(Path(path), tokens, size, digest.hexdigest())


def token_pieces(document: Document, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """The document's tokens, (n,) int64 at a time. Raises InputError where the file has changed since it was counted."""
    digest = hashlib.sha256()
    for text in _texts(document.path):
        digest.update(text.encode())
        yield torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    if digest.hexdigest() != document.sha256:
        raise InputError(f"{document.path} was changed while it was scored: run the command again")


def _texts(path: Path) -> Iterator[str]:
    """The file's text in pieces cut between a letter or digit and the end of its line.

    Tokenizers cut there too (sentencepiece with a piece for the newline, and the usual patterns of byte-level BPE), so the
    tokens are those of the whole text. A run of more than HELD characters without such a place is cut where it is: its
    tokens are then other ones of the same text, for which the bound is as valid.
    """
    held = ""
    for more in _decoded(path):
        held += more
        cuts = [match.start() for match in CUT.finditer(held)]
        while cuts or len(held) > HELD:
            at = cuts[-1] if cuts else HELD
            yield held[:at]
            held, cuts = held[at:], []
    if held:
        yield held


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    try:
        with path.open("rb") as file:
            while content := file.read(READ):
                yield decoder.decode(content)
                place += len(content)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InputError(f"the document {path} is no UTF-8 text (near byte {place + error.start})") from error
    except OSError as error:
        raise InputError(f"cannot read the document {path}: {error.strerror}") from error
