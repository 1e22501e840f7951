"""Scores rows of prepared text with the likelihood bound, one results row each, and sums them up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mezzotint.data.manifest import check_tokenizer, check_vocabulary
from mezzotint.data.rows import Row, RowSource
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.eval.bound import Draws, document_bound
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject, build
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError


@dataclass(frozen=True, kw_only=True)
class BoundConfig:
    """Which rows of which text are scored, and with which draws. None: one draw for each number of masked tokens."""

    data: str
    rows: int = 32
    row_length: int = 1024
    draws: int | None = None
    draw_batch: int = 32
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("rows", "row_length", "draw_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.draws is not None and self.draws < 1:
            raise InputError(f"--draws is {self.draws}; it must be at least 1")


@dataclass(frozen=True)
class Text:
    """Rows of a prepared folder that fit a release, and the bytes of its tokens."""

    rows: RowSource
    token_bytes: np.ndarray


def open_text(subject: Subject, config: BoundConfig) -> Text:
    """Raises InputError where the folder is not prepared text, or of another tokenizer than the release's."""
    rows = RowSource(config.data, config.row_length, subject.config.block_length)
    check_vocabulary(rows.manifest, subject.config.vocab_size)
    tokenizer = load_tokenizer(subject.folder or config.data)
    check_tokenizer(rows.manifest, tokenizer)
    return Text(rows, tokenizer.token_bytes)


def score(subject: Subject, text: Text, config: BoundConfig, results: ResultsFile) -> Iterator[dict]:
    """Score the rows that `results` lacks, writing each as it is done; yields the results row of every text row.

    Rows are spread evenly over the text; fewer where it has fewer.
    """
    per_block = config.draws or subject.config.block_length
    draws = Draws(per_block=per_block, seed=config.seed, batch=config.draw_batch)
    model: Denoiser | None = None
    for number in spread(len(text.rows), config.rows):
        identity = _identity(subject, config, number=number, draws=draws, text=text.rows.manifest.sha256[:16])
        if not results.done(identity):
            model = model or build(subject, dtype=config.dtype, device=config.device)
            values = row_bound(model, text.rows[number], draws=draws, token_bytes=text.token_bytes, number=number)
            finite = bool(np.isfinite(values["nats"]))
            status = "ok" if finite else "error"
            results.append(identity, status=status, values=values if finite else {"message": "the bound is not finite"})
        yield results.get(identity) or {}


def row_bound(model: Denoiser, row: Row, *, draws: Draws, token_bytes: np.ndarray, number: int) -> dict:
    """Nats, tokens and bytes of one row: the sum over its documents, each from an empty state.

    Fill tokens are scored and counted like all others; only the bytes leave them out.
    """
    nats, tokens, documents = 0.0, 0, 0
    for document in range(int(row.documents.max()) + 1):
        piece = row.tokens[row.documents == document]
        nats += document_bound(model, torch.from_numpy(piece), draws=draws, key=f"{number}/{document}")
        tokens, documents = tokens + len(piece), documents + 1
    text = row.tokens[(row.documents >= 0) & ~row.fill]
    return {"nats": nats, "tokens": tokens, "bytes": int(token_bytes[text].sum()), "documents": documents}


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` row numbers spread evenly over `count` rows, the middle of each part; all of them where fewer exist."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def _identity(subject: Subject, config: BoundConfig, *, number: int, draws: Draws, text: str) -> dict[str, object]:
    return {
        "task": "bound",
        "subject": subject.name,
        "text": text,
        "row_length": config.row_length,
        "row": number,
        "draws": draws.per_block,
        "seed": config.seed,
        "dtype": str(config.dtype).removeprefix("torch."),
    }
