"""Tensor files of a checkpoint: fragments of parameters in safetensors, written by every rank, read back in any cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mezzotint.models.errors import InputError

CHUNK = 1 << 24  # bytes written and hashed at a time, outside the interpreter lock


@dataclass(frozen=True)
class Piece:
    """Elements start .. start + n of a parameter, of one kind (weights, exp_avg, exp_avg_sq, ema): float32 (n,)."""

    kind: str
    name: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.start}/{self.name}"


def write_pieces(path: Path, pieces: Sequence[Piece]) -> dict:
    """Write a safetensors file of CPU pieces, synced, read back and compared: {"bytes": ..., "sha256": ...}.

    Written here and not by the library, which copies all tensors and holds the interpreter lock until the disk has
    them: training goes on beside this. The format is a length, a JSON header and the bytes. Raises OSError.
    """
    header: dict[str, dict] = {}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.values.numel() * 4
        header[piece.key] = {"dtype": "F32", "shape": [piece.values.numel()], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts: Iterable[memoryview] = (piece.values.numpy().data.cast("B") for piece in pieces)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for part in (memoryview(len(text).to_bytes(8, "little") + text), *parts):
            while part:
                written = file.write(part[:CHUNK])
                digest.update(part[:written])
                part = part[written:]
        os.fsync(file.fileno())
    if sha256(path) != digest.hexdigest():
        raise OSError(f"{path} reads back other bytes than were written")
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Pieces:
    """All tensor files of a checkpoint folder, read by parameter and range, whoever wrote which part."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self._at: dict[tuple[str, str], list[tuple[int, object, str]]] = defaultdict(list)
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118  (no mapping)
                kind, start, name = key.split("/", 2)
                self._at[kind, name].append((int(start), file, key))
        for places in self._at.values():
            places.sort(key=lambda place: place[0])

    def has(self, kind: str) -> bool:
        return any(kind == there for there, _ in self._at)

    def read(self, kind: str, name: str, start: int, size: int) -> Tensor:
        """Elements start .. start + size, float32 (size,); InputError when the folder does not hold them all."""
        found, reached = torch.empty(size), start
        for begin, file, key in self._at[kind, name]:
            part = file.get_slice(key)  # type: ignore[attr-defined]
            end = begin + part.get_shape()[0]
            low, high = max(begin, reached), min(end, start + size)
            if low < high and low == reached:
                found[low - start : high - start] = part[low - begin : high - begin]
                reached = high
        if reached < start + size:
            raise InputError(f"{self.folder} holds {kind} of {name} only up to element {reached}: restore the folder")
        return found

    def whole(self, kind: str, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
        """Every parameter of `kind` in its shape."""
        return {name: self.read(kind, name, 0, _count(shape)).view(shape) for name, shape in shapes.items()}


def _count(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())
