"""What is kept between the steps of a canvas: picked columns, keys and values per layer, segments outside of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.rope import rotate


@dataclass(frozen=True)
class Pick:
    """Some columns of a canvas of `length`: the same run in every row, or a list a row.

    Tensors over columns have one more, the last: rows with fewer columns than others pad their list with it, so that
    what is computed there is written where nobody reads.
    """

    run: slice | None
    index: Tensor | None  # (B, Q)
    counts: Tensor  # (B,) columns of each row, on the CPU
    length: int

    @classmethod
    def of(cls, chosen: Tensor) -> Pick:
        """From a mask (B, L)."""
        batch, length = chosen.shape
        host = chosen.cpu()
        counts = host.sum(dim=1)
        most = int(counts.max()) if batch else 0
        if most and bool((host == host[:1]).all()):
            first = int(host[0].int().argmax())
            if bool(host[0, first : first + most].all()):
                return cls(slice(first, first + most), None, counts, length)
        order = (~host).int().argsort(dim=1, stable=True)[:, :most]
        index = torch.where(torch.arange(most) < counts[:, None], order, length)
        return cls(None, index.to(chosen.device), counts, length)

    @property
    def total(self) -> int:
        """Columns of all rows."""
        return int(self.counts.sum())

    def behind(self, first: int) -> Pick:
        """The same columns of a canvas whose first `first` columns, none of them picked, are cut off."""
        if first == 0:
            return self
        if self.run is not None:
            run = slice(self.run.start - first, self.run.stop - first)
            return Pick(run, None, self.counts, self.length - first)
        assert self.index is not None
        return Pick(None, self.index - first, self.counts, self.length - first)

    def take(self, values: Tensor) -> Tensor:
        """(B or 1, L+1, ...) -> (B or 1, Q, ...)."""
        if self.run is not None:
            return values[:, self.run]
        assert self.index is not None
        if values.shape[0] == 1:
            return values[0][self.index]
        return values[_rows(self.index), self.index]

    def put(self, values: Tensor, new: Tensor) -> None:
        """Write new (B, Q, ...) into values (B, L+1, ...)."""
        if self.run is not None:
            values[:, self.run] = new
        else:
            assert self.index is not None
            values[_rows(self.index), self.index] = new


def _rows(index: Tensor) -> Tensor:
    return torch.arange(len(index), device=index.device)[:, None]


@dataclass(frozen=True)
class Segment:
    """Keys and values (B or 1, S, Hkv, P) that queries may look at; of a batch of 1, all rows read the same memory.

    tables: cosine and sine of the keys' positions where the keys are kept before their rotation, so that they can stand
    at any place; None where they are rotated already. seen (B, S) or (B, S, Hkv): False for keys that are not looked at.
    """

    k: Tensor
    v: Tensor
    tables: tuple[Tensor, Tensor] | None = None
    seen: Tensor | None = None

    def keys(self) -> Tensor:
        """The keys, rotated."""
        return self.k if self.tables is None else rotate(self.k, self.tables)


@dataclass
class Memory:
    """Per layer, keys and values (B, L+1-first, Hkv, P) of a canvas, rotated; hidden states (B, L+1, D) where carried.

    Columns before `first[layer]` stand outside of the canvas at that layer, in its segments.
    """

    k: list[Tensor]
    v: list[Tensor]
    first: tuple[int, ...]
    hidden: list[Tensor]  # outputs of every layer, or the changes it made; empty where not carried

    def segment(self, layer: int) -> Segment:
        return Segment(self.k[layer][:, :-1], self.v[layer][:, :-1])


def held_bytes(*things: object) -> int:
    """Bytes of the storages behind all tensors in `things` (dataclasses, lists, tuples, dicts), each storage once."""
    found: dict[int, int] = {}
    waiting: list[object] = list(things)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            waiting += [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return sum(found.values())
