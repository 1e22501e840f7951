"""Owns rows as a reader sees them: text by block, with document boundaries, fill and padding marked."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mezzotint.data.errors import InputError
from mezzotint.data.rows import Row, RowSource
from mezzotint.data.tokenizer import Tokenizer, load_tokenizer

DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def show_rows(
    folder: Path, *, first: int, count: int, row_length: int, block_length: int | None, colour: bool
) -> Iterator[str]:
    """Lines that show rows first .. first + count - 1; `block_length` None takes a block as long as the row.

    One line a block: its first token, its number, its text with control characters escaped, and in ⟨⟩ what is no
    text. A character whose bytes lie in two blocks shows as U+FFFD. Raises InputError for rows that are not there and
    lengths that do not fit.
    """
    block = row_length if block_length is None else block_length
    source = RowSource(folder, row_length, block, align=block_length is not None)
    if count < 1:
        raise InputError(f"--rows is {count}: give at least 1")
    if not 0 <= first < len(source):
        raise InputError(f"{folder} has no row {first}: at this length its rows are 0 to {len(source) - 1}")
    tokenizer = load_tokenizer(folder)
    for number in range(first, min(first + count, len(source))):
        row = source[number]
        title = f"row {number} of {len(source)} in {folder}: {_totals(row, block)}"
        yield _painted(title, BOLD, colour)
        yield from _body(row, tokenizer, block, source.goes_on(number), colour)


def _totals(row: Row, block: int) -> str:
    padded = int((row.documents < 0).sum())
    documents = int(row.documents.max()) + 1
    blocks = f"{row.blocks} block{'s' * (row.blocks != 1)} of {block}"
    said = f"{documents} document{'s' * (documents != 1)}"
    return f"{len(row.tokens)} tokens, {blocks}, {said}, {int(row.fill.sum())} fill, {padded} pad"


def _body(row: Row, tokenizer: Tokenizer, block: int, goes_on: bool, colour: bool) -> Iterator[str]:
    valid = int((row.documents >= 0).sum())
    starts = np.flatnonzero(np.diff(row.documents[:valid], prepend=-1))
    cuts = np.unique(np.concatenate([np.arange(0, valid, block), starts, [valid]]))
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist()):
        if low in starts:
            more = " (goes on from the row before)" if low == 0 and goes_on else ""
            yield _painted(f"-- document {int(row.documents[low])}{more} --", BOLD, colour)
        text = _text(row, tokenizer, low, high, colour)
        yield _painted(f"{low:>7} {low // block:>5}  ", DIM, colour) + text
    if valid < len(row.tokens):
        mark = _painted(f"⟨pad x {len(row.tokens) - valid}⟩", DIM, colour)
        yield _painted(f"{valid:>7} {valid // block:>5}  ", DIM, colour) + mark


def _text(row: Row, tokenizer: Tokenizer, low: int, high: int, colour: bool) -> str:
    """Tokens low .. high - 1 of one block and document."""
    fill = int(row.fill[low:high].sum())
    parts: list[str] = []
    ids: list[int] = []
    for token in row.tokens[low : high - fill].tolist():
        if token == tokenizer.eos_id:
            parts += [escaped(tokenizer.decode(ids)), _painted("⟨eos⟩", DIM, colour)]
            ids = []
        else:
            ids.append(token)
    parts.append(escaped(tokenizer.decode(ids)))
    if fill:
        parts.append(_painted(f"⟨fill x {fill}⟩", DIM, colour))
    return "".join(parts)


def escaped(text: str) -> str:
    """`text` on one line: backslash, newline, tab and whatever a terminal would act on as escapes."""
    known = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "".join(known.get(c) or (c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def _painted(text: str, style: str, colour: bool) -> str:
    return f"{style}{text}{PLAIN}" if colour else text
