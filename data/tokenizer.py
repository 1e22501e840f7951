"""Owns what a tokenizer promises (text comes back unchanged, control ids no text produces) and how one is opened."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from mezzotint.data.errors import InputError

MASK, EOS, PAD = "<mask>", "<eos>", "<pad>"
SOURCE_JSON = "tokenizer.source.json"  # in a release: the file training used, beside one changed for transformers
SPACE = "\u2581"  # sentencepiece writes a space as this character, so the character itself has no piece of its own
PROBE = (
    " a  b\n\n\tÅ ﬁ ① don't\u2581 <mask><eos><pad> \U0001f600"  # what a tokenizer must give back unchanged to be used
)


class Tokenizer(Protocol):
    """Text to token ids and back; `decode(encode(x)) == x`, and no text produces `mask_id`, `eos_id` or `pad_id`."""

    vocab_size: int  # ids are 0 .. vocab_size - 1, control ids included
    mask_id: int
    eos_id: int
    pad_id: int
    token_bytes: np.ndarray  # (vocab_size,) int32: UTF-8 bytes of text each id stands for; 0 for control ids
    sha256: str  # of the tokenizer's file
    files: tuple[Path, ...]  # what a release folder needs a copy of

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any control id; InputError when `text` is no unicode text (a lone surrogate)."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; control ids stand for nothing, bytes that are no UTF-8 become U+FFFD."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open `tokenizer.model` (sentencepiece), `tokenizer.json` (Hugging Face) or a folder that holds one of them."""
    file = tokenizer_file(Path(path))
    if file.suffix == ".json":
        from mezzotint.data.json_tokenizer import JsonTokenizer

        return JsonTokenizer(file)
    from mezzotint.data.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(file)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer file that `path` means: itself or, in a folder, `tokenizer.model`, else `tokenizer.json`."""
    if path.is_dir():
        for name in ("tokenizer.model", SOURCE_JSON, "tokenizer.json"):
            if (path / name).is_file():
                return path / name
        raise InputError(
            f"{path} holds neither tokenizer.model nor tokenizer.json: make one with `mezzotint-data train-tokenizer`"
        )
    if not path.is_file():
        raise InputError(f"no tokenizer at {path}: make one with `mezzotint-data train-tokenizer --out {path}`")
    if path.suffix not in (".model", ".json"):
        raise InputError(f"{path} is no tokenizer: expected a .model (sentencepiece) or .json (Hugging Face) file")
    return path


def utf8(text: str) -> bytes:
    """`text` as UTF-8; InputError for a lone surrogate, which no bytes stand for. Every other text has tokens."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InputError(
            f"the text has a lone surrogate U+{code:04X} at character {error.start}, which is no unicode text: "
            "remove or replace it"
        ) from error


def require_round_trip(tokenizer: Tokenizer, path: Path) -> None:
    """InputError when the tokenizer changes text (normalization, an added space): scores per byte would be wrong."""
    back = tokenizer.decode(tokenizer.encode(PROBE))
    if back != PROBE:
        raise InputError(
            f"{path} changes text ({PROBE!r} comes back as {back!r}): "
            "use one without normalization and added spaces, such as `mezzotint-data train-tokenizer` makes"
        )


def require_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """`ids` as a list of int; InputError names the first that is outside the vocabulary."""
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise InputError(f"token id {i} is outside the vocabulary of {vocab_size}")
    return checked
