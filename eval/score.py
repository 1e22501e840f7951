"""Scores rows of prepared text, or whole text files, with the likelihood bound: one results row each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from mezzotint.data.manifest import check_tokenizer, check_vocabulary
from mezzotint.data.rows import Row, RowSource
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.eval.bound import Draws, stream_bound
from mezzotint.eval.draws import DESIGN
from mezzotint.eval.generate import require_same_vocabulary
from mezzotint.eval.memory import available_bytes, both_units
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.scoring_plan import scoring_bytes
from mezzotint.eval.stream import Document, open_document, token_pieces
from mezzotint.eval.subjects import Subject, build
from mezzotint.eval.tally import Tally
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError

ROW_BYTES = 24  # of each token of a row: its id, document and place, int64


@dataclass(frozen=True, kw_only=True)
class BoundConfig:
    """What is scored, and with which draws: `rows` of the prepared folder `data`, or the text files `documents`.

    draws None: as many as a block has tokens.
    """

    data: str | None = None
    documents: tuple[str, ...] = ()
    rows: int = 32
    row_length: int = 1024
    draws: int | None = None
    draw_batch: int = 32
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.data is None) == (not self.documents):
            raise InputError("give either --data, a folder of prepared text, or --document, a text file")
        for name in ("rows", "row_length", "draw_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.draws is not None and self.draws < 2:
            raise InputError(f"--draws is {self.draws}; it must be at least 2")

    def draws_of(self, subject: Subject) -> Draws:
        per_block = self.draws or subject.config.block_length
        return Draws(per_block=per_block, seed=self.seed, batch=self.draw_batch)

    def identity(self, subject: Subject) -> dict[str, object]:
        """What rows of prepared text and documents have in common."""
        return {
            "task": "bound",
            "subject": subject.name,
            "draws": self.draws_of(subject).per_block,
            "design": DESIGN,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device,
        }


@dataclass(frozen=True)
class Text:
    """Rows of a prepared folder that fit a release, and the bytes of its tokens."""

    rows: RowSource
    token_bytes: np.ndarray


def open_text(subject: Subject, config: BoundConfig) -> Text:
    """Raises InputError where the folder is not prepared text, or of another tokenizer than the release's."""
    assert config.data is not None
    rows = RowSource(config.data, config.row_length, subject.config.block_length)
    check_vocabulary(rows.manifest, subject.config.vocab_size)
    needed = (
        scoring_bytes(subject.config, rows=1, length=config.row_length, canvases=1, itemsize=config.dtype.itemsize)
        + ROW_BYTES * config.row_length
    )
    if needed > available_bytes(config.device):
        raise InputError(
            f"a row of {config.row_length} tokens needs {both_units(needed)}, which are not available: take a shorter "
            "--row-length"
        )
    tokenizer = load_tokenizer(subject.folder or config.data)
    check_tokenizer(rows.manifest, tokenizer)
    return Text(rows, tokenizer.token_bytes)


def score(subject: Subject, text: Text, config: BoundConfig, results: ResultsFile) -> Iterator[dict]:
    """Score the rows that `results` lacks, writing each as it is done; yields the results row of every text row.

    Rows are spread evenly over the text; fewer where it has fewer.
    """
    draws = config.draws_of(subject)
    common = config.identity(subject) | {"text": text.rows.manifest.sha256[:16], "row_length": config.row_length}
    model: Denoiser | None = None
    for number in spread(len(text.rows), config.rows):
        identity = common | {"row": number}
        if not results.done(identity):
            model = model or build(subject, dtype=config.dtype, device=config.device)
            values = row_bound(model, text.rows[number], draws=draws, token_bytes=text.token_bytes, number=number)
            _append(results, identity, values)
        yield results.get(identity) or {}


def row_bound(model: Denoiser, row: Row, *, draws: Draws, token_bytes: np.ndarray, number: int) -> dict:
    """Nats, their error, tokens and bytes of one row: the sum over its documents, each from an empty state.

    Fill tokens are scored and counted like all others; only the bytes leave them out.
    """
    tally, documents = Tally(), int(row.documents.max()) + 1
    for document in range(documents):
        piece = torch.from_numpy(row.tokens[row.documents == document])
        key = f"{number}/{document}"
        for _ in stream_bound(model, [piece], length=len(piece), draws=draws, key=key, tally=tally):
            pass
    text = row.tokens[(row.documents >= 0) & ~row.fill]
    return tally.values() | {"bytes": int(token_bytes[text].sum()), "documents": documents}


@dataclass(frozen=True)
class Documents:
    """Counted text files, and the tokenizer they were counted with."""

    files: list[Document]
    tokenizer: Tokenizer


def open_documents(subject: Subject, config: BoundConfig) -> Documents:
    """The files, counted with the release's tokenizer. Raises InputError for files that are no text."""
    if subject.folder is None:
        raise InputError(f"{subject.name} has no tokenizer: give a release folder")
    tokenizer = load_tokenizer(subject.folder)
    require_same_vocabulary(tokenizer, subject.config, release=str(subject.folder))
    return Documents([open_document(path, tokenizer) for path in config.documents], tokenizer)


def score_documents(
    subject: Subject, documents: Documents, config: BoundConfig, results: ResultsFile
) -> Iterator[dict]:
    """Score the files that `results` lacks, writing each as it is done; yields the results row of every file.

    A file is one document from an empty state. It is scored as it stands, without an `<eos>` behind it.
    """
    draws = config.draws_of(subject)
    model: Denoiser | None = None
    for document in documents.files:
        identity = config.identity(subject) | {"text": document.sha256[:16], "document": document.name}
        if not results.done(identity):
            model = model or build(subject, dtype=config.dtype, device=config.device)
            tally, pieces = Tally(), token_pieces(document, documents.tokenizer)
            with tqdm(total=document.tokens, unit="token", desc=document.name, disable=None) as progress:
                for done in stream_bound(
                    model, pieces, length=document.tokens, draws=draws, key=document.sha256, tally=tally
                ):
                    progress.update(done - progress.n)
            _append(results, identity, tally.values() | {"bytes": document.bytes, "documents": 1})
        yield results.get(identity) or {}


def _append(results: ResultsFile, identity: dict[str, object], values: dict) -> None:
    finite = bool(np.isfinite(values["nats"]))
    found = values if finite else {"message": "the bound is not finite"}
    results.append(identity, status="ok" if finite else "error", values=found)


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` row numbers spread evenly over `count` rows, the middle of each part; all of them where fewer exist."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]
